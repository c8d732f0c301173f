"""Writes a Record as one HTML file that needs no network.

arrays: named arrays as bytes, which assets/payload.js decodes
vectors: the queries, keys and values behind a layer
payload: a Record as compressed bytes: a JSON header and the arrays
images: grids of patches, pictures, and the weights between text and image
sounds: samples and spectrograms of recordings
requests: rows and tiles on demand
bundle: the JavaScript modules of assets/ as one script
document: the HTML file
comparison: the HTML file of a Comparison
history: the HTML file of a monitored training
"""

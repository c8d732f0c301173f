"""Shows a Record in a terminal, in figures and in an HTML page. Views take a Record; Weights and layers become one.

units: split a sequence into words or tokens
selection: which head and which query a view shows, and their attention weights
colors: color ramps for terminals and plots
display: a Record of Weights or of a layer
widget: what a notebook displays
terminal: a Record as colored text
figures: a Record as matplotlib figures
page: a Record as one HTML file
"""

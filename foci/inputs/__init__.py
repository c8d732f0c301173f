"""Turns files and text into tensors.

tables: TSV, CSV and JSONL rows, text files, plain or compressed
files: describes a path for error messages, detects the format of a file
text: tokenizers: bytes, characters, words, BPE
bpe: byte-pair encoding, trained or read from a model file
tokenizer_choice: chooses tokenizer and vocabulary by counting words
image: image files into pixels
image_augmentation: random changes of image batches
audio: audio files into samples, samples into log-mel spectrograms
audio_augmentation: random changes of samples and spectrograms
sample_cache: keeps decoded files in memory between epochs
padding: pads sequences into one tensor and groups them by size
"""

"""Prints a Record as colored text.

styled_text: the page of lines, with colors or with shade characters
heads: a table of metrics for all heads
text: the running text, tinted by the attention weights of one query
matrix: the attention matrix, as cells or as a map
patches: the patches of an image, tinted by attention weights
comparison: two records side by side
record: all parts together; `Record.show` prints it
"""

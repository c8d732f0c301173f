"""Draws a Record as matplotlib figures.

theme: fonts, colors, ticks and titles of all figures
plots: the figures; `Record.save` writes one
masks: the picture of a mask
"""

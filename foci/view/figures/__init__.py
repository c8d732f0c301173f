"""Draws a Record as matplotlib figures.

theme: fonts, colors, ticks and titles of all figures
plots: the figures; `Record.save` writes one
history: every head over the steps of a training
masks: the picture of a mask
"""

"""Draws a Record as matplotlib figures.

theme: fonts, colors, ticks and titles of all figures
plots: the figures; `Record.save` writes one
word_maps: words on images, at denoising steps too
comparison: two records side by side
history: every head over the steps of a training
masks: the picture of a mask
"""

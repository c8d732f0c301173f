"""Record: the recorded attention of a model, with labels; read by head, saved to a file, drawn by views.

from_tensors: builds a record from attention matrices of another library.
labels: what the positions along an axis are: tokens, patches, frames.
token_texts: the texts of tokens, ready to print, from offsets or token ids.
pictures: pictures of labels, of a bounded size.
layer: one attention layer, backed by lazy weights, kept statistics or a dense matrix.
kept: `Keep`, which statistics to keep in place of weights, and the kept statistics themselves.
window_weights: attention within windows as one matrix over the whole grid of patches.
step_mean: the mean over the denoising steps of a diffusion model.
dense: a dense matrix with the methods of `Weights`.
metrics: head scores, their totals over a data set, and rollout.
image_maps: where in an image a word looks, and which words look at a part of it.
patch_layout: weights on patches at their places in an image.
words: the words of a text and their positions.
head_totals: sums, histograms and maxima over the queries of each head.
history: every head over the steps of a monitored training.
record: Record itself.
compare: two records side by side, with positions aligned by tokens.
file: saves and loads `.foci` files.
"""

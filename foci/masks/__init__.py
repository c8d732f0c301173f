"""Masks: which keys each query can attend to.

tile: the sizes of a call, and the positions of a tile of the matrix.
ranges: the visible keys of each query as key ranges, so that kernels skip the others.
base: `Mask`, the operators `&`, `|`, `~`, and the drawing.
kinds: causal, window, padding, documents, prefix, mask_function.
"""

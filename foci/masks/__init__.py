"""Masks: which keys each query can attend to.

tile: the sizes of a call, and the positions of a tile of the matrix.
range_algebra: key ranges and their operators `&`, `|`, `~`, so that kernels skip fully masked keys.
base: `Mask`, the operators `&`, `|`, `~`, and the drawing.
kinds: causal, window, padding, documents, prefix, mask_function; each computes its visible key ranges.
kernel_inputs: converts a mask into what our kernels read: key ranges, document ids and a dense tensor.
"""

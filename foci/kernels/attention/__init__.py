"""Attention with masks, softcaps and ALiBi: Triton device code. Row tables by distance are in distance_bias.

tile: loads of rows, the logits of a tile, and the tiles that need no mask.
forward: output and log-sum-exp.
backward: gradients in two passes without atomics, and the query tiles of each key tile.
"""

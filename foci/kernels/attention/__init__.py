"""Attention with masks, softcaps, ALiBi and dense biases: Triton device code. distance_bias has the row tables.

tile: loads of rows, the logits of a tile, visible keys, and the tiles that need no mask.
forward: output and log-sum-exp.
backward: gradients in passes without atomics, and the query tiles of each key tile.
few_queries: gradients of few queries, in one pass.
"""

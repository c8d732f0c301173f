"""Triton and Gluon kernels that compute statistics of the attention weights without storing them.

tiles: the pass over the tiles of the weights
tiles_hopper: the same pass for Hopper GPUs
sums_hopper: sums over queries in the Hopper kernel
picture: pictures whose cells do not align with tiles
sort: the largest values of each row
topk: the top keys of each query, selected from the candidates of the pass
merge: merges the partial results of the programs
"""

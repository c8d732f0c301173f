"""Triton and Gluon kernels that compute statistics of the attention weights without storing them.

tiles: the pass over the tiles of the weights
tiles_hopper: the same pass for Hopper GPUs
sums_hopper: sums over queries in the Hopper kernel
short: all statistics of short sequences in one launch
entries: exact entries of a few rows
columns: columns of the weights of calls without masks
picture: pictures of the largest weight of each cell
sort: the largest values of each row
topk: the top keys of each query, selected from the candidates of the pass
biased_logits: logits with softcap, ALiBi and row tables
additive_logits: logits of additive scores
merge: merges the partial results of the programs
"""

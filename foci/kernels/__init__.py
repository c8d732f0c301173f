"""Device code. It imports nothing else of foci; gpu/, statistics/, weights/ and backends/ launch it.

logits: logits, log-sum-exps and visible keys, shared by the Triton kernels
self_check: a small kernel to check launches with
dropout: the dropout mask
additive: additive attention
attention: attention with masks, softcap and ALiBi
distance_bias: attention with a bias that depends on the distance of query and key
statistics: statistics of the attention weights in one pass
divergence: the divergence of two attention matrices
rdrop: the R-Drop loss
c: C sources for the CPU, compiled on first use by runtime/native.py
"""

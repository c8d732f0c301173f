"""Triton kernels of attention with a bias that depends on the distance of query and key.

tables: row tables of buckets, visible tiles, and bucket sums
forward: output and log-sum-exp
backward: gradients of queries, keys, values, row tables and slopes
"""

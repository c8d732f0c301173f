"""Triton kernels of additive attention, wᵀ tanh(q + k).

exponentials: e^2q and e^2k, computed once per query and key
forward: output and log-sum-exp, and the merge of split keys
decode: forward and backward of very few queries
two_pass_backward: the deterministic backward
one_pass_prologue_epilogue: the kernels before and after the one-pass backward
one_pass_backward: the fast backward
"""

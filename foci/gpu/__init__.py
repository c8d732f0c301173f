"""The launch layer of our Triton kernels: from a call to kernel arguments, tiles and launches.

arguments: tensor layouts, strides and tile sizes of all kernels
launcher: launches kernels, and replays compiled ones for later calls of the same shapes
compiled_launch: launches compiled kernels with little host time
compilation: compiles kernels in parallel, also ahead of a call
self_check: checks fast paths once on a version of Triton that they were not run with
triton_hash: stores the hash of Triton's files for later processes
additive: additive attention, forward and backward
attention: dot-product attention with masks, softcaps and distance biases, forward and backward
"""

"""The launch layer of our Triton kernels: from a call to kernel arguments, tiles and launches.

mask_inputs: converts a mask into key ranges, document ids and a dense tensor
launcher: launches kernels, and replays compiled ones for later calls of the same shapes
additive: additive attention, forward and backward
distance_bias: attention with ALiBi, Buckets or Relative, forward and backward
"""

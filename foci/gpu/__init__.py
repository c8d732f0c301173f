"""The launch layer of our Triton kernels: from a call to kernel arguments, tiles and launches.

mask_inputs: converts a mask into key ranges, document ids and a dense tensor
launcher: launches kernels, and replays compiled ones for later calls of the same shapes
additive: additive attention, forward and backward
attention: dot-product attention with masks, softcaps and distance biases, forward and backward
"""

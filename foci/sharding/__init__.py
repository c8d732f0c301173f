"""Attention of tensors that are spread over a DeviceMesh: DTensors in, DTensors out, and so are the statistics.

Every process attends with its own queries to all of their keys. Batch and heads need no communication; where the
sequence is sharded, the keys and values are gathered first.

layout: which axis of a call each dimension of the mesh shards, and the part of this process
call_parts: masks, biases and scores of one part of the matrix
local_call: the tensors and arguments of this process
attention: `foci.attention` for DTensors
weights: `ShardedWeights`, the lazy matrix behind the result
modules: attention modules that have a part of the heads and tokens
balance: an order of the tokens that gives every process the same work under a causal mask
"""

from foci.sharding.balance import head_tail_order as head_tail_order

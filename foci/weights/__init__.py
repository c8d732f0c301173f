"""The attention matrix as a lazy operator.

weights: `Weights`, which computes entries, products and statistics when they are requested.
tensors: the tensors behind `Weights`, and the detection of in-place changes.
indexing: parses an index of the matrix.
slices: computes exact entries.
products: products with the matrix and its transpose.
grouping: parses groups of tokens.
checks: checks the arguments that all lazy matrices take.
summary: `Top` and `Summary`, the results of several statistics.
parts_file: tensors, masks, scores and biases as one safetensors file.
file: checks and rebuilds weights from a file.
encoding: a call as plain arguments of an operator.
operators: statistics, slices and products as operators, for torch.compile and torch.export.
key_mass: the weight that queries put on given keys.
divergence: the divergence of two matrices, as an operator, too.
dense_attention: attention together with its whole matrix, for callers that need both at once.
dense_attention_c: the same in compiled C, on a CPU.
"""

"""kernels/additive."""

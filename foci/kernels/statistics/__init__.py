"""kernels/statistics."""

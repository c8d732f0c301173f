"""kernels/distance_bias."""

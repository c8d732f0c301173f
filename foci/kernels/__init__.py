"""Device code: Triton kernels, and nothing of foci above them."""

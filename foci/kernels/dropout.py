"""The dropout mask: a hash of batch, head, query and key, bit for bit that of the reference."""

# Device code carries no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def hash_32_bits(x):
    """A 32-bit integer hash in 64-bit arithmetic."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


@triton.jit
def dropout_keeps(seed, b, h, i, j, threshold):
    """Which entries dropout keeps. seed is the random int64 of the call; i and j broadcast to the tile."""
    noise = hash_32_bits(hash_32_bits(seed + b) * 5 + h)
    noise = hash_32_bits(noise * 5 + i.to(tl.int64))
    return hash_32_bits(noise * 5 + j.to(tl.int64)) >= threshold

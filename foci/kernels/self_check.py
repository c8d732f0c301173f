"""A small kernel with every kind of argument, to check how this version of Triton launches compiled kernels."""

# Device code carries no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["length"])
def combine_rows(x, y, out, length, one, stride, scale, BLOCK: tl.constexpr, SUBTRACT: tl.constexpr):
    """Write scale * x + y, or x - y, of one row: `one` is compiled as a constant, `stride` as a multiple of 16."""
    column = tl.arange(0, BLOCK)
    offsets = tl.program_id(0) * stride + column * one
    a = tl.load(x + offsets, mask=column < length, other=0.0)
    b = tl.load(y + offsets, mask=column < length, other=0.0)
    tl.store(out + offsets, a * scale - b if SUBTRACT else a * scale + b, mask=column < length)

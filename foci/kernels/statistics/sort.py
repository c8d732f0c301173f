"""The largest values of each row in descending order: a bitonic network over tensors (R, N).

Exchanges stay within a thread if it holds a whole row. The order of equal values is not defined.

L is the length of the lists that a row consists of. L and N are powers of two.
"""

# Device code carries no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def compare_exchange(x, L: tl.constexpr, D: tl.constexpr):
    """Compare and exchange values at distance D, in lists of L that alternate between descending and ascending."""
    R: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    if N == L:
        a, b = tl.split(tl.permute(tl.reshape(x, (R, L // (2 * D), 2, D)), (0, 1, 3, 2)))
        pairs = tl.permute(tl.join(tl.maximum(a, b), tl.minimum(a, b)), (0, 1, 3, 2))
    else:
        lists = tl.reshape(x, (R, N // (2 * L), 2, L // (2 * D), 2, D))
        a, b = tl.split(tl.permute(lists, (0, 1, 3, 5, 2, 4)))
        high_down, high_up = tl.split(tl.maximum(a, b))
        low_down, low_up = tl.split(tl.minimum(a, b))
        pairs = tl.join(tl.join(high_down, low_up), tl.join(low_down, high_up))
        pairs = tl.permute(pairs, (0, 1, 4, 2, 5, 3))
    return tl.reshape(pairs, (R, N))


@triton.jit
def sort_lists(x, LOG: tl.constexpr):
    """Sort lists of 2 ** LOG values; they alternate between descending and ascending order."""
    for m in tl.static_range(LOG):
        for n in tl.static_range(m + 1):
            x = compare_exchange(x, 2 << m, (1 << m) >> n)
    return x


@triton.jit
def reverse_list(x, LOG: tl.constexpr):
    """Reverse lists of 2 ** LOG values."""
    R: tl.constexpr = x.shape[0]
    for n in tl.static_range(LOG):
        a, b = tl.split(tl.permute(tl.reshape(x, (R, 1 << n, 2, (1 << LOG) >> (n + 1))), (0, 1, 3, 2)))
        x = tl.reshape(tl.permute(tl.join(b, a), (0, 1, 3, 2)), (R, 1 << LOG))
    return x


@triton.jit
def merge_larger_halves(a, b, LOG: tl.constexpr):
    """Merge descending with ascending lists: their larger halves in order, and the maximum of the rest."""
    left = tl.minimum(a, b)
    x = tl.maximum(a, b)
    for n in tl.static_range(LOG):
        x = compare_exchange(x, 1 << LOG, (1 << LOG) >> (n + 1))
    return x, tl.max(left, 1)


@triton.jit
def select_largest(x, LOG_N: tl.constexpr, LOG: tl.constexpr):
    """The 2 ** LOG largest of 2 ** LOG_N values in descending order, and the maximum of the rest; -inf if none."""
    L: tl.constexpr = 1 << LOG
    R: tl.constexpr = x.shape[0]
    x = sort_lists(x, LOG)
    left = tl.full((R,), -float("inf"), tl.float32)
    for n in tl.static_range(LOG_N - LOG):
        lists = tl.reshape(x, (R, (1 << LOG_N) // (2 * L) >> n, 2, L))
        a, b = tl.split(tl.permute(lists, (0, 1, 3, 2)))
        a = tl.reshape(a, (R, a.shape[1] * L))
        b = tl.reshape(b, (R, b.shape[1] * L))
        x, rest = merge_larger_halves(a, b, LOG)
        left = tl.maximum(left, rest)
    return x, left


@triton.jit
def right_neighbors(x):
    """The right neighbor of each value; NaN for the last."""
    R: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    if N == 1:
        right = tl.full((R, 1), float("nan"), tl.float32)
    else:
        even, odd = tl.split(tl.reshape(x, (R, N // 2, 2)))
        right = tl.reshape(tl.join(odd, right_neighbors(even)), (R, N))
    return right


@triton.jit
def has_ties(x):
    """Whether two neighbors in a row are equal: (R, N) -> (R,)."""
    return tl.max((x == right_neighbors(x)).to(tl.int32), 1) > 0

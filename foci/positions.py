"""Position encodings of the inputs: a sinusoidal table that is added to embeddings, and rotary embedding.

Shapes: B batch, H heads, T length, D width.
"""

import torch
from torch import Tensor


def sinusoidal(
    length: int,
    width: int,
    *,
    base: float = 10000.0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """The table of sines and cosines that Vaswani et al. add to the embeddings; row p encodes position p.

    Column 2i holds sin(p / base^(2i / width)) and column 2i + 1 the cosine of the same angle, so each pair of columns
    is a rotation, slower from left to right. With an odd width the last pair has only its sine.

    >>> foci.sinusoidal(3, 4)
    tensor([[ 0.0000,  1.0000,  0.0000,  1.0000],
            [ 0.8415,  0.5403,  0.0100,  0.9999],
            [ 0.9093, -0.4161,  0.0200,  0.9998]])
    >>> embeddings = torch.randn(2, 3, 4)
    >>> (embeddings + foci.sinusoidal(3, 4)).shape
    torch.Size([2, 3, 4])

    Args:
        length: rows, for the positions 0 to length - 1.
        width: columns, the width of the embeddings.
        base: the slowest pair takes about 2 pi base positions for a turn.
        dtype, device: of the result; None means PyTorch's defaults.
    """
    if length < 0 or width < 1:
        raise ValueError(f"length must be >= 0 and width >= 1, got length {length} and width {width}")
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating point dtype, got {dtype}")
    target = torch.get_default_device() if device is None else torch.device(device)
    if target.type == "meta":
        return torch.empty(length, width, dtype=dtype, device=target)
    # At position 100,000 a float32 angle has an error of up to 0.005, and only the CPU is sure to support float64.
    positions = torch.arange(length, dtype=torch.float64, device="cpu")
    angles = positions[:, None] * _frequencies(width, base, like=positions)
    table = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)[:, :width]
    return table.to(device=target, dtype=dtype)


def rotary(
    x: Tensor,
    positions: Tensor | None = None,
    *,
    width: int | None = None,
    base: float = 10000.0,
    interleaved: bool = False,
) -> Tensor:
    """Rotates pairs of columns of x (..., T, D) by angles proportional to the position (RoPE, Su et al.).

    Rotate queries and keys, not values, before the call to attention. Pair i of a token at position p is rotated
    by p / base^(2i / width). The score of a query at position m with a key at position n then depends on m and n only
    through m - n: moving both by the same number of positions does not change it.

    >>> x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    >>> foci.rotary(x)  # one pair, rotated by 0, 1 and 2 radians
    tensor([[ 1.0000,  0.0000],
            [ 0.5403,  0.8415],
            [-0.4161,  0.9093]])
    >>> query, key = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor([[0.5, -1.0, 2.0, 0.0]])
    >>> def score(m, n):
    ...     return foci.rotary(query, torch.tensor([m])) @ foci.rotary(key, torch.tensor([n])).mT
    >>> score(7, 4), score(107, 104), score(7, 5)
    (tensor([[-8.2435]]), tensor([[-8.2435]]), tensor([[-4.1699]]))

    Args:
        x: (..., T, D), floating point. The result has its shape and dtype; angles and products are at least float32.
        positions: int tensor (T,), or (B, T) for the first dimension of x; None means 0 to T - 1.
        width: rotates only the first `width` columns, an even number (partial rotary); None means all of them.
        base: the slowest pair takes about 2 pi base positions for a turn.
        interleaved: False pairs column i with i + width / 2 (Llama, NeoX); True pairs 2i with 2i + 1 (paper, GPT-J).
    """
    width = _rotated_width(x, width)
    angles = _angles(x, positions, width, base)
    cos, sin = angles.cos(), angles.sin()
    columns, rest = x[..., :width], x[..., width:]
    if interleaved:
        first, second = columns[..., 0::2], columns[..., 1::2]
    else:
        first, second = columns.chunk(2, dim=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    result = torch.stack(rotated, dim=-1).flatten(-2) if interleaved else torch.cat(rotated, dim=-1)
    result = result.to(x.dtype)
    return torch.cat((result, rest), dim=-1) if rest.shape[-1] else result


def _frequencies(width: int, base: float, like: Tensor) -> Tensor:
    """The angle between neighbouring positions, in radians, for each pair of columns: (ceil(width / 2),)."""
    if base <= 0:
        raise ValueError(f"base must be > 0, got {base}")
    columns = torch.arange(0, width, 2, dtype=like.dtype, device=like.device)
    # The formula of existing models: another form differs in the last bit of float32, which positions magnify.
    return 1.0 / base ** (columns / width)


def _angles(x: Tensor, positions: Tensor | None, width: int, base: float) -> Tensor:
    """(T, width / 2), or (B, 1, ..., T, width / 2) if each row of the batch has its own positions."""
    if positions is None:
        positions = torch.arange(x.shape[-2], device=x.device)
    else:
        _check_positions(x, positions)
    if positions.dim() == 2:
        between = (1,) * (x.dim() - 3)
        positions = positions.reshape(positions.shape[0], *between, positions.shape[1])
    positions = positions.to(torch.promote_types(x.dtype, torch.float32))
    return positions[..., None] * _frequencies(width, base, like=positions)


def _rotated_width(x: Tensor, width: int | None) -> int:
    if x.dim() < 2 or not x.is_floating_point():
        raise ValueError(f"x must be a floating point tensor (..., T, D), got {tuple(x.shape)} of {x.dtype}")
    columns = x.shape[-1]
    width = columns if width is None else width
    if width % 2 or not 2 <= width <= columns:
        raise ValueError(f"width must be even and from 2 to D = {columns}, got {width}")
    return width


def _check_positions(x: Tensor, positions: Tensor) -> None:
    if not isinstance(positions, Tensor):
        raise TypeError(f"positions must be an int tensor, got {type(positions).__name__}")
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise TypeError(f"positions must be an int tensor, got {positions.dtype}")
    if positions.device != x.device:
        raise ValueError(f"positions must be on {x.device} like x, got {positions.device}")
    # Size by size: a compiler with symbolic sizes does not find a tuple in a list of tuples.
    length, rows = x.shape[-2], positions.shape[0] if positions.dim() == 2 else 1
    known = positions.dim() == 1 or (positions.dim() == 2 and x.dim() > 2)
    if not known or positions.shape[-1] != length or (rows != 1 and rows != x.shape[0]):
        expected = f"({length},)" if x.dim() == 2 else f"({length},) or ({x.shape[0]}, {length})"
        received = tuple(positions.shape)
        raise ValueError(f"positions must have shape {expected} for x {tuple(x.shape)}, got {received}")

"""Scores: how a query is compared with a key.

    Dot       scale · q·k          (scale None: 1/√d, 1.0: the plain dot product)
    General   q W k                (Luong)
    Cosine    scale · cos(q, k)
    Additive  wᵀ tanh(q + k)       (Bahdanau)

H heads, R queries, C keys, D width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

# Kernels compute in base 2: log2(x) = LOG2_E ln(x).
LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)


class Score:
    """Compares queries with keys: `finish(raw(q, k), width)` is the logit before bias and mask.

    >>> isinstance(foci.Dot(softcap=30.0), foci.Score)
    True
    """

    # Whether `as_dot` describes the score; the fused kernels run such scores.
    is_dot_product: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        # A class that changes `raw` or `finish` of a dot product is one only if it also defines `as_dot`.
        super().__init_subclass__(**options)
        dot, *others = (defining_class(cls, name) for name in ("as_dot", "raw", "finish"))
        cls.is_dot_product = dot is not Score and all(issubclass(dot, other) for other in others)

    def raw(self, q: Tensor, k: Tensor) -> Tensor:
        """(B, H, R, D) and (B, G, C, D) -> (B, H, R, C), before the scale; head h reads key head h // group."""
        raise NotImplementedError

    def finish(self, raw: Tensor, width: int) -> Tensor:
        """Applies the scale and the softcap."""
        return raw

    def as_dot(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Dot] | None:
        """Queries, keys and a Dot score with the same logits; None: the score is not equivalent to a dot product."""
        return None

    def check(self, q: Tensor, k: Tensor, heads: int | None) -> None:
        """Raises if queries, keys and parameters do not fit each other."""
        check_same_width(self, q, k)

    def tensors(self) -> dict[str, Tensor]:
        """The parameters by field name; gradients reach them."""
        return {}

    def select_heads(self, heads: slice) -> Score:
        """The same score with the parameters of some of the heads."""
        selected = {
            name: tensor[heads] for name, tensor in self.tensors().items() if tensor.dim() == self._headed_dim()
        }
        return replace(self, **selected) if selected else self  # type: ignore[type-var]

    @staticmethod
    def _headed_dim() -> int:
        """The number of dimensions of a parameter whose first dimension is the heads."""
        return -1


def defining_class(kind: type, method: str) -> type:
    """The class from which a class has a method."""
    return next(each for each in kind.__mro__ if method in vars(each))


@dataclass(frozen=True, slots=True)
class Dot(Score):
    """scale · q·k, then softcap · tanh(· / softcap) if there is a softcap.

    >>> q = torch.randn(1, 2, 6, 8)
    >>> foci.attention(q, q, q, score=foci.Dot(softcap=30.0)).shape
    torch.Size([1, 2, 6, 8])

    Args:
        scale: None is 1/√d, 1.0 the plain dot product, 1/d the other convention.
        softcap: limits the logits to -softcap ... softcap.
    """

    scale: float | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        if self.scale is not None and not (isinstance(self.scale, int | float) and math.isfinite(self.scale)):
            raise ValueError(f"scale must be a finite number or None, got {self.scale!r}")
        if self.softcap is not None and not (isinstance(self.softcap, int | float) and 0 < self.softcap < math.inf):
            raise ValueError(f"softcap must be a finite number above 0 or None, got {self.softcap!r}")

    def raw(self, q: Tensor, k: Tensor) -> Tensor:
        return dot_products(q, k)

    def factor(self, width: int) -> float:
        """The scale as a number."""
        return 1.0 / math.sqrt(max(width, 1)) if self.scale is None else float(self.scale)

    def finish(self, raw: Tensor, width: int) -> Tensor:
        logits = raw * self.factor(width)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def as_dot(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Dot]:
        return q, k, self


@dataclass(frozen=True, slots=True)
class Additive(Score):
    """wᵀ tanh(q + k), the score of Bahdanau et al.; weight (D,) or (H, D).

    >>> q = torch.randn(1, 2, 6, 8)
    >>> foci.attention(q, q, q, score=foci.Additive(torch.randn(8))).shape
    torch.Size([1, 2, 6, 8])
    """

    weight: Tensor

    def raw(self, q: Tensor, k: Tensor) -> Tensor:
        weight = self.weight.to(q.dtype).unsqueeze(-2)  # (1, D) or (H, 1, D)
        k = k.repeat_interleave(q.shape[1] // max(k.shape[1], 1), dim=1)
        rows = [torch.tanh(row.unsqueeze(-2) + k) @ weight.mT for row in split_rows(q)]
        return torch.stack(rows, dim=-3).squeeze(-1) if rows else dot_products(q, k)

    def check(self, q: Tensor, k: Tensor, heads: int | None) -> None:
        check_same_width(self, q, k)
        check_parameter(self.weight, q, "weight", [(q.shape[-1],)], [(heads, q.shape[-1])] if heads else [])

    def tensors(self) -> dict[str, Tensor]:
        return {"weight": self.weight}

    @staticmethod
    def _headed_dim() -> int:
        return 2


@dataclass(frozen=True, slots=True)
class General(Score):
    """q W k, the general score of Luong et al.; matrix (Dq, Dk) or (H, Dq, Dk).

    >>> q, k = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 4)
    >>> foci.attention(q, k, k, score=foci.General(torch.randn(8, 4))).shape
    torch.Size([1, 2, 6, 4])
    """

    matrix: Tensor

    def raw(self, q: Tensor, k: Tensor) -> Tensor:
        return dot_products(q @ self.matrix.to(q.dtype), k)

    def as_dot(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Dot]:
        return q @ self.matrix.to(q.dtype), k, Dot(1.0)

    def check(self, q: Tensor, k: Tensor, heads: int | None) -> None:
        widths = (q.shape[-1], k.shape[-1])
        check_parameter(self.matrix, q, "matrix", [widths], [(heads, *widths)] if heads else [])

    def tensors(self) -> dict[str, Tensor]:
        return {"matrix": self.matrix}

    @staticmethod
    def _headed_dim() -> int:
        return 3


@dataclass(frozen=True, slots=True)
class Cosine(Score):
    """scale · cos(q, k); scale is a number or a learned tensor (H,). A zero vector has cosine 0 with every vector.

    >>> q = torch.randn(1, 2, 6, 8)
    >>> foci.attention(q, q, q, score=foci.Cosine(10.0)).shape
    torch.Size([1, 2, 6, 8])
    """

    scale: float | Tensor

    def __post_init__(self) -> None:
        if isinstance(self.scale, Tensor) or (isinstance(self.scale, int | float) and math.isfinite(self.scale)):
            return
        raise ValueError(f"scale must be a finite number or a tensor (H,), got {self.scale!r}")

    def raw(self, q: Tensor, k: Tensor) -> Tensor:
        return dot_products(normalize(q), normalize(k))

    def finish(self, raw: Tensor, width: int) -> Tensor:
        return raw * self._scale(raw)

    def _scale(self, like: Tensor) -> float | Tensor:
        return self.scale.to(like.dtype).reshape(-1, 1, 1) if isinstance(self.scale, Tensor) else self.scale

    def as_dot(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Dot]:
        return normalize(q) * self._scale(q), normalize(k), Dot(1.0)

    def check(self, q: Tensor, k: Tensor, heads: int | None) -> None:
        check_same_width(self, q, k)
        if isinstance(self.scale, Tensor):
            check_parameter(self.scale, q, "scale", [()], [(heads,)] if heads else [(1,)])

    def tensors(self) -> dict[str, Tensor]:
        return {"scale": self.scale} if isinstance(self.scale, Tensor) else {}

    @staticmethod
    def _headed_dim() -> int:
        return 1


def split_rows(q: Tensor) -> Sequence[Tensor]:
    """The queries one by one; a compiler that recomputes refuses operators with several outputs, such as unbind."""
    return [q[..., i, :] for i in range(q.shape[-2])] if torch.compiler.is_compiling() else q.unbind(-2)


def dot_products(q: Tensor, k: Tensor) -> Tensor:
    """q kᵀ; query heads that share a key head are folded into the rows, so that no key is copied."""
    if q.shape[1] == k.shape[1]:
        return q @ k.mT
    rows = q.shape[1] // k.shape[1] * q.shape[2]
    folded = q.reshape(q.shape[0], k.shape[1], rows, q.shape[-1]) @ k.mT
    return folded.view(*q.shape[:-1], k.shape[-2])


def normalize(x: Tensor) -> Tensor:
    """x / |x|, computed in float32 at least; a zero vector stays zero and passes its gradient through unchanged."""
    wide = x if x.dtype == torch.float64 else x.float()
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return (wide / torch.where(length == 0, 1.0, length)).to(x.dtype)


def check_same_width(score: Score, q: Tensor, k: Tensor) -> None:
    if q.shape[-1] != k.shape[-1]:
        name = type(score).__name__
        raise ValueError(
            f"query and key must have one width for {name}, got {q.shape[-1]} and {k.shape[-1]}"
            " (General(matrix) takes two widths)"
        )


def check_parameter(
    tensor: Tensor, q: Tensor, name: str, plain: list[tuple[int, ...]], headed: list[tuple[int | None, ...]]
) -> None:
    """Raises unless a parameter is a float tensor of one of these shapes on the device of the query."""
    expected = [*plain, *headed]
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tuple(tensor.shape) not in expected:
        shapes = " or ".join(map(str, expected))
        raise ValueError(f"{name} must be a float tensor of shape {shapes}, got {describe_value(tensor)}")
    if tensor.device != q.device:
        raise ValueError(f"{name} must be on {q.device} like the query, got {tensor.device}")


def describe_value(thing: object) -> str:
    """Dtype and shape of a tensor, or the type of anything else, for error messages."""
    return f"{thing.dtype} {tuple(thing.shape)}" if isinstance(thing, Tensor) else type(thing).__name__

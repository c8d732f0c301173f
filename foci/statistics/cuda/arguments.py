"""Arguments of the statistics kernels: checked tensors in the layout that they take, and scalars.

B batch, H query heads, G key/value heads, Tq queries, Tk keys, D width.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foci.arguments import HALF_DTYPES, KERNEL_DTYPES, Call
from foci.gpu.additive import MAX_ADDITIVE_WIDTH
from foci.gpu.arguments import (
    make_contiguous,
    mask_arguments,
    next_power_of_two,
    stride_arguments,
    view_as_bytes,
    with_contiguous_rows,
)
from foci.gpu.launcher import DescriptorArgument
from foci.masks.kinds import Causal
from foci.runtime.device import is_hopper_or_later
from foci.runtime.tracing import is_inside_torch_func, is_traced
from foci.scores import Dot
from foci.statistics.cuda.tiling import PictureCells, TileConfig
from foci.statistics.request import MAX_TOP_KEYS, Request

MAX_WIDTH = 256
# Those of the ids that `documents` takes.
ID_DTYPES = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
# Kinds of row table, as TABLE in kernels/distance_bias/forward.py: of Relative, and of Buckets.
BEFORE_SCALE, AFTER_SCALE = 1, 2


class KernelTensors(NamedTuple):
    """The tensors of a call; all but the first three may be None.

    bias (B or 1, H, Tq or 1, W): a row table as in kernels/distance_bias/forward.py. weight (D,) or (H, D): that
    of an additive score.
    """

    q: Tensor
    k: Tensor
    lse: Tensor
    key_ranges: Tensor | None
    query_ids: Tensor | None
    key_ids: Tensor | None
    dense: Tensor | None
    slopes: Tensor | None
    bias: Tensor | None = None
    weight: Tensor | None = None
    query_weights: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether there are no tensors but q, k and lse."""
        return all(x is None for x in self[3:])

    def to_kernel_layout(self) -> KernelTensors:
        """As the kernels read them: contiguous features, masks as bytes."""
        if self.q.stride(3) == self.k.stride(3) == 1 and self.lse.is_contiguous() and self.is_plain:
            return self
        weights = self.query_weights
        weights = weights[None, None] if weights is not None and weights.dim() == 1 else weights
        lse, key_ranges, query_ids, key_ids, slopes, weight, weights = make_contiguous(
            self.lse, self.key_ranges, self.query_ids, self.key_ids, self.slopes, self.weight, weights
        )
        dense, (q, k) = view_as_bytes(self.dense, self.q, self.k), map(with_contiguous_rows, (self.q, self.k))
        assert lse is not None
        return KernelTensors(q, k, lse, key_ranges, query_ids, key_ids, dense, slopes, self.bias, weight, weights)

    def by_name(self) -> dict[str, Tensor]:
        """The tensors by name; lse stands for missing ones, which no kernel reads."""
        return {name: self.lse if x is None else x for name, x in zip(TENSOR_NAMES, self, strict=True)}


def is_on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def describe_plain_call(call: Call, lse: Tensor) -> Hashable | None:
    """All that launches for a plain call depend on but addresses; None for other calls.

    A plain call is a dot product without a bias or positions, whose mask is `causal` if there is one. It is not traced.
    """
    q, k, score, mask = call.q, call.k, call.score, call.mask
    if (
        torch.compiler.is_compiling()
        or not is_on_gpu(q)
        or not (type(q) is type(k) is type(lse) is Tensor)
        or type(score) is not Dot
        or not (mask is None or type(mask) is Causal)
        or call.bias is not None
        or call.positions is not None
        or is_inside_torch_func()
        or torch._C._len_torch_dispatch_stack()
    ):
        return None
    return (
        "full" if mask is None else mask.offset, score.scale, score.softcap, q.dtype, q.device,
        q.shape, q.stride(), k.shape, k.stride(), lse.stride(), lse.dtype,
    )  # fmt: skip


TENSOR_NAMES = KernelTensors._fields
# The tensors that every kernel takes: all but query_weights.
COMMON_TENSORS = TENSOR_NAMES[:-1]


def check_arguments(tensors: KernelTensors, causal: bool, bias_kind: int, request: Request) -> None:
    """Raises where the kernels do not support the arguments."""
    q, k, lse, key_ranges, query_ids, key_ids, dense, slopes, bias, weight, query_weights = tensors
    if q.dim() != 4 or k.dim() != 4:
        raise ValueError(f"q and k must be (B, H, Tq, D) and (B, G, Tk, D), got {tuple(q.shape)} and {tuple(k.shape)}")
    batch, heads, queries, width = q.shape
    if k.shape[0] != batch or k.shape[3] != width or k.shape[1] == 0 or heads % k.shape[1]:
        raise ValueError(
            f"k must be (B, G, Tk, D) with B {batch}, D {width} and G a divisor of {heads}, got {tuple(k.shape)}"
        )
    if q.dtype != k.dtype or q.dtype not in KERNEL_DTYPES:
        raise TypeError(f"q and k must be both float16, bfloat16 or float32, got {q.dtype} and {k.dtype}")
    widest = MAX_WIDTH if weight is None else MAX_ADDITIVE_WIDTH
    if not 0 < width <= widest:
        raise ValueError(f"the width D must be from 1 to {widest}, got {width}")
    if min(q.numel(), k.numel()) == 0:
        raise ValueError(f"q and k must not be empty, got {tuple(q.shape)} and {tuple(k.shape)}")
    if causal and key_ranges is not None:
        raise ValueError("causal and key_ranges must not be given together: the key ranges replace causal")
    if (query_ids is None) != (key_ids is None):
        raise ValueError("query_ids and key_ids must be given together, got one of them")
    keys = k.shape[2]
    one = (1, batch)
    check_tensor("lse", lse, [(batch,), (heads,), (queries,)], [torch.float32])
    check_tensor("slopes", slopes, [(heads,)], [torch.float32])
    check_tensor("key_ranges", key_ranges, [one, (1, 2), (2,), (queries,)], [torch.int32])
    check_tensor("query_ids", query_ids, [one, (queries,)], ID_DTYPES)
    check_tensor("key_ids", key_ids, [one, (keys,)], ID_DTYPES)
    distances = 1 if bias is None else bias.shape[-1] | 1
    check_tensor("bias", bias, [one, (heads,), (1, queries), (distances,)], [torch.float32])
    if (bias is None) != (bias_kind == 0) or bias_kind not in (0, BEFORE_SCALE, AFTER_SCALE):
        raise ValueError(f"bias_kind must be {BEFORE_SCALE} or {AFTER_SCALE} with a bias, else 0, got {bias_kind}")
    per_head = [(heads,)] if weight is not None and weight.dim() == 2 else []
    check_tensor("weight", weight, [*per_head, (width,)], list(KERNEL_DTYPES))
    check_tensor("dense", dense, [one, (1, heads), (1, queries), (1, keys)], [torch.bool])
    whole = query_weights is not None and query_weights.dim() == 3
    check_tensor(
        "query_weights", query_weights, [one, (1, heads), (queries,)] if whole else [(queries,)], list(KERNEL_DTYPES)
    )
    check_request(request, queries, keys)
    for name, x in zip(TENSOR_NAMES, tensors, strict=True):
        if x is not None and x.device != q.device:
            raise ValueError(f"{name} must be on {q.device} like q, got {x.device}")


def check_tensor(name: str, x: Tensor | None, sizes: list[tuple[int, ...]], dtypes: list[torch.dtype]) -> None:
    if x is None:
        return
    if x.dim() != len(sizes) or any(size not in allowed for size, allowed in zip(x.shape, sizes, strict=True)):
        expected = ", ".join(" or ".join(str(size) for size in dict.fromkeys(allowed)) for allowed in sizes)
        raise ValueError(f"{name} must have shape ({expected}), got {tuple(x.shape)}")
    if x.dtype not in dtypes:
        raise TypeError(f"{name} must be {' or '.join(str(dtype) for dtype in dtypes)}, got {x.dtype}")


def check_request(request: Request, queries: int, keys: int) -> None:
    if not 0 <= request.top <= MAX_TOP_KEYS:
        raise ValueError(f"top must be from 0 to {MAX_TOP_KEYS}, got {request.top}")
    if request.picture is None:
        return
    rows, columns, reduce = request.picture
    if not (0 < rows <= queries and 0 < columns <= keys):
        raise ValueError(f"picture must be at most {queries} x {keys} cells, got {rows} x {columns}")
    if reduce not in ("mean", "max"):
        raise ValueError(f"picture must reduce by 'mean' or 'max', got {reduce!r}")


def common_arguments(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    scale: float,
    softcap: float | None,
    slopes: Tensor | None,
    causal: bool,
    key_ranges: Tensor | None,
    query_ids: Tensor | None,
    key_ids: Tensor | None,
    dense: Tensor | None,
    bias: Tensor | None = None,
    bias_kind: int = 0,
    weight: Tensor | None = None,
) -> dict[str, Any]:
    """The tensors and scalars that every kernel takes."""
    prepared = KernelTensors(q, k, lse, key_ranges, query_ids, key_ids, dense, slopes, bias, weight).to_kernel_layout()
    tensors = prepared.by_name()
    return {name: tensors[name] for name in COMMON_TENSORS} | statistics_scalars(
        prepared, scale, softcap, causal, bias_kind
    )


def statistics_scalars(
    tensors: KernelTensors, scale: float, softcap: float | None, causal: bool, bias_kind: int
) -> dict[str, Any]:
    """The scalars that every kernel takes: strides, sizes, and which parts the call has; tensors in kernel layout."""
    q, k, bias = tensors.q, tensors.k, tensors.bias
    steps = (0, 0, 0) if bias is None else tuple(0 if bias.shape[n] == 1 else bias.stride(n) for n in range(3))
    return {
        **mask_arguments(tensors.key_ranges, tensors.query_ids, tensors.key_ids, tensors.dense), "CAUSAL": causal,
        "H": q.shape[1], "group": q.shape[1] // k.shape[1], "Tq": q.shape[2], "Tk": k.shape[2], "D": q.shape[3],
        **stride_arguments("q", q, "query"), **stride_arguments("k", k, "key"),
        "bias_batch": steps[0], "bias_head": steps[1], "bias_query": steps[2],
        "clip": 0 if bias is None else bias.shape[3] // 2, "TABLE": bias_kind,
        "weight_head": q.shape[3] if tensors.weight is not None and tensors.weight.dim() == 2 else 0,
        "ADDITIVE": tensors.weight is not None, "PTX": q.device.type == "cuda" and torch.version.hip is None,
        "scale": float(scale), "softcap": float(softcap or 0.0),
        "SOFTCAP": softcap is not None, "ALIBI": tensors.slopes is not None,
        "BD": next_power_of_two(q.shape[3]),
    }  # fmt: skip


def key_descriptors(k: Tensor, width: int, config: TileConfig) -> dict[str, DescriptorArgument]:
    """Descriptors by which TMA fetches tiles of k (B, G, Tk, D); empty where threads load the keys instead."""
    if not config.use_tma or not is_tma_compatible(k):
        return {}
    return {"k_tiles": DescriptorArgument("k", partial(describe_key_tiles, keys=config.keys, width=width))}


def describe_key_tiles(k: Tensor, keys: int, width: int) -> Any:
    """TMA fills entries of a tile beyond the keys or their width with 0."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(k, [1, 1, keys, width])


def is_tma_compatible(x: Tensor) -> bool:
    """Whether TMA can fetch x (B, H, T, D): half precision, address and strides multiples of 16 bytes."""
    # Tensors under torch.compile have no addresses.
    if is_traced(x) or x.dtype not in HALF_DTYPES or not has_tma(x.device):
        return False
    strides = [stride * x.element_size() for stride in x.stride()[:-1]]
    return x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(stride > 0 and stride % 16 == 0 for stride in strides)


def has_tma(device: torch.device) -> bool:
    """Whether the device has TMA (tensor memory accelerator): Hopper and later, and Triton's interpreter."""
    if device.type != "cuda":
        return True
    return torch.version.hip is None and is_hopper_or_later(device.index)


def query_weight_arguments(query_weights: Tensor | None) -> dict[str, Any]:
    """Strides of the query weights (1 or B, 1 or H, Tq)."""
    if query_weights is None:
        return {"weights_batch": 0, "weights_head": 0, "WEIGHTED": False}
    sizes, strides = query_weights.shape[:2], query_weights.stride()[:2]
    batch, head = (0 if size == 1 else stride for size, stride in zip(sizes, strides, strict=True))
    return {"weights_batch": batch, "weights_head": head, "WEIGHTED": True}


def picture_arguments(request: Request, cells: PictureCells | None, twice: bool) -> dict[str, Any]:
    """Sizes of a picture of means, and how its sums are laid out; `twice`: a tile may be visited more than once."""
    cells = cells or PictureCells(0, 1)
    rows, columns, _ = request.picture or (0, 0, "mean")
    return {
        "picture_rows": rows,
        "picture_columns": cells.line_width(columns),
        "picture_lines": cells.lines,
        "PICTURE": 0 if not request.picture else 1 if cells.cell_queries else 2,
        "CELL_QUERIES": cells.cell_queries or 1,
        "CELL_KEYS": cells.cell_keys,
        "COLUMN_KEYS": cells.column_keys,
        "ADD": bool(cells.cell_queries) and (twice or cells.column_keys > cells.cell_keys),
        "CELLS": cells.slots,
    }

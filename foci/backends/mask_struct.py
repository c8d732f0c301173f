"""The mask of a call as the argument struct of our C kernels (kernels/c/masks.h)."""

from __future__ import annotations

import ctypes

from torch import Tensor

from foci.arguments import Call
from foci.masks import kernel_inputs
from foci.masks.kinds import Causal
from foci.runtime.tensor_cache import cache_per_stream

DENSE_STRIDE_FIELDS = ("dense_batch", "dense_head", "dense_row", "dense_column")


class MaskStruct(ctypes.Structure):
    """The struct of kernels/c/masks.h, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("key_ranges", "query_ids", "key_ids", "dense")),
        *((name, ctypes.c_int64) for name in ("query_count", "key_count", "range_count")),
        *((name, ctypes.c_int64) for name in ("range_step", "query_id_step", "key_id_step", *DENSE_STRIDE_FIELDS)),
    )


def build_mask_tensors(call: Call) -> dict[str, Tensor]:
    """The tensors of the mask by the name of their field; the struct holds only their addresses."""
    masks = kernel_inputs.build_kernel_masks(call)
    ranges = build_causal_ranges(call) if masks.causal else masks.key_ranges
    tensors = {} if ranges is None else {"key_ranges": ranges.contiguous()}
    if masks.query_ids is not None and masks.key_ids is not None and not are_ranges_exact(masks.key_ids):
        tensors |= {"query_ids": masks.query_ids.long().contiguous(), "key_ids": masks.key_ids.long().contiguous()}
    if masks.dense is not None:
        is_strided = masks.dense.shape[-1] > 1 and masks.dense.stride(-1) != 1
        tensors["dense"] = masks.dense.contiguous() if is_strided else masks.dense
    return tensors


def build_causal_ranges(call: Call) -> Tensor:
    sizes = call.sizes
    key = "causal ranges", sizes.queries, sizes.keys
    return cache_per_stream(key, call.q, lambda: Causal().key_ranges(sizes, False).to_tensor(call.q.device))


def are_ranges_exact(key_ids: Tensor) -> bool:
    """Whether each document is one key range, so that the ids need not be compared."""
    return bool((key_ids[:, 1:] >= key_ids[:, :-1]).all())


def fill_mask_struct(call: Call, tensors: dict[str, Tensor]) -> MaskStruct:
    fields = data_pointers(tensors) | {"query_count": call.q.shape[2], "key_count": call.k.shape[2]}
    if "key_ranges" in tensors:
        fields["range_count"] = tensors["key_ranges"].shape[1]
    strides = {"range_step": "key_ranges", "query_id_step": "query_ids", "key_id_step": "key_ids"}
    fields |= {field: sequence_stride(tensors[name]) for field, name in strides.items() if name in tensors}
    if "dense" in tensors:
        fields |= dict(zip(DENSE_STRIDE_FIELDS, broadcast_strides(tensors["dense"]), strict=True))
    return MaskStruct(**fields)


def data_pointers(tensors: dict[str, Tensor]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


def sequence_stride(tensor: Tensor) -> int:
    """Stride from one sequence to the next; 0 where all share one."""
    return 0 if tensor.shape[0] == 1 else tensor.stride(0)


def broadcast_strides(tensor: Tensor) -> list[int]:
    """Strides of a tensor; 0 along dimensions of size 1."""
    return [0 if size == 1 else step for size, step in zip(tensor.shape, tensor.stride(), strict=True)]

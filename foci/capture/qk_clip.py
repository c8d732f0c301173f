"""clip_qk: rescales the query and key projections of heads whose logits have grown too large.

The rule is QK-clip of MuonClip (Kimi K2): a head with the largest logit S above τ gets γ = τ / S; its queries are
multiplied by γ^α and its keys by γ^(1 - α), so that the same input has the largest logit τ. Where several query heads
share a key head, the queries alone are multiplied by γ, because another head may need the keys as they are.

H heads, G key/value heads, D head width.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from foci.capture.naming import LayerNames, is_inside
from foci.nn.attention import Attention
from foci.scores import Dot

# Names of the modules inside an attention of Llama, Qwen2, Mistral and the like.
LLAMA_PROJECTIONS = {"q_proj", "k_proj", "v_proj"}
OTHER_LLAMA_MODULES = {"o_proj", "out_proj", "rotary_emb", "dropout"}
QK_NORM = re.compile(r"norm", re.IGNORECASE)


@dataclass(frozen=True)
class HeadRows:
    """The part of a parameter that belongs to the heads: blocks of one size along an axis, from start to stop."""

    parameter: Tensor
    axis: int
    start: int
    stop: int


@dataclass(frozen=True)
class Projections:
    """Weights and biases that compute the queries and the keys, and the number of key heads."""

    queries: list[HeadRows]
    keys: list[HeadRows]
    key_heads: int


def clip_qk(
    model: nn.Module,
    largest_logit: Mapping[str, Tensor | Sequence[float]],
    tau: float,
    alpha: float = 0.5,
) -> dict[str, float]:
    """Rescales query and key projections of the heads whose largest logit is above tau, in place: MuonClip's QK-clip.

    >>> model = foci.nn.Decoder.from_name("tiny", vocabulary=100)
    >>> monitor = foci.Monitor(model, every=1)
    >>> with monitor:
    ...     loss = model(torch.randint(100, (2, 16))).logits.logsumexp(-1).mean()
    >>> logged = monitor.log()
    >>> clipped = foci.clip_qk(model, monitor.largest_logit, tau=100.0)      # after optimizer.step()
    >>> clipped                                                           # the factor of each clipped head
    {}

    A head with the largest logit S above tau gets the factor γ = tau / S: its queries are multiplied by γ ** alpha and
    its keys by γ ** (1 - alpha), weights and biases; where query heads share key heads, the queries alone by γ.

    Supported are `foci.nn.Attention` with a dot product, `MultiheadAttention` of foci and PyTorch, and the attentions
    of transformers that are like those of Llama, Qwen2 and GPT-2. Other attentions with a head above tau are refused,
    also those with a QK-norm, where a rescaled projection gives the same logits. Nothing is changed if one is refused.

    Args:
        largest_logit: of each head, by layer name or module name: `Monitor.largest_logit`.
        tau: the largest logit that is allowed.
        alpha: the share of the queries in the factor, from 0 to 1.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    if not 0 < tau < math.inf:
        raise ValueError(f"tau must be a finite number above 0, got {tau!r}")
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be from 0 to 1, got {alpha!r}")
    modules = name_attention_modules(model)
    factors = {}
    for layer, values in largest_logit.items():
        logits = torch.as_tensor(values, dtype=torch.float64).cpu()
        if logits.isnan().any() or (logits == torch.inf).any():
            raise ValueError(f"largest_logit must be finite, got {logits.tolist()} for {layer}")
        if (logits > tau).any():
            factors[layer] = torch.where(logits > tau, tau / logits, 1.0)
    found = {layer: find_projections(modules, layer, len(each)) for layer, each in factors.items()}
    for layer, gamma in factors.items():
        rescale(found[layer], gamma, alpha)
    return {
        f"{layer}H{head}": value
        for layer, gamma in factors.items()
        for head, value in enumerate(gamma.tolist())
        if value < 1
    }


def name_attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The attention modules by layer name and by module name, as `foci.Monitor` names them."""
    modules = list(model.named_modules())
    names = LayerNames(modules)
    if "transformers" in sys.modules:
        from foci.capture import huggingface
        from foci.capture.huggingface.naming import find_encoder_and_decoder, name_known_layers

        transformers = huggingface.find_transformers_models(names)
        parts = find_encoder_and_decoder(transformers.models)
        names.set(name_known_layers(names.layout, transformers.models, transformers.attention_modules, parts))
    found: dict[str, nn.Module] = {}
    by_name = dict(modules)
    for name, layer_name in names.layer_names.items():
        module = by_name.get(name, names.attention_modules.get(name))
        # The innermost module has the projections, unless it only computes the attention of an outer one.
        if module is not None and not any(is_inside(other, name) for other in names.layer_names):
            found |= {layer_name.short: module, name: module}
    return found


def find_projections(modules: dict[str, nn.Module], layer: str, heads: int) -> Projections:
    """The projections of a layer's attention; raises ValueError if it is not supported."""
    if layer not in modules:
        raise ValueError(f"largest_logit must name layers of the model ({', '.join(modules)}), got {layer!r}")
    module = modules[layer]
    refusal = f"{layer} must be an attention that clip_qk supports, got {type(module).__name__}: "
    norms = [name for name, _ in module.named_children() if QK_NORM.search(name)]
    if norms:
        raise ValueError(refusal + f"its QK-norm ({', '.join(norms)}) undoes the rescaling")
    if read_softcap(module) is not None:
        raise ValueError(refusal + "its logits have a softcap, so that they are not proportional to queries and keys")
    found = read_projections(module, heads, refusal)
    for rows in (*found.queries, *found.keys):
        if not rows.parameter.is_floating_point():
            raise ValueError(refusal + f"its projection has the dtype {rows.parameter.dtype}")
    size = found.queries[0].stop - found.queries[0].start
    if size % heads or (found.keys[0].stop - found.keys[0].start) % found.key_heads:
        raise ValueError(
            f"largest_logit must have one number per head of {layer}, got {heads} for {size} projected values"
        )
    return found


def read_softcap(module: nn.Module) -> float | None:
    """The softcap of an attention of foci or transformers."""
    if isinstance(module, Attention):
        return module.score.softcap if isinstance(module.score, Dot) else None
    for name in ("attn_logit_softcapping", "softcap"):
        cap: float | None = getattr(module, name, None) or getattr(getattr(module, "config", None), name, None)
        if cap is not None:
            return cap
    return None


def read_projections(module: nn.Module, heads: int, refusal: str) -> Projections:
    """The projections of each supported kind of attention."""
    if isinstance(module, Attention):
        if not isinstance(module.score, Dot):
            raise ValueError(refusal + f"its score is {type(module.score).__name__}, not a dot product")
        middle, end = module.heads * module.head_width, (module.heads + module.kv_heads) * module.head_width
        return split_fused(module.project, 0, middle, end, module.kv_heads)
    if isinstance(module, nn.MultiheadAttention):
        return read_torch_projections(module)
    children = dict(module.named_children())
    if children.keys() >= LLAMA_PROJECTIONS and children.keys() <= LLAMA_PROJECTIONS | OTHER_LLAMA_MODULES:
        return read_llama_projections(children, heads, refusal)
    fused: Any = children.get("c_attn")
    if type(fused).__name__ == "Conv1D" and "q_attn" not in children:
        width = int(fused.weight.shape[1]) // 3
        return split_fused(fused, 1, width, 2 * width, heads)
    raise ValueError(refusal + "supported are foci.nn, and transformers' attentions like Llama, Qwen2 and GPT-2")


def split_fused(linear: Any, axis: int, middle: int, end: int, key_heads: int) -> Projections:
    """One layer that computes queries up to `middle` and keys up to `end` of its outputs."""
    parameters = [(linear.weight, axis)] + ([(linear.bias, 0)] if linear.bias is not None else [])
    return Projections(
        [HeadRows(parameter, along, 0, middle) for parameter, along in parameters],
        [HeadRows(parameter, along, middle, end) for parameter, along in parameters],
        key_heads,
    )


def read_torch_projections(module: nn.MultiheadAttention) -> Projections:
    width, bias = module.embed_dim, module.in_proj_bias
    queries = [] if bias is None else [HeadRows(bias, 0, 0, width)]
    keys = [] if bias is None else [HeadRows(bias, 0, width, 2 * width)]
    if module._qkv_same_embed_dim:
        queries.append(HeadRows(module.in_proj_weight, 0, 0, width))
        keys.append(HeadRows(module.in_proj_weight, 0, width, 2 * width))
    else:
        queries.append(HeadRows(module.q_proj_weight, 0, 0, width))
        keys.append(HeadRows(module.k_proj_weight, 0, 0, width))
    if module.bias_k is not None:
        keys.append(HeadRows(module.bias_k, 2, 0, width))
    return Projections(queries, keys, module.num_heads)


def read_llama_projections(children: dict[str, nn.Module], heads: int, refusal: str) -> Projections:
    queries, keys = (list_rows(children[name], refusal) for name in ("q_proj", "k_proj"))
    width = max(1, queries[0].stop // heads)
    return Projections(queries, keys, keys[0].stop // width)


def list_rows(linear: nn.Module, refusal: str) -> list[HeadRows]:
    if not isinstance(linear, nn.Linear):
        raise ValueError(refusal + f"its projection is a {type(linear).__name__}, not nn.Linear")
    parameters: list[Tensor] = [linear.weight] if linear.bias is None else [linear.weight, linear.bias]
    return [HeadRows(parameter, 0, 0, parameter.shape[0]) for parameter in parameters]


@torch.no_grad()
def rescale(projections: Projections, gamma: Tensor, alpha: float) -> None:
    """Multiplies queries and keys by the factors of their heads, gamma (H,)."""
    is_grouped = projections.key_heads != len(gamma)
    for rows in projections.queries:
        multiply_heads(rows, gamma if is_grouped else gamma**alpha)
    for rows in () if is_grouped else projections.keys:
        multiply_heads(rows, gamma ** (1 - alpha))


def multiply_heads(rows: HeadRows, factors: Tensor) -> None:
    """Multiplies each head's block of a parameter by its factor, in place."""
    parameter, size = rows.parameter, rows.stop - rows.start
    full = torch.ones(parameter.shape[rows.axis], dtype=torch.float64)
    full[rows.start : rows.stop] = factors.repeat_interleave(size // len(factors))
    shape = [-1 if axis == rows.axis else 1 for axis in range(parameter.dim())]
    full = full.to(parameter.device, parameter.dtype).view(shape)
    other: Any = full
    if isinstance(parameter, DTensor):
        other = distribute_tensor(full, parameter.device_mesh, [Replicate()] * parameter.device_mesh.ndim)
    parameter.mul_(other)

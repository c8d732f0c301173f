"""`foci.attention` for DTensors: this process attends with its own queries to all of their keys.

B batch, H heads, Tq queries, Tk keys, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from foci.sharding.layout import find_layout, from_local
from foci.sharding.local_call import build_local_call
from foci.sharding.weights import ShardedWeights


def attend_sharded(attend: Callable[..., Any], query: Any, key: Any, value: Any, options: dict[str, Any]) -> Any:
    """The output, and the weights if the options ask for them; `attend` is `foci.attention` of plain tensors."""
    layout = find_layout(query, key, value)
    call = build_local_call(layout, query, key, value, options)
    run_options = {name: options[name] for name in ("dropout", "backend")}
    keys = call.parts.count_visible_keys(call.part)
    keys = layout.keys if keys is None else min(keys, layout.keys)
    is_default = keys < layout.keys or call.has_default_positions
    k, v = (tensor[:, :, :keys] for tensor in (call.k, call.v))
    arguments = call.parts.select(call.part, keys, is_default)
    result = attend(call.q, k, v, **arguments, **run_options, return_weights=options["return_weights"])
    out, weights = result if options["return_weights"] else (result, None)
    shape = (*layout.lead, layout.queries, value.shape[-1])
    whole = from_local(call.restore_lead(out), layout.mesh, list(layout.placements), shape)
    if weights is None:
        return whole
    if keys < layout.keys:
        weights = call.build_weights(weights.tensors.lse)
    return whole, ShardedWeights(layout, call, weights, query, key, options)

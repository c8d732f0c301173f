"""HeadSelection: the layers and heads that a watch block records, and those whose outputs it zeroes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from foci.capture.errors import CaptureError
from foci.capture.naming import LayerName

HEAD_NAME = re.compile(r"(?:(?P<stack>[^.]+)\.)?L(?P<layer>\d+)(?:H(?P<head>\d+))?")


class HeadSelection:
    """Which layers and heads are recorded or ablated.

    Args:
        layers: numbers, short names ("L5") or module names; None selects all.
        heads: numbers for all layers, or names ("L5H3"); None selects all.
        ablate: names of heads or layers.
    """

    def __init__(
        self,
        layers: Iterable[int | str] | None = None,
        heads: Iterable[int | str] | None = None,
        ablate: Iterable[str] = (),
    ) -> None:
        self.layers = None if layers is None else list(layers)
        self.heads = None if heads is None else group_heads_by_layer(heads)
        self.ablate = {name: HEAD_NAME.fullmatch(name) for name in ablate}
        self._applied_ablations: set[str] = set()

    @property
    def selects_all(self) -> bool:
        """Whether every head of every layer is recorded."""
        return self.layers is None and self.heads is None

    @property
    def is_empty(self) -> bool:
        """Whether every head is recorded and none is ablated."""
        return self.selects_all and not self.ablate

    def includes(self, module: str, layer_name: LayerName) -> bool:
        """Whether a head of a layer is selected, the layer by its name or by that of its module."""
        in_layers = self.layers is None or any(
            layer in (layer_name.index, layer_name.short, module) for layer in self.layers
        )
        return in_layers and (self.heads is None or bool(self.heads_of(layer_name)))

    def heads_of(self, layer_name: LayerName) -> list[int]:
        """The selected heads of a layer, if some are selected."""
        assert self.heads is not None
        return sorted({*self.heads.get("", ()), *self.heads.get(layer_name.short, ())})

    def heads_to_ablate(self, layer_name: LayerName) -> list[int] | None:
        """The heads of a layer whose outputs are zeroed: None for all of them, [] for none."""
        heads: list[int] = []
        for requested, match in self.ablate.items():
            assert match is not None
            if (layer_name.stack, str(layer_name.index)) == (match["stack"] or "", match["layer"]):
                self._applied_ablations.add(requested)
                if match["head"] is None:
                    return None
                heads.append(int(match["head"]))
        return heads

    def check_names(self, ran: Sequence[LayerName], modules: Iterable[str]) -> None:
        """Refuses names that are none of the layers and modules that ran, if any did."""
        modules = list(modules)
        known = {*modules, *(layer.short for layer in ran), *(layer.index for layer in ran)}
        unknown = [*(layer for layer in self.layers or () if layer not in known)]
        unknown += [layer for layer in self.heads or () if layer and layer not in known]
        unknown += [name for name in self.ablate if name not in self._applied_ablations]
        if unknown and modules:
            names = ", ".join(dict.fromkeys(layer.short for layer in ran))
            raise CaptureError(
                f"layers, heads and ablate must name layers that ran ({names}), got {', '.join(map(repr, unknown))}"
            )


def group_heads_by_layer(heads: Iterable[int | str]) -> dict[str, list[int]]:
    """Head numbers by layer name; those for all layers are under ""."""
    groups: dict[str, list[int]] = {}
    for head in heads:
        match = HEAD_NAME.fullmatch(head) if isinstance(head, str) else None
        if isinstance(head, int) and not isinstance(head, bool) and head >= 0:
            groups.setdefault("", []).append(head)
        elif match is not None and match["head"] is not None:
            groups.setdefault(str(head).rpartition("H")[0], []).append(int(match["head"]))
        else:
            raise ValueError(f"heads must be numbers from 0 or names such as 'L5H3', got {head!r}")
    return groups


def parse_selection(name: str, selection: Any) -> list[int | str] | None:
    """Layers or heads as a list; None selects all of them."""
    if selection is None:
        return None
    if isinstance(selection, int | str) and not isinstance(selection, bool):
        return [selection]
    try:
        return list(selection)
    except TypeError:
        example = "L5H3" if name == "heads" else "L5"
        raise TypeError(f"{name} must be numbers or names such as {example!r}, got {selection!r}") from None


def parse_ablate(ablate: Any) -> list[str]:
    """Names of heads and layers as a list."""
    names = [ablate] if isinstance(ablate, str) else list(ablate)
    for name in names:
        if not isinstance(name, str) or HEAD_NAME.fullmatch(name) is None:
            raise ValueError(f"ablate must be names such as 'L5H3', 'cross.L0H2' or 'L5', got {name!r}")
    return names

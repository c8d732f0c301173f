"""TextWeights: which queries and keys of a call are text, for `foci.Keep(keys="text")` and `foci.Keep(queries="text")`.

B batch, H heads, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from foci.capture.token_ids import TokenIds
from foci.record.kept import Keep, TextPositions
from foci.record.labels import Labels
from foci.statistics.cuda import columns as cuda_columns

if TYPE_CHECKING:
    from foci.capture.diffusion import Denoising
    from foci.capture.layer_log import LayerLog
    from foci.capture.naming import LayerName

# Where the GPU kernel does not run, weights on text are computed from whole rows up to this many entries, 64 MiB in
# float32.
MAX_SHORT_ENTRIES = 2**24


# The module of a call, how many calls it has made in the pass, and the shapes of the queries and keys: what is the same
# at all denoising steps.
CallKey = tuple[str, int, torch.Size, torch.Size]


class KnownCall(NamedTuple):
    """A call of an earlier denoising step: its log, the keys that are text, and whether its rows have few entries."""

    log: LayerLog
    keys: slice | list[int]
    is_short: bool

    def has_room_for(self, q: Tensor, k: Tensor) -> bool:
        """Whether the weights of a call like this one take little memory: if it is short, or with a kernel on a GPU."""
        return self.is_short or (isinstance(self.keys, slice) and cuda_columns.supports(q, k))


class TextWeights:
    """Finds the text in calls of which only the weights on text are kept.

    Args:
        keep: says whether the keys, the queries or both must be text.
        token_ids: the labels of the model's input.
        denoising: the prompt of a diffusion model; None for other models.
    """

    def __init__(self, keep: Keep, token_ids: TokenIds, denoising: Denoising | None) -> None:
        self.keep, self.token_ids, self.denoising = keep, token_ids, denoising
        # Calls in the steps of a diffusion model; None if nothing is kept of them.
        self.known_calls: dict[CallKey, KnownCall | None] = {}
        # The positions of text in labels, which are given once and asked for at every call; by the id of the labels.
        self._positions: dict[tuple[int, int], tuple[Labels | None, tuple[int, ...] | None]] = {}

    def keeps_part(self, text: TextPositions) -> bool:
        """Whether something of a call with this text is kept."""
        return bool((self.keep.keys and text.keys) or (self.keep.queries and text.queries))

    def keeps_rows(self, text: TextPositions) -> bool:
        """Whether rows of a call with this text are kept."""
        return bool(self.keep.queries and text.queries)

    def find(self, layer_name: LayerName, queries: int, keys: int, pass_number: int) -> TextPositions:
        """The queries and keys of a call that are text."""
        if self.denoising is not None and self.denoising.inputs.text_length:
            found = self.denoising.find_text(layer_name.is_cross, queries, keys)
            given = self._find_in_labels(layer_name.keys, keys)
            return found if given is None or not found.keys else found._replace(keys=given)
        if not layer_name.is_cross:
            given = self.token_ids.find_text(layer_name.keys, pass_number, keys)
            given = self._find_in_labels(layer_name.keys, keys) if given is None else given
            return TextPositions() if given is None else TextPositions(given, given)
        # The sequence that an image attends to is text unless its labels say otherwise.
        texts = self._find_in_labels(layer_name.keys, keys)
        own = self._find_in_labels(layer_name.queries, queries) or ()
        return TextPositions(own, tuple(range(keys)) if texts is None else texts)

    def _find_in_labels(self, name: str, length: int) -> tuple[int, ...] | None:
        """`find_text_of`, once for each labels."""
        labels = self.token_ids.ready_labels.get(name)
        key = (id(labels), length)
        if key not in self._positions:
            # The labels are held, so that no others get their id.
            self._positions[key] = labels, find_text_of(labels, length)
        return self._positions[key][1]


def find_text_of(labels: Labels | None, length: int) -> tuple[int, ...] | None:
    """The positions of text in labels that fit a length, without empty ones; None without such labels."""
    if labels is None or len(labels) != length:
        return None
    positions = {n for row in range(labels.batch) for n in labels.split_kinds(row).get("text", ())}
    return tuple(sorted(n for n in positions if any(row[n] for row in labels.texts)))


def is_short_call(shape: Sequence[int]) -> bool:
    """Whether weights (B, H, Tq, Tk) have so few entries that rows are computed as a whole."""
    return math.prod(shape) <= MAX_SHORT_ENTRIES

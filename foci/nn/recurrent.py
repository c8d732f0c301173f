"""Where attention began: a recurrent network that reads, and one that writes and looks back at what was read.

Two ways to look, named by `RecurrentConfig.attend`:

    "after"   (Luong)     state = RNN(word, state);  context = attention(state);  word = f(state, context)
    "before"  (Bahdanau)  context = attention(state);  state = RNN([word, context], state);  word = f(state, context)

"after" needs no context to move the state on, so a known target passes through the RNN in one fused call, and all of
its states look at the source in one attention call. "before" takes a step for every word, also while training.
The input feeding of Luong is left out: it would make a loop of the first kind too.

B batch, S words of the source, T words of the target, L layers, C width of the source's states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, ClassVar, Literal, NamedTuple, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from foci.call import attention
from foci.masks.base import Mask
from foci.nn.config import Config
from foci.nn.embedding import check_tokens
from foci.nn.layout import Layout
from foci.nn.learned_scores import AdditiveScore
from foci.nn.model import Model
from foci.nn.stack import Output
from foci.scores import Dot, General, Score
from foci.weights.weights import Weights

Parameters = ParamSpec("Given")
Result = TypeVar("Found")


def skip_compile(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """What an RNN does is one call of a library, in which a compiler finds nothing to do: it runs as it is written.

    torch.compiler.disable would import the whole compiler here, PyTorch's own decorator with the first call: that takes
    seconds, so it is asked only where something is compiled.
    """
    hidden: Callable[Parameters, Result] = _disable_dynamo(function)

    @wraps(function)
    def called(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        return hidden(*args, **kwargs) if torch.compiler.is_compiling() else function(*args, **kwargs)

    return called


@dataclass(frozen=True)
class RecurrentConfig(Config):
    """What `Seq2SeqRNN` is made of."""

    vocabulary: int = 32000  # how many words the target has
    source_vocabulary: int | None = None  # how many words the source has; None: as many as the target
    width: int = 256  # of the embeddings and of the states, in each direction
    layers: int = 1  # how many RNNs stand on each other, in the encoder and in the decoder
    cell: Literal["gru", "lstm"] = "gru"  # what the RNNs are made of
    both_directions: bool = True  # whether the encoder also reads from the end
    score: Literal["additive", "dot", "general"] = "additive"  # how a state is compared with the source's
    attend: Literal["after", "before"] = "after"  # look after the step (Luong, fast) or before it (Bahdanau)
    shared: bool = False  # whether source and target have the same embeddings
    tied: bool = False  # whether the logits are made by the target's embeddings
    dropout: float = 0.0  # the share dropped of embeddings, between layers and before the logits, while training

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(1, "vocabulary", "source_vocabulary", "width", "layers")
        self.shares("dropout", whole=False)
        if self.shared and self.source_vocabulary not in {None, self.vocabulary}:
            raise ValueError(
                f"shared embeddings need one vocabulary, but got {self.source_vocabulary} and {self.vocabulary}"
            )


class EncodedSource(NamedTuple):
    """The source as it was read: states (B, S, C), which of them are real, and the decoder's first state."""

    states: Tensor
    layout: Layout
    hidden: tuple[Tensor, ...]  # (L, B, width), for an LSTM two of them

    def at(self, index: Tensor) -> EncodedSource:
        """What was read of some rows of the batch."""
        padding = None if self.layout.padding is None else self.layout.padding[index]
        return EncodedSource(self.states[index], Layout(padding), tuple(part[:, index] for part in self.hidden))


class RecurrentState:
    """What the decoder keeps while it generates: its state, and the keys of the source.

    Both are written in place once they are there, so that a captured step finds them where they were.
    """

    def __init__(self) -> None:
        self.hidden: tuple[Tensor, ...] = ()
        self.keys: Tensor | None = None

    def keep(self, hidden: tuple[Tensor, ...]) -> None:
        """Takes the state after some more words."""
        self._write(hidden, self.keys)

    def reorder(self, index: Tensor) -> None:
        """Makes row i of the batch what row index[i] was (beam search)."""
        self._write(tuple(part[:, index] for part in self.hidden), None if self.keys is None else self.keys[index])

    def take(self, other: RecurrentState) -> None:
        """Starts anew with what another state holds."""
        self._write(other.hidden, other.keys)

    def changing(self) -> list[Tensor]:
        """What a step changes and the next one relies on."""
        return list(self.hidden)

    def _write(self, hidden: tuple[Tensor, ...], keys: Tensor | None) -> None:
        if not self.hidden or self.hidden[0].shape != hidden[0].shape:
            self.hidden, self.keys = tuple(part.detach().clone() for part in hidden), keys
            return
        for old, new in zip(self.hidden, hidden, strict=True):
            old.copy_(new.detach())
        if keys is not None and self.keys is not None and keys is not self.keys:
            self.keys.copy_(keys)


class Seq2SeqRNN(Model):
    """Reads a source in both directions and writes a target, looking back at the source for every word.

    >>> model = foci.nn.Seq2SeqRNN.from_name("tiny", vocabulary=100, score="additive")
    >>> source, target = torch.randint(100, (2, 12)), torch.randint(100, (2, 10))
    >>> out = model(source, target[:, :-1], source_padding=torch.tensor([12, 8]), return_weights=True)
    >>> out.logits.shape                                               # teacher forcing: predict target[:, 1:]
    torch.Size([2, 9, 100])
    >>> out.weights["cross.L0"].shape                                  # the alignment: where each word looked
    (2, 1, 9, 12)

    The RNNs are PyTorch's fused ones (cuDNN on a GPU), which torch.compile calls as they are: compile without
    fullgraph.
    """

    config_type = RecurrentConfig
    config: RecurrentConfig
    sizes: ClassVar[dict[str, Config]] = {
        "tiny": RecurrentConfig(width=128),
        "small": RecurrentConfig(width=256, layers=2, dropout=0.1),
        "base": RecurrentConfig(width=512, layers=2, dropout=0.2),
    }

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.config = config
        width, context = config.width, config.width * (2 if config.both_directions else 1)
        words = config.vocabulary if config.source_vocabulary is None else config.source_vocabulary
        self.target_words = nn.Embedding(config.vocabulary, width)
        self.source_words = self.target_words if config.shared else nn.Embedding(words, width)
        self.reader = build_rnn(config, width, both=config.both_directions)
        # The last states of both directions become the decoder's first state, of an LSTM its memory cells too.
        self.bridges = nn.ModuleList(nn.Linear(context, width) for _ in range(2 if config.cell == "lstm" else 1))
        self.alignment = Alignment(config.score, width, context)
        self.writer = build_rnn(config, width + (context if config.attend == "before" else 0), both=False)
        self.readout = nn.Linear(width + context, width)
        self.head = None if config.tied else nn.Linear(width, config.vocabulary)
        for table in (self.target_words, self.source_words):
            nn.init.normal_(table.weight, std=width**-0.5)

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        *,
        source_padding: Tensor | None = None,
        return_weights: bool = False,
    ) -> Output:
        """Source (B, S) and target (B, T): what comes after each word of the target.

        Padding on the right of the target needs no mask: no word looks ahead.

        Args:
            source_padding: lengths (B,), or bool (B, S), True where a word is real, on the left of the padding.
            return_weights: also give the alignment, as `weights["cross.L0"]`.
        """
        return self.decode(target, self.encode(source, padding=source_padding), return_weights=return_weights)

    def encode(self, source: Tensor, *, padding: Tensor | None = None) -> EncodedSource:
        """The source, read once: what `decode` looks at."""
        if source.dim() != 2 or source.is_floating_point():
            raise ValueError(f"source must be whole numbers (B, S), but got {source.dtype} {tuple(source.shape)}")
        check_tokens(source, self.source_words.num_embeddings, "source")
        layout = build_length_layout(padding)
        x = F.dropout(self.source_words(source), self.config.dropout, self.training)
        states, last = self._read(x, layout.padding)
        hidden = tuple(
            torch.tanh(bridge(concat_directions(part, self.config.both_directions)))
            for bridge, part in zip(self.bridges, last, strict=True)
        )
        return EncodedSource(states, layout, hidden)

    def decode(
        self,
        target: Tensor,
        memory: EncodedSource,
        *,
        caches: RecurrentState | None = None,
        return_weights: bool = False,
    ) -> Output:
        """What comes after each word of the target (B, T); `caches` holds the state while generating."""
        check_tokens(target, self.target_words.num_embeddings, "target")
        x = F.dropout(self.target_words(target), self.config.dropout, self.training)
        hidden = memory.hidden if caches is None or not caches.hidden else caches.hidden
        keys = self._keys(memory, caches)
        mask = memory.layout.seen_by(Layout())
        steps = self._after if self.config.attend == "after" else self._before
        states, contexts, queries, hidden = steps(x, hidden, keys, memory.states, mask)
        if caches is not None:
            caches.keep(hidden)
        weights: dict[str, Weights] = {}
        if return_weights:
            weights["cross.L0"] = self.alignment(queries, keys, memory.states, mask, return_weights=True)[1]
        out = torch.tanh(self.readout(torch.cat([states, contexts], dim=-1)))
        out = F.dropout(out, self.config.dropout, self.training)
        return Output(out, F.linear(out, self.target_words.weight) if self.head is None else self.head(out), weights)

    def caches(self, capacity: int | None = None) -> RecurrentState:
        """An empty state for generation; it is of one size, whatever the capacity."""
        return RecurrentState()

    def attentions(self) -> dict[str, nn.Module]:
        """The alignment by the name that its weights have."""
        return {"cross.L0": self.alignment}

    def _keys(self, memory: EncodedSource, caches: RecurrentState | None) -> Tensor:
        """What queries are compared with; while generating they are made once."""
        if caches is None:
            return self.alignment.keys_of(memory.states)
        if caches.keys is None:
            # A copy, because it is written in place, and `general` compares with the states themselves.
            caches.keys = self.alignment.keys_of(memory.states).clone()
        return caches.keys

    @skip_compile
    def _read(self, x: Tensor, lengths: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """States (B, S, C) and the last state of each layer and direction; padding is skipped, in both directions."""
        if lengths is None:
            states, last = self.reader(x)
            return states, as_state_tuple(last)
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        states, last = self.reader(packed)
        return pad_packed_sequence(states, batch_first=True, total_length=x.shape[1])[0], as_state_tuple(last)

    def _after(
        self, x: Tensor, hidden: tuple[Tensor, ...], keys: Tensor, values: Tensor, mask: Mask | None
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
        """All words in one call of the RNN, then all states in one call of attention."""
        states, hidden = self._step(x, hidden)
        queries = self.alignment.queries_of(states)
        return states, self.alignment(queries, keys, values, mask), queries, hidden

    def _before(
        self, x: Tensor, hidden: tuple[Tensor, ...], keys: Tensor, values: Tensor, mask: Mask | None
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
        """Word by word: the last state looks, and what it saw moves it on."""
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for word in x.split(1, dim=1):
            query = self.alignment.queries_of(hidden[0][-1].unsqueeze(1))
            context = self.alignment(query, keys, values, mask)
            state, hidden = self._step(torch.cat([word, context.to(word.dtype)], dim=-1), hidden)
            found.append((state, context, query))
        states, contexts, queries = (torch.cat(each, dim=1) for each in zip(*found, strict=True))
        return states, contexts, queries, hidden

    @skip_compile
    def _step(self, x: Tensor, hidden: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The decoder's RNN over (B, T, ·), from a state to a state."""
        hidden = tuple(part.to(x.dtype).contiguous() for part in hidden)
        states, last = self.writer(x, hidden if len(hidden) == 2 else hidden[0])
        return states, as_state_tuple(last)


class Alignment(nn.Module):
    """Attention of the decoder's states over the source's, with one head: additive, dot or general."""

    def __init__(self, score: Literal["additive", "dot", "general"], width: int, context: int) -> None:
        super().__init__()
        # wᵀ tanh(Q state + K source); state · K source; state W source
        self.query = nn.Linear(width, width, bias=False) if score == "additive" else None
        self.key = None if score == "general" else nn.Linear(context, width)
        self.additive = AdditiveScore(1, width) if score == "additive" else None
        self.matrix = nn.Parameter(torch.empty(width, context)) if score == "general" else None
        if self.matrix is not None:
            nn.init.normal_(self.matrix, std=(width * context) ** -0.5)

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, mask: Mask | None, return_weights: bool = False
    ) -> Any:
        """(B, T, ·), (B, S, ·) and (B, S, C) -> (B, T, C), and the weights (B, 1, T, S) where they are asked for."""
        given = [part.unsqueeze(1) for part in (queries, keys, values)]
        if not return_weights:
            return attention(*given, score=self.score(), mask=mask).squeeze(1)
        out, weights = attention(*given, score=self.score(), mask=mask, return_weights=True)
        return out.squeeze(1), weights

    def score(self) -> Score:
        if self.additive is not None:
            score: Score = self.additive()
            return score
        return Dot() if self.matrix is None else General(self.matrix)

    def queries_of(self, states: Tensor) -> Tensor:
        return states if self.query is None else self.query(states)

    def keys_of(self, states: Tensor) -> Tensor:
        return states if self.key is None else self.key(states)


def build_rnn(config: RecurrentConfig, inputs: int, *, both: bool) -> nn.GRU | nn.LSTM:
    kind = nn.GRU if config.cell == "gru" else nn.LSTM
    dropout = config.dropout if config.layers > 1 else 0.0
    return kind(inputs, config.width, config.layers, batch_first=True, dropout=dropout, bidirectional=both)


def as_state_tuple(last: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A GRU gives one tensor, an LSTM two."""
    return (last,) if isinstance(last, Tensor) else tuple(last)


def concat_directions(last: Tensor, both: bool) -> Tensor:
    """(L · directions, B, width) -> (L, B, directions · width)."""
    return torch.cat([last[0::2], last[1::2]], dim=-1) if both else last


def build_length_layout(padding: Tensor | None) -> Layout:
    """Padding on the right, as lengths: what is read from the end must begin at the last real word."""
    layout = Layout(padding)
    if padding is None or layout.by_lengths:
        return layout
    if padding.device.type == "cpu" and not bool((padding[:, 1:] <= padding[:, :-1]).all()):
        raise ValueError("an RNN takes padding on the right, but got a bool tensor with padding before a real word")
    return Layout(padding.sum(-1))

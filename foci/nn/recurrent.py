"""Recurrent sequence-to-sequence models with attention: an RNN encoder, and an RNN decoder that attends to its states.

`RecurrentConfig.attend` chooses between two orders:

    "after"   (Luong)     state = RNN(token, state);  context = attention(state);  token = f(state, context)
    "before"  (Bahdanau)  context = attention(state);  state = RNN([token, context], state);  token = f(state, context)

With "after" the next state does not depend on the context, so a known target takes one fused RNN call and one attention
call. "before" needs one step per token, also in training. Luong's input feeding is not implemented: it would need a
loop over the tokens for "after" as well.

B batch, S tokens of the source, T tokens of the target, L layers, C width of the source states.
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
from foci.nn.config import LAYERS_LIMIT, VOCABULARY_LIMIT, WIDTH_LIMIT, Config
from foci.nn.embedding import check_tokens
from foci.nn.layout import Layout
from foci.nn.learned_scores import AdditiveScore
from foci.nn.model import Model
from foci.nn.stack import Output
from foci.scores import Dot, General, Score
from foci.weights.weights import Weights

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def skip_compile(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Exclude a function from torch.compile: an RNN is one library call, which a compiler cannot improve.

    torch.compiler.disable imports the whole compiler at decoration, `_disable_dynamo` at the first call. That takes
    seconds, so the excluded version is called only while something is being compiled.
    """
    excluded: Callable[Parameters, Result] = _disable_dynamo(function)

    @wraps(function)
    def wrapper(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        return excluded(*args, **kwargs) if torch.compiler.is_compiling() else function(*args, **kwargs)

    return wrapper


def to_autocast_dtype(x: Tensor) -> Tensor:
    """Cast the input of an RNN on a CPU as autocast does.

    Left to autocast, oneDNN selects a bfloat16 LSTM that it does not have on CPUs without AVX-512.
    """
    if x.device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
        return x
    return x.to(torch.get_autocast_dtype("cpu"))


@dataclass(frozen=True)
class RecurrentConfig(Config):
    """The config of `Seq2SeqRNN`.

    >>> foci.nn.RecurrentConfig(vocabulary=100, cell="lstm").replace(score="dot").score
    'dot'
    """

    vocabulary: int = 32000  # the vocabulary size of the target
    source_vocabulary: int | None = None  # the vocabulary size of the source; None: that of the target
    width: int = 256  # the width of the embeddings, and of the states in each direction
    layers: int = 1  # the number of RNN layers, in the encoder and in the decoder
    cell: Literal["gru", "lstm"] = "gru"  # the kind of RNN
    both_directions: bool = True  # whether the encoder is bidirectional
    score: Literal["additive", "dot", "general"] = "additive"  # the score between decoder and source states
    attend: Literal["after", "before"] = "after"  # attend after the RNN step (Luong, fast) or before it (Bahdanau)
    shared: bool = False  # whether source and target share one embedding
    tied: bool = False  # whether the head shares the weights of the target embedding
    dropout: float = 0.0  # dropout rate of the embeddings, between layers and before the head

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_range(1, VOCABULARY_LIMIT, "vocabulary", "source_vocabulary")
        self.check_range(1, WIDTH_LIMIT, "width")
        self.check_range(1, LAYERS_LIMIT, "layers")
        self.check_fractions("dropout", include_one=False)
        if self.shared and self.source_vocabulary not in {None, self.vocabulary}:
            raise ValueError(
                f"source_vocabulary must be None or equal to vocabulary={self.vocabulary} with shared=True,"
                f" got {self.source_vocabulary}"
            )


class EncodedSource(NamedTuple):
    """The encoded source and the decoder's first state."""

    states: Tensor  # (B, S, C)
    layout: Layout
    hidden: tuple[Tensor, ...]  # (L, B, width); two tensors for an LSTM

    def select_rows(self, index: Tensor) -> EncodedSource:
        """The encoded source of the rows `index` of the batch."""
        padding = None if self.layout.padding is None else self.layout.padding[index]
        return EncodedSource(self.states[index], Layout(padding), tuple(part[:, index] for part in self.hidden))


class RecurrentState:
    """The decoder's state and the keys of the source, kept during generation.

    Once allocated, both are written in place, so that their addresses stay valid in a captured CUDA graph.
    """

    def __init__(self) -> None:
        self.hidden: tuple[Tensor, ...] = ()
        self.keys: Tensor | None = None

    def update(self, hidden: tuple[Tensor, ...]) -> None:
        """Replace the decoder's state."""
        self._write(hidden, self.keys)

    def reorder(self, index: Tensor) -> None:
        """Replace row i of the batch by row index[i] (beam search)."""
        self._write(tuple(part[:, index] for part in self.hidden), None if self.keys is None else self.keys[index])

    def copy_from(self, source: RecurrentState) -> None:
        """Copy the contents of another state."""
        self._write(source.hidden, source.keys)

    def step_state(self) -> list[Tensor]:
        """Tensors that a step changes and the next step depends on."""
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
    """A recurrent encoder-decoder that attends to the source for every target token.

    >>> model = foci.nn.Seq2SeqRNN.from_name("tiny", vocabulary=100, score="additive")
    >>> source, target = torch.randint(100, (2, 12)), torch.randint(100, (2, 10))
    >>> out = model(source, target[:, :-1], source_padding=torch.tensor([12, 8]), return_weights=True)
    >>> out.logits.shape                                               # teacher forcing: predict target[:, 1:]
    torch.Size([2, 9, 100])
    >>> out.weights["cross.L0"].shape                                  # the alignment of target and source
    (2, 1, 9, 12)

    The RNNs are PyTorch's fused ones (cuDNN on a GPU). torch.compile calls them as they are, so compile without
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
        # The last states of both directions become the decoder's first state; for an LSTM, its memory cells too.
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
        """Logits (B, T, vocabulary) of the next token after each target token.

        Padding on the right of the target needs no mask: the decoder is causal.

        Args:
            source: tokens (B, S).
            target: tokens (B, T).
            source_padding: lengths (B,), or bool (B, S), True for real tokens; padding is on the right.
            return_weights: also return the alignment, as `weights["cross.L0"]`.
        """
        return self.decode(target, self.encode(source, padding=source_padding), return_weights=return_weights)

    def encode(self, source: Tensor, *, padding: Tensor | None = None) -> EncodedSource:
        """Encode the source once; `decode` attends to the result."""
        if source.dim() != 2 or source.is_floating_point():
            raise ValueError(f"source must be integers (B, S), got {source.dtype} {tuple(source.shape)}")
        check_tokens(source, self.source_words.num_embeddings, "source")
        layout = build_length_layout(padding)
        x = F.dropout(self.source_words(source), self.config.dropout, self.training)
        states, last = self._run_encoder(x, layout.padding)
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
        """Logits of the next token after each target token (B, T); `caches` keeps the state during generation."""
        check_tokens(target, self.target_words.num_embeddings, "target")
        x = F.dropout(self.target_words(target), self.config.dropout, self.training)
        hidden = memory.hidden if caches is None or not caches.hidden else caches.hidden
        keys = self._get_keys(memory, caches)
        mask = memory.layout.build_mask(Layout())
        decode = self._attend_after if self.config.attend == "after" else self._attend_before
        states, contexts, queries, hidden = decode(x, hidden, keys, memory.states, mask)
        if caches is not None:
            caches.update(hidden)
        weights: dict[str, Weights] = {}
        if return_weights:
            weights["cross.L0"] = self.alignment(queries, keys, memory.states, mask, return_weights=True)[1]
        out = torch.tanh(self.readout(torch.cat([states, contexts], dim=-1)))
        out = F.dropout(out, self.config.dropout, self.training)
        return Output(out, F.linear(out, self.target_words.weight) if self.head is None else self.head(out), weights)

    def caches(self, capacity: int | None = None) -> RecurrentState:
        """An empty state for generation; its size does not depend on `capacity`."""
        return RecurrentState()

    def attentions(self) -> dict[str, nn.Module]:
        """The alignment module, under the name of its weights."""
        return {"cross.L0": self.alignment}

    def _get_keys(self, memory: EncodedSource, caches: RecurrentState | None) -> Tensor:
        """The keys of the source; computed once during generation."""
        if caches is None:
            return self.alignment.project_keys(memory.states)
        if caches.keys is None:
            # A copy, because it is written in place, and the keys of `general` are the states themselves.
            caches.keys = self.alignment.project_keys(memory.states).clone()
        return caches.keys

    @skip_compile
    def _run_encoder(self, x: Tensor, lengths: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """States (B, S, C) and the last state of each layer and direction; both directions skip padding."""
        x = to_autocast_dtype(x)
        if lengths is None:
            states, last = self.reader(x)
            return states, as_state_tuple(last)
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        states, last = self.reader(packed)
        return pad_packed_sequence(states, batch_first=True, total_length=x.shape[1])[0], as_state_tuple(last)

    def _attend_after(
        self, x: Tensor, hidden: tuple[Tensor, ...], keys: Tensor, values: Tensor, mask: Mask | None
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
        """All tokens in one RNN call, then all states in one attention call."""
        states, hidden = self._run_decoder(x, hidden)
        queries = self.alignment.project_queries(states)
        return states, self.alignment(queries, keys, values, mask), queries, hidden

    def _attend_before(
        self, x: Tensor, hidden: tuple[Tensor, ...], keys: Tensor, values: Tensor, mask: Mask | None
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
        """Token by token: the last state attends, and the context is an input of the next RNN step."""
        steps: list[tuple[Tensor, Tensor, Tensor]] = []
        for token in x.split(1, dim=1):
            query = self.alignment.project_queries(hidden[0][-1].unsqueeze(1))
            context = self.alignment(query, keys, values, mask)
            state, hidden = self._run_decoder(torch.cat([token, context.to(token.dtype)], dim=-1), hidden)
            steps.append((state, context, query))
        states, contexts, queries = (torch.cat(each, dim=1) for each in zip(*steps, strict=True))
        return states, contexts, queries, hidden

    @skip_compile
    def _run_decoder(self, x: Tensor, hidden: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run the decoder's RNN over (B, T, ·); returns all its states and the last one."""
        x = to_autocast_dtype(x)
        hidden = tuple(part.to(x.dtype).contiguous() for part in hidden)
        states, last = self.writer(x, hidden if len(hidden) == 2 else hidden[0])
        return states, as_state_tuple(last)


class Alignment(nn.Module):
    """Attention of the decoder's states to the source's, with one head and an additive, dot or general score."""

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
        """(B, T, ·), (B, S, ·) and (B, S, C) -> (B, T, C), with return_weights also the weights (B, 1, T, S)."""
        q, k, v = (part.unsqueeze(1) for part in (queries, keys, values))
        if not return_weights:
            return attention(q, k, v, score=self.score(), mask=mask).squeeze(1)
        out, weights = attention(q, k, v, score=self.score(), mask=mask, return_weights=True)
        return out.squeeze(1), weights

    def score(self) -> Score:
        if self.additive is not None:
            score: Score = self.additive()
            return score
        return Dot() if self.matrix is None else General(self.matrix)

    def project_queries(self, states: Tensor) -> Tensor:
        return states if self.query is None else self.query(states)

    def project_keys(self, states: Tensor) -> Tensor:
        return states if self.key is None else self.key(states)


def build_rnn(config: RecurrentConfig, inputs: int, *, both: bool) -> nn.GRU | nn.LSTM:
    kind = nn.GRU if config.cell == "gru" else nn.LSTM
    dropout = config.dropout if config.layers > 1 else 0.0
    return kind(inputs, config.width, config.layers, batch_first=True, dropout=dropout, bidirectional=both)


def as_state_tuple(last: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The state as a tuple: a GRU returns one tensor, an LSTM two."""
    return (last,) if isinstance(last, Tensor) else tuple(last)


def concat_directions(last: Tensor, both: bool) -> Tensor:
    """(L · directions, B, width) -> (L, B, directions · width)."""
    return torch.cat([last[0::2], last[1::2]], dim=-1) if both else last


def build_length_layout(padding: Tensor | None) -> Layout:
    """A layout with right padding as lengths: the backward RNN must start at the last real token."""
    layout = Layout(padding)
    if padding is None or layout.has_lengths:
        return layout
    if padding.device.type == "cpu" and not bool((padding[:, 1:] <= padding[:, :-1]).all()):
        raise ValueError("padding must be on the right for an RNN, got a bool tensor with padding before a real token")
    return Layout(padding.sum(-1))

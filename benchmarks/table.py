"""The command line and the results of all benchmarks: a CSV file with every row, a short table on the screen."""

from __future__ import annotations

import argparse
import csv
import os
import platform
import re
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from timing import STARTED

import foci

RESULTS = Path(__file__).resolve().parent / "results"


def machine_name(device: torch.device) -> str:
    """A short name for file names: nvidia-h200, cpu-2-cores."""
    if device.type == "cuda":
        return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")
    return f"cpu-{torch.get_num_threads()}-cores"


def describe_environment(device: torch.device) -> dict[str, str]:
    """The machine and the versions, for the head of a CSV file."""
    found = {"machine": machine_name(device), "date": datetime.now(UTC).strftime("%Y-%m-%d")}
    found |= {"foci": foci.__version__, "python": platform.python_version()}
    for package in ("torch", "triton"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    if device.type == "cuda":
        found["cuda, cudnn"] = f"{torch.version.cuda}, {torch.backends.cudnn.version()}"
    else:
        found["threads"] = f"{torch.get_num_threads()} of {os.cpu_count()}"
        found["instructions"] = torch.backends.cpu.get_cpu_capability()
        # A load above the number of cores means that other processes ran: only ratios within the run are meaningful.
        found["load"] = f"{os.getloadavg()[1]:.1f} over five minutes"
    return found


@dataclass
class Table:
    """The rows of a run: a CSV file, written after each row, and a few columns on the screen."""

    device: torch.device
    columns: tuple[str, ...]
    path: Path | None
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, **row: Any) -> None:
        """Add a row; a contestant without a result has None, and `note` says why."""
        unknown = set(row) - set(self.columns)
        if unknown:
            raise ValueError(f"columns must be among {', '.join(self.columns)}, got {', '.join(sorted(unknown))}")
        self.rows.append(row)
        self.write()

    def write(self) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("w", newline="") as file:
            file.writelines(f"# {name}: {value}\n" for name, value in describe_environment(self.device).items())
            writer = csv.DictWriter(file, self.columns)
            writer.writeheader()
            writer.writerows({name: format_value(row.get(name, "")) for name in self.columns} for row in self.rows)

    def print_table(self, title: str, down: tuple[str, ...], value: str, more: dict[str, tuple[str, str]]) -> None:
        """Print a line per combination of `down` and a column per contestant; `more` adds columns of one of them."""
        rows = [row for row in self.rows if value in row]
        if not rows:
            return
        across = [*dict.fromkeys(row["contestant"] for row in rows), *more]
        lines: dict[tuple[str, ...], dict[str, str]] = {}
        for row in rows:
            cells = lines.setdefault(tuple(str(row.get(name, "")) for name in down), {})
            cells[row["contestant"]] = "failed" if has_failed(row) else format_value(row[value])
            cells |= {name: format_value(row.get(c)) for name, (whose, c) in more.items() if whose == row["contestant"]}
        grid = [[*down, *across], *([*key, *(cells.get(name, "") for name in across)] for key, cells in lines.items())]
        print(f"\n{title}\n{align_columns(grid, len(down))}")

    def print_failures(self) -> None:
        """Print every failure, each text once."""
        notes: dict[str, list[str]] = {}
        for row in filter(has_failed, self.rows):
            notes.setdefault(f"{row['contestant']}: {row['note']}", []).append(row["case"])
        if notes:
            print("\nfailed")
        for text, cases in notes.items():
            print(f"  {text} ({len(cases)} rows, first: {cases[0]})")

    def has_failed_gate(self) -> bool:
        """Whether foci failed a gate."""
        return any(row["contestant"].startswith("foci") and "GATE" in str(row.get("note")) for row in self.rows)

    def print_footer(self) -> None:
        print("\n" + ", ".join(f"{name} {value}" for name, value in describe_environment(self.device).items()))
        print(f"rows written to {self.path}" if self.path else "no file written: a partial run needs --out FILE")


def has_failed(row: dict[str, Any]) -> bool:
    return bool(row.get("note"))


def format_value(value: Any) -> str:
    """A value with about four significant digits."""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return "" if value is None else str(value)


def align_columns(grid: list[list[str]], left: int) -> str:
    widths = [max(len(row[i]) for row in grid) for i in range(len(grid[0]))]
    sides = ["<" if i < left else ">" for i in range(len(widths))]
    return "\n".join(
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in grid
    )


@dataclass(frozen=True)
class Options:
    """The options of the command line."""

    device: torch.device
    dtypes: tuple[torch.dtype, ...]
    quick: bool
    only: tuple[str, ...]
    path: Path | None
    seconds: float
    minutes: float

    def wants(self, name: str) -> bool:
        return not self.only or any(part in name for part in self.only)

    @property
    def out_of_time(self) -> bool:
        """Whether the time limit of the run is reached."""
        return time.perf_counter() - STARTED > self.minutes * 60


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parse_options(name: str, about: str, cpu_dtypes: tuple[torch.dtype, ...]) -> Options:
    """Parse the command line that all benchmarks share."""
    parser = argparse.ArgumentParser(
        prog=f"{name}.py",
        description=about,
        epilog=f"""examples:
  python benchmarks/{name}.py                            everything, on the GPU if there is one
  python benchmarks/{name}.py --quick                    tiny sizes, to check that it runs
  python benchmarks/{name}.py --only causal window       the cases whose name contains one of these
  python benchmarks/{name}.py --device cpu --dtype bfloat16 --out /tmp/{name}.csv""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes, few rounds; writes no file without --out")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="cases whose name contains one of these")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the inputs (default: bfloat16 on a GPU)")
    parser.add_argument("--seconds", type=float, help="timing per case and direction (default: 1 on a GPU, else 4)")
    parser.add_argument("--minutes", type=float, help="start no case after this time (default: 4 on a GPU, else 20)")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"CSV file (default: results/{name}-<machine>.csv)")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    gpu = device.type == "cuda"
    dtypes = (DTYPES[arguments.dtype],) if arguments.dtype else (torch.bfloat16,) if gpu else cpu_dtypes
    whole = not arguments.quick and not arguments.only
    path = arguments.out or (RESULTS / f"{name}-{machine_name(device)}.csv" if whole else None)
    seconds = arguments.seconds or (0.05 if arguments.quick else 1.0 if gpu else 4.0)
    return Options(
        device, dtypes, arguments.quick, tuple(arguments.only), path, seconds, arguments.minutes or (4 if gpu else 20)
    )


def dtype_name(dtype: torch.dtype) -> str:
    return {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]

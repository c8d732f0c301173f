"""Draw the memory by length that benchmarks/weights.py measured, and the size of the matrix for comparison.

    python benchmarks/memory.py benchmarks/results/weights-nvidia-h200.csv --out docs/pictures/memory.png

Both axes are logarithmic: linear memory rises by one step when the length doubles.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

HEADS = 8
DRAWN = {"foci out": "output alone", "foci summary": "output and every statistic"}


def main() -> None:
    """Read the table and write the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, help="the CSV that weights.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="the image to write")
    options = parser.parse_args()
    draw({label: points(options.table, name) for name, label in DRAWN.items()}, options.out)


def points(table: Path, contestant: str) -> list[tuple[int, float]]:
    """Keys and MiB in addition to the inputs for each long case with a result."""
    with table.open() as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    found = [row for row in rows if row["scores"] == "long" and row["contestant"] == contestant and row["mib"]]
    return [(int(row["keys"]), float(row["mib"])) for row in found]


def draw(lines: dict[str, list[tuple[int, float]]], out: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    lengths = sorted({length for line in lines.values() for length, _ in line})
    for label, line in lines.items():
        axes.plot(*zip(*line, strict=True), marker="o", label=label)
    matrix = [HEADS * length * length * 2 / 2**20 for length in lengths]
    axes.plot(lengths, matrix, linestyle="--", color="grey", label="the matrix in bfloat16 (computed)")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.yaxis.set_major_formatter(lambda mib, place: f"{mib:,.0f} MiB" if mib < 1024 else f"{mib / 1024:,.0f} GiB")
    axes.set_xlabel(f"tokens, {HEADS} heads of 128, causal")
    axes.set_title("Peak memory in addition to queries, keys and values", loc="left")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(out, dpi=150)


if __name__ == "__main__":
    main()

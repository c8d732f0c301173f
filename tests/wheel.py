"""Checks a wheel and a source archive: `python -m tests.wheel dist/*.whl dist/*.tar.gz`, which `.ci/wheel` runs."""

import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
# The pretrained models take 26 MB of it; PyPI takes files of up to 100 MB.
MAX_BYTES = 60 * 2**20


def expected_files() -> set[str]:
    """The files of the package that git knows, or that are there in a source archive."""
    suffixes = {".py", ".c", ".h", ".js", ".css", ".safetensors", ".json", ".jsonl", ".md", ".toml", ".png", ".wav"}
    paths = (path for path in (ROOT / "foci").rglob("*") if path.suffix in suffixes and path.is_file())
    return {str(path.relative_to(ROOT)) for path in paths}


def problems_of(archive: Path, names: set[str]) -> list[str]:
    """What is wrong with an archive of these files."""
    size = archive.stat().st_size
    problems = [f"{archive.name} has no {name}" for name in sorted(expected_files() - names)]
    problems += [
        f"{archive.name} must not have {name}" for name in sorted(names) if "__pycache__" in name or ".venv" in name
    ]
    if size > MAX_BYTES:
        problems.append(f"{archive.name} must have at most {MAX_BYTES:,} bytes, got {size:,}")
    return problems


def wheel_problems(wheel: Path) -> list[str]:
    """What is wrong with a wheel: beside the package it may have only its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    strangers = [name for name in sorted(names) if not name.startswith(("foci/", "foci-"))]
    return problems_of(wheel, names) + [f"{wheel.name} must not have {name}" for name in strangers]


def source_problems(source: Path) -> list[str]:
    """What is wrong with a source archive."""
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    return problems_of(source, names)


def main(arguments: list[str]) -> int:
    """Print what is wrong with the files."""
    wheels = [Path(name) for name in arguments if name.endswith(".whl")]
    sources = [Path(name) for name in arguments if name.endswith(".tar.gz")]
    found = [one for wheel in wheels for one in wheel_problems(wheel)]
    found += [one for source in sources for one in source_problems(source)]
    for path in (*wheels, *sources):
        print(f"{path.name}: {path.stat().st_size / 2**20:.1f} MB")
    print(*found, sep="\n", file=sys.stderr)
    return 1 if found or not wheels or not sources else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The texts of the repository: they mention only the project itself."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("foci", "tests", "benchmarks", "docs", "examples", ".ci")
# Sentences that models are trained on, which may be about anything.
SENTENCES = {ROOT / "benchmarks" / "training" / name for name in ("pairs", "sentiment")}
SUFFIXES = {
    *("", ".cfg", ".cff", ".css", ".csv", ".html", ".js", ".json", ".md"),
    *(".py", ".sh", ".toml", ".txt", ".typed", ".yaml", ".yml"),
}
# Text that belongs to one machine or to the organisation of the work, not to the project.
UNWANTED = {
    "a path of one machine": r"(?<![\w.~/-])/(?:home|root|work|farm|Users|opt|mnt)/\w",
    "a package registry": r"index-url|find-links|pypi\.org/simple|pythonhosted",
    "the organisation of the work": r"(?i)\b(?:tickets?|workplace|sub-?agents?|helpers?|this session|issue #?\d+)\b",
}


def text_files() -> list[Path]:
    # In a git worktree .git is a file.
    files = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]
    files += [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    own = [path for path in files if "build" not in path.relative_to(ROOT).parts and path.name != Path(__file__).name]
    return sorted(path for path in own if path.suffix in SUFFIXES and path.parent not in SENTENCES)


def unwanted_texts(text: str) -> list[str]:
    return [f"{what}: {match.group()}" for what, rule in UNWANTED.items() for match in re.finditer(rule, text)]


def test_files_mention_only_the_project() -> None:
    files = text_files()
    assert len(files) > 20
    assert {str(path.relative_to(ROOT)): found for path in files if (found := unwanted_texts(path.read_text()))} == {}


@pytest.mark.parametrize("text", ["see /home/jane/x", "pip --index-url x", "fixes issue #12", "in this session"])
def test_unwanted_texts_are_found(text: str) -> None:
    assert len(unwanted_texts(text)) == 1

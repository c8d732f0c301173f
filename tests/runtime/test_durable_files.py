"""Files that survive a crash: a damaged one is refused, and a failed write leaves the old content."""

import json
from pathlib import Path

import pytest

from foci.runtime.durable_files import checksum_file, read_checked_json, write_checked_json, write_text_atomically


def test_checked_json_round_trips(tmp_path: Path) -> None:
    content = {"b": [1, 2.5, None], "a": {"ä": "\x1b", "nan": float("inf")}, "0": True}
    write_checked_json(tmp_path / "x.json", content)
    assert read_checked_json(tmp_path / "x.json") == content
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", r"the checksum of x\.json does not match"),
        ('{"step": 4, "checksum": 0}', "the checksum of"),
        ("[]", r"x\.json must be a file with a JSON object, got list"),
        ("", "is not valid JSON"),
        ("[" * 10**6, "is not valid JSON"),
        ("\udcff", "is not valid JSON"),
    ],
)
def test_damaged_json_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=said):
        read_checked_json(tmp_path / "x.json")


def test_a_changed_value_is_refused(tmp_path: Path) -> None:
    write_checked_json(tmp_path / "x.json", {"step": 20})
    changed = json.loads((tmp_path / "x.json").read_text()) | {"step": 21}
    (tmp_path / "x.json").write_text(json.dumps(changed))
    with pytest.raises(ValueError, match="checksum"):
        read_checked_json(tmp_path / "x.json")


def test_only_plain_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "x.json").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="must be a file"):
        read_checked_json(tmp_path / "x.json")
    assert checksum_file(tmp_path / "x.json") is None
    assert checksum_file(tmp_path / "missing") is None


def test_a_failed_write_keeps_the_old_text(tmp_path: Path) -> None:
    write_text_atomically(tmp_path / "x", "old")
    with pytest.raises(UnicodeEncodeError):
        write_text_atomically(tmp_path / "x", "new \ud800")
    assert (tmp_path / "x").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]

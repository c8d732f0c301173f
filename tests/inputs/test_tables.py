import gzip
import lzma
from pathlib import Path

import pytest

from foci.inputs.tables import (
    data_suffix,
    read_lines,
    read_table_rows,
    read_text_file,
    read_valid_rows,
    require_one_path,
)


def test_header_byte_order_mark_and_line_ends_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes("\ufefftext\tlabel\r\ngood\tx\r\n\r\nbad\ty".encode())
    assert [(row.location.rpartition(":")[2], row.fields) for row in read_valid_rows(path, ("text", "label"))] == [
        ("2", {"text": "good", "label": "x"}),
        ("4", {"text": "bad", "label": "y"}),
    ]


def test_compressed_files_read_like_plain_ones(tmp_path: Path) -> None:
    content = "a\tä\n".encode()
    (tmp_path / "a.tsv").write_bytes(content)
    (tmp_path / "a.tsv.gz").write_bytes(gzip.compress(content))
    (tmp_path / "a.tsv.xz").write_bytes(lzma.compress(content))
    for name in ("a.tsv", "a.tsv.gz", "a.tsv.xz"):
        assert read_text_file(tmp_path / name) == "a\tä\n"
        assert read_valid_rows(tmp_path / name, ("x", "y"))[0].fields == {"x": "a", "y": "ä"}
        assert data_suffix(tmp_path / name) == ".tsv"


def test_unreadable_files_give_clear_errors(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"text" * 1000)[:-20])
    (tmp_path / "b.xz").write_bytes(b"no archive")
    (tmp_path / "c.txt").write_bytes(b"caf\xe9")
    for name, said in (
        ("a.gz", "cannot be decompressed"),
        ("b.xz", "cannot be decompressed"),
        ("c.txt", "must be UTF-8"),
    ):
        with pytest.raises(ValueError, match=said):
            read_text_file(tmp_path / name)
    with pytest.raises(ValueError, match=r"a\.gz cannot be decompressed"):
        list(read_lines(tmp_path / "a.gz"))
    with pytest.raises(ValueError, match=r"must be a file, got a directory"):
        list(read_table_rows(tmp_path, ("x",)))
    assert [row.problem for row in read_table_rows(tmp_path / "c.txt", ("x",))] == [
        "a line must be UTF-8, got byte b'\\xe9' at column 4"
    ]


def test_a_single_path_is_required(tmp_path: Path) -> None:
    assert require_one_path([tmp_path], "a text") == tmp_path
    with pytest.raises(ValueError, match="the data must be one path, a text, got 2"):
        require_one_path([tmp_path, tmp_path], "a text")

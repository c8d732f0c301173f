import gzip
import lzma
from pathlib import Path

import pytest

from foci.inputs.tables import (
    TableWarning,
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


def read(path: Path, content: str | bytes) -> list[tuple[int, dict[str, str] | str | None]]:
    """The line numbers and the fields or problems of a table of pairs."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    rows = read_table_rows(path, ("source", "target"))
    return [(int(row.location.rpartition(":")[2]), row.fields or row.problem) for row in rows]


def pair(source: str, target: str) -> dict[str, str]:
    return {"source": source, "target": target}


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_csv_tables_are_read(separator: str, tmp_path: Path) -> None:
    content = f'A "big" dog{separator}Ein Hund\n\n"One, two;\nthree"{separator}"""Eins"" usw."\r\nlast{separator}Ende\n'
    assert read(tmp_path / "a.csv", content.replace('"big"', "big")) == [
        (1, pair("A big dog", "Ein Hund")),
        (3, pair("One, two;\nthree", '"Eins" usw.')),
        (5, pair("last", "Ende")),
    ]


def test_compressed_csv_with_a_header_in_another_order_is_read(tmp_path: Path) -> None:
    content = gzip.compress(b"id,Target,Source\n7,Hallo,Hello\n")
    assert read(tmp_path / "a.csv.gz", content) == [(2, pair("Hello", "Hallo"))]


def test_problems_of_csv_lines_name_their_line(tmp_path: Path) -> None:
    found = read(tmp_path / "a.csv", b'A dog.,Ein Hund.\ncaf\xe9,x\nonly one\n"a"b,c\nA cat.,Eine Katze.\n')
    assert [number for number, _ in found] == [1, 2, 3, 4, 5]
    assert found[1][1] == "a line must be UTF-8, got byte b'\\xe9' at column 4"
    assert found[2][1] == "a line must have 2 comma-separated columns (source, target), got 1"
    assert str(found[3][1]).startswith("a line must be valid CSV: ")
    assert found[4][1] == pair("A cat.", "Eine Katze.")


def test_commas_in_a_tsv_are_explained(tmp_path: Path) -> None:
    [(_, problem)] = read(tmp_path / "a.tsv", "A dog.,Ein Hund.\n")
    assert problem == (
        "a line must have 2 tab-separated columns (source, target), got 1;"
        " the name of a file with commas between columns must end with .csv"
    )


@pytest.mark.parametrize("header", ["a\tb", "en\tde", "English\tGerman", "src_text\ttgt_text"])
def test_an_unknown_header_is_skipped_with_a_warning(header: str, tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text(f"{header}\ntwenty one\t21\nthree\t3\n")
    first, second = read_table_rows(path, ("source", "target"))
    cells = header.replace("\t", ", ")
    assert first.warning == f"line 1 ({cells}) is read as a header; the columns in order are source and target"
    assert (first.fields, second.warning) == (pair("twenty one", "21"), None)
    with pytest.warns(TableWarning, match=r"a\.tsv:2: line 1 .* is read as a header"):
        assert len(read_valid_rows(path, ("source", "target"))) == 2


@pytest.mark.parametrize(
    "content",
    [
        "dog\thund\ncat\tkatze\n",
        "Hello\tHallo\nHow are you?\tWie geht es?\n",
        "good\tpos\na good film\tpos\nvery bad\tneg\n",
        "a\tb\n",
        "a\ta\nb c\t1\n",
    ],
)
def test_a_first_row_like_the_others_is_data(content: str, tmp_path: Path) -> None:
    found = read(tmp_path / "a.tsv", content)
    assert len(found) == content.count("\n")


def test_a_damaged_gzip_stream_is_refused(tmp_path: Path) -> None:
    content = bytearray(gzip.compress(b"A dog.\tEin Hund.\n" * 100))
    content[12:20] = b"\xff" * 8
    for suffix in (".tsv.gz", ".csv.gz", ".jsonl.gz"):
        with pytest.raises(ValueError, match="cannot be decompressed"):
            read(tmp_path / f"a{suffix}", bytes(content))
    with pytest.raises(ValueError, match="cannot be decompressed"):
        read_text_file(tmp_path / "a.tsv.gz")


def test_files_that_expand_too_much_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.tsv.xz"
    path.write_bytes(lzma.compress(b"a" * 2**23))
    message = "must have at most 100 bytes of text per compressed byte, got more: set FOCI_MAX_EXPANSION=... to read it"
    with pytest.raises(ValueError, match=message):
        list(read_lines(path))
    with pytest.raises(ValueError, match=message):
        read_text_file(path)
    monkeypatch.setenv("FOCI_MAX_EXPANSION", "100000")
    assert len(read_text_file(path)) == 2**23
    monkeypatch.setenv("FOCI_MAX_TEXT_BYTES", "1000")
    with pytest.raises(ValueError, match="must have at most 1,000 bytes of text, got more"):
        read_text_file(path)
    monkeypatch.setenv("FOCI_MAX_LINE_BYTES", "1000")
    with pytest.raises(ValueError, match="must have at most 1,000 bytes in a line, got more"):
        list(read_lines(path))
    monkeypatch.setenv("FOCI_MAX_LINE_BYTES", "many")
    with pytest.raises(ValueError, match="FOCI_MAX_LINE_BYTES must be a number of bytes in a line, got 'many'"):
        list(read_lines(path))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("[" * 100_000, "a line must be valid JSON, got objects or lists nested too deeply"),
        (r'{"source": "\ud83d", "target": "b"}', "'source' must be valid Unicode, got half of a surrogate pair"),
    ],
)
def test_hostile_json_lines_are_refused(line: str, problem: str, tmp_path: Path) -> None:
    assert read(tmp_path / "a.jsonl", line) == [(1, problem)]


def test_a_single_path_is_required(tmp_path: Path) -> None:
    assert require_one_path([tmp_path], "a text") == tmp_path
    with pytest.raises(ValueError, match="the data must be one path, a text, got 2"):
        require_one_path([tmp_path, tmp_path], "a text")

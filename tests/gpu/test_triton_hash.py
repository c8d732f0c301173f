"""The hash of Triton's files: stored once, and computed again when a file changes."""

from pathlib import Path
from unittest import mock

import pytest

from foci.gpu import triton_hash

triton_cache = pytest.importorskip("triton.runtime.cache")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that looks like Triton, whose hash is counted, and an empty cache directory."""
    for name in ("runtime/cache.py", "compiler/compiler.py", "backends/nvidia/driver.py"):
        path = tmp_path / "triton" / name
        path.parent.mkdir(parents=True)
        path.write_text("x = 1\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(triton_cache, "__file__", str(tmp_path / "triton" / "runtime" / "cache.py"))
    return tmp_path / "triton"


def hash_in_new_process(monkeypatch: pytest.MonkeyPatch, computed: str) -> tuple[str, int]:
    """The hash that Triton finds, and how often it was computed."""
    own = mock.Mock(return_value=computed)
    monkeypatch.setattr(triton_cache, "triton_key", own)
    triton_hash.prepare_triton_hash()
    return triton_cache.triton_key(), own.call_count


def test_a_stored_hash_is_used_until_a_file_changes(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hash_in_new_process(monkeypatch, "first") == ("first", 2)
    assert hash_in_new_process(monkeypatch, "not computed") == ("first", 0)
    (package / "backends" / "nvidia" / "driver.py").write_text("x = 12\n")
    assert hash_in_new_process(monkeypatch, "second") == ("second", 2)
    (package / "compiler" / "new.py").write_text("")
    assert hash_in_new_process(monkeypatch, "third")[0] == "third"


def test_an_incomplete_file_is_not_used(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = triton_hash.hash_path(package)
    assert path is not None
    for damaged in ("", "\n", "without an end", "\ud800"):
        path.write_bytes(damaged.encode("utf-8", "surrogatepass"))
        assert hash_in_new_process(monkeypatch, "computed")[0] == "computed"
    path.unlink()
    path.mkdir()
    assert hash_in_new_process(monkeypatch, "computed")[0] == "computed"


def test_the_stored_hash_is_that_of_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    own = triton_cache.triton_key
    monkeypatch.setattr(triton_cache, "triton_key", own)
    triton_hash.prepare_triton_hash()
    triton_hash.prepare_triton_hash()
    assert triton_cache.triton_key is not own
    assert triton_cache.triton_key() == own()

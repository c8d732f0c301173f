"""C sources as libraries: built once, stored where only the user can write, and every failure has a reason."""

import ctypes
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from foci.runtime import durable_files, native

ROOT = Path(__file__).parent.parent.parent
COMPILER = next(filter(None, map(shutil.which, native.COMPILERS)), None)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler on the PATH")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and nothing that was found out before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("FOCI_CC", raising=False)
    native.open_library.cache_clear()
    yield tmp_path / "foci" / "native"
    native.open_library.cache_clear()


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of sources of our own."""
    folder = tmp_path / "sources"
    folder.mkdir()
    monkeypatch.setattr(native, "SOURCE_FOLDER", folder)
    (folder / "half.c").write_text('#include "one.h"\nint half(int x) { return x / 2 + ONE; }\n')
    (folder / "one.h").write_text("#define ONE 1\n")
    return folder


@needs_compiler
def test_a_c_source_is_compiled_and_loaded(sources: Path, cache: Path) -> None:
    assert native.why_unavailable("half") is None
    assert native.load_library("half").half(10) == 6
    files = list(cache.iterdir())
    assert len(files) == 1
    assert stat.S_IMODE(files[0].stat().st_mode) == 0o700
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


@needs_compiler
def test_a_library_is_compiled_once(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native.load_library("half")
    native.open_library.cache_clear()
    monkeypatch.setattr(native, "compile_source", None)
    assert native.load_library("half").half(10) == 6


@needs_compiler
@pytest.mark.parametrize("changed", ["half.c", "one.h"])
def test_a_changed_source_is_compiled_again(sources: Path, changed: str, cache: Path) -> None:
    native.load_library("half")
    text = (sources / changed).read_text()
    (sources / changed).write_text(text.replace("/ 2", "/ 5").replace("ONE 1", "ONE -3"))
    native.open_library.cache_clear()
    assert native.load_library("half").half(10) == {"half.c": 3, "one.h": 2}[changed]
    assert len(list(cache.iterdir())) == 2


def cut(content: bytes, size: int) -> bytes:
    return content[:size]


def flip(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


@needs_compiler
@pytest.mark.parametrize(
    "damage",
    [
        lambda content: cut(content, 8192),
        lambda content: cut(content, 100),
        lambda content: b"",
        lambda content: bytes(len(content)),
        lambda content: flip(content, len(content) // 2),
        lambda content: content + b"x",
    ],
    ids=["8 KiB", "100 bytes", "empty", "zeros", "one bit", "longer"],
)
def test_a_damaged_library_is_built_again(damage: Callable[[bytes], bytes], sources: Path, cache: Path) -> None:
    path = native.build_library("half", native.compiler_command())
    path.write_bytes(damage(path.read_bytes()))
    assert native.load_library("half").half(10) == 6
    assert [each for each in cache.iterdir() if native.is_intact(each)] == list(cache.iterdir())


@needs_compiler
def test_a_killed_build_leaves_nothing(sources: Path, cache: Path, tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.write_text('#!/bin/sh\nfor last; do :; done\necho part > "$last"\nexec sleep 60\n')
    slow.chmod(0o700)
    code = "from foci.runtime import native; native.load_library('statistics')"
    environment = os.environ | {"FOCI_CC": str(slow), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, start_new_session=True) as build:
        while not any(path.stat().st_size for path in cache.glob("*.part")):
            assert build.poll() is None
            time.sleep(0.01)
        native.load_library("half")
        assert sorted(path.suffix for path in cache.iterdir()) == [".part", ".so"], "the other build is running"
        os.killpg(build.pid, signal.SIGKILL)
    native.open_library.cache_clear()
    native.load_library("half")
    assert [path.suffix for path in cache.iterdir()] == [".so"]


@needs_compiler
def test_a_relative_cache_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert native.why_unavailable("statistics") == "XDG_CACHE_HOME must be an absolute path, got 'cache'"
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_every_folder_up_to_the_cache_root_must_be_private(cache: Path, depth: int) -> None:
    assert native.library_folder() == cache
    folder = (cache, *cache.parents)[depth]
    folder.chmod(0o777)
    assert native.library_folder() != cache
    folder.chmod(0o700)
    assert native.library_folder() == cache


def test_new_folders_are_private_whatever_the_umask(cache: Path) -> None:
    before = os.umask(0o002)
    try:
        assert native.library_folder() == cache
    finally:
        os.umask(before)


def test_the_cache_root_may_be_a_link(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "link"))
    assert native.library_folder() == cache


@needs_compiler
def test_a_library_is_flushed_before_it_is_renamed(sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suffixes: list[str] = []
    monkeypatch.setattr(
        durable_files, "fsync_path", lambda path: suffixes.extend(each.suffix for each in cache.iterdir())
    )
    native.load_library("half")
    assert suffixes == [".part", ".so"]


def test_no_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert native.why_unavailable("statistics") == "no C compiler was found: looked for cc, gcc, clang"
    with pytest.raises(native.UnavailableError, match="no C compiler was found"):
        native.load_library("statistics")


@pytest.mark.parametrize(
    ("named", "reason"),
    [("none", "FOCI_CC=none disables the C compiler"), ("nocc", "no C compiler was found: looked for nocc")],
)
def test_a_named_compiler_is_the_only_one(named: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOCI_CC", named)
    assert native.why_unavailable("statistics") == reason


def test_a_compiler_that_fails_is_a_reason(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'statistics.c:1: error: this is no C' >&2\nexit 1\n")
    broken.chmod(0o700)
    monkeypatch.setenv("FOCI_CC", str(broken))
    assert (
        native.why_unavailable("statistics")
        == f"{broken} could not compile statistics.c: statistics.c:1: error: this is no C"
    )
    assert list(cache.iterdir()) == []


def test_another_system_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.os, "name", "nt")
    with pytest.raises(native.UnavailableError, match="Linux and macOS"):
        native.compiler_command()


def test_a_folder_that_others_can_write_to_is_not_used(cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    assert native.library_folder() != cache
    assert stat.S_IMODE(native.library_folder().stat().st_mode) == 0o700
    cache.chmod(0o755)
    assert native.library_folder() == cache


def test_a_folder_of_somebody_else_is_not_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    somebody = os.getuid() + 1
    cache.mkdir(parents=True)
    monkeypatch.setattr(native.os, "getuid", lambda: somebody)
    assert native.library_folder() != cache


def test_a_link_is_not_used(cache: Path, tmp_path: Path) -> None:
    cache.parent.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    cache.symlink_to(tmp_path / "elsewhere")
    assert native.library_folder() != cache


def test_a_cache_that_cannot_be_made_is_not_used(cache: Path) -> None:
    cache.parent.parent.joinpath("foci").write_text("a file where the folder should be")
    assert native.library_folder().is_dir()


@needs_compiler
def test_a_library_that_others_can_write_to_is_built_again(sources: Path) -> None:
    path = native.build_library("half", native.compiler_command())
    path.write_bytes(b"somebody else's")
    path.chmod(0o722)
    assert native.load_library("half").half(10) == 6


@needs_compiler
def test_floating_point_modes_do_not_change() -> None:
    """Flags like -ffast-math make a library flush small numbers to 0 in the whole process."""
    code = (
        "import torch; from foci.runtime import native; native.load_library('statistics');"
        " print(torch.tensor(1e-40) * 1 > 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "tensor(True)"


class Count(ctypes.Structure):
    _fields_ = (("value", ctypes.c_int),)


@needs_compiler
@pytest.mark.parametrize("own", [True, False], ids=["our own threads", "the threads of torch"])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_thread_runs_the_function_once(
    sources: Path, threads: int, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sources / "count.c").write_text("void count(int *value) { __atomic_fetch_add(value, 1, __ATOMIC_RELAXED); }\n")
    if own:
        monkeypatch.setattr(native, "find_openmp", lambda: None)
    counted = Count(0)
    native.run_in_threads(native.load_library("count").count, counted, threads)
    assert counted.value == threads

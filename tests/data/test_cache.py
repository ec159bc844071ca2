from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedretain import files
from fedretain.data import cache
from fedretain.data.cache import cache_folder, cached_array
from fedretain.data.dataset import array_digest

ARRAY = np.arange(3000, dtype=np.uint8).reshape(10, 3, 10, 10)


def fail() -> Any:
    raise AssertionError("the array should have come from the cache")


def entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


PRELUDE = """
import os, resource, signal, sys, time
from pathlib import Path
import numpy as np
from fedretain.data.cache import cached_array

array = np.arange(3000, dtype=np.uint8).reshape(10, 3, 10, 10)

def fork(work):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return pid

def outcome(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


def run(code: str, folder: Path) -> str:
    """Runs code in an interpreter of its own, which may fork further processes; what it wrote as errors."""
    environment = os.environ | {"FEDRETAIN_CACHE": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code], env=environment, text=True, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_second_call_reads_what_the_first_kept(own_cache: Path) -> None:
    first, digest = cached_array("k", lambda: ARRAY)
    again, same = cached_array("k", fail)
    assert np.array_equal(again, first)
    assert digest == same == array_digest(ARRAY)
    assert [path.name for path in entries(own_cache)] == ["k-v1.npy"]
    assert again.flags.writeable  # torch.from_numpy warns about arrays that are not


def test_plain_numpy_can_read_and_map_an_entry(own_cache: Path) -> None:
    cached_array("k", lambda: ARRAY)
    assert np.array_equal(np.load(own_cache / "k-v1.npy", mmap_mode="r"), ARRAY)


def test_keys_and_versions_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    cached_array("k", lambda: ARRAY)
    assert cached_array("other", lambda: ARRAY + 1)[0][0, 0, 0, 0] == 1
    monkeypatch.setattr(cache, "DECODER_VERSION", 2)
    assert cached_array("k", lambda: ARRAY + 2)[0][0, 0, 0, 0] == 2


def test_any_damaged_byte_is_found_and_repaired(own_cache: Path) -> None:
    """Every 97th byte, over the header, the array and the digest; the padding of the header (spaces) as well.

    A byte of the padding may change without changing the array; then the entry may be used, but nothing else.
    """
    cached_array("k", lambda: ARRAY)
    path = own_cache / "k-v1.npy"
    whole = path.read_bytes()
    for position in [*range(0, len(whole), 97), len(whole) - 1]:
        damaged = bytearray(whole)
        damaged[position] ^= 0x5A
        path.write_bytes(damaged)
        assert np.array_equal(cached_array("k", lambda: ARRAY)[0], ARRAY)
        if position >= 128:
            assert path.read_bytes() == whole


@pytest.mark.parametrize("length", [0, 5, 60, 128, 1500, -33, -1])
def test_short_entries_are_replaced(own_cache: Path, length: int) -> None:
    cached_array("k", lambda: ARRAY)
    path = own_cache / "k-v1.npy"
    whole = path.read_bytes()
    path.write_bytes(whole[:length])
    assert np.array_equal(cached_array("k", lambda: ARRAY)[0], ARRAY)
    assert path.read_bytes() == whole


def test_an_entry_with_objects_is_never_unpickled(own_cache: Path) -> None:
    own_cache.mkdir()
    np.save(own_cache / "k-v1.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    assert np.array_equal(cached_array("k", lambda: ARRAY)[0], ARRAY)


def test_two_processes_that_decode_at_once(tmp_path: Path) -> None:
    """Both find nothing, wait for each other inside produce(), then write; a reader gets the array."""
    code = """
here = Path(os.environ["FEDRETAIN_CACHE"]).parent

def decode(me, other):
    def produce():
        (here / me).touch()
        deadline = time.time() + 60
        while not (here / other).exists():
            assert time.time() < deadline
            time.sleep(0.002)
        return array
    assert np.array_equal(cached_array("k", produce)[0], array)

both = [fork(lambda: decode("a", "b")), fork(lambda: decode("b", "a"))]
assert [outcome(pid) for pid in both] == [0, 0]
"""
    folder = tmp_path / "cache"
    run(code, folder)
    assert (tmp_path / "a").exists()
    assert (tmp_path / "b").exists()
    assert [path.name for path in entries(folder)] == ["k-v1.npy"]
    assert np.array_equal(cached_array("k", fail)[0], ARRAY)


def test_kill_during_the_write_leaves_no_broken_entry(tmp_path: Path) -> None:
    """Killed before the bytes are safe (fsync) and before the entry gets its name (replace)."""
    code = """
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def at_fsync():
    os.fsync = die
    cached_array("fsync", lambda: array)

def at_replace():
    Path.replace = die
    cached_array("replace", lambda: array)

assert outcome(fork(at_fsync)) == outcome(fork(at_replace)) == -signal.SIGKILL
"""
    folder = tmp_path / "cache"
    run(code, folder)
    assert [path.suffix for path in entries(folder)] == [".tmp", ".tmp"]
    for key in ("fsync", "replace"):
        assert np.array_equal(cached_array(key, lambda: ARRAY)[0], ARRAY)
        assert np.array_equal(cached_array(key, fail)[0], ARRAY)


def test_what_killed_writers_left_is_removed_after_a_day(own_cache: Path) -> None:
    own_cache.mkdir()
    old, young = own_cache / ".k-v1.npy.abc.tmp", own_cache / ".k-v1.npy.def.tmp"
    for part in (old, young):
        part.touch()
    yesterday = time.time() - 25 * 3600
    os.utime(old, (yesterday, yesterday))
    cached_array("k", lambda: ARRAY)
    assert not old.exists()
    assert young.exists()


def test_a_failing_decoder_leaves_nothing(own_cache: Path) -> None:
    def broken() -> Any:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        cached_array("k", broken)
    assert not own_cache.exists() or entries(own_cache) == []


def test_folder_that_cannot_be_made_warns_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEDRETAIN_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match="not kept: cannot write to .*FEDRETAIN_CACHE") as caught:
        arrays = [cached_array(key, lambda: ARRAY)[0] for key in ("a", "b", "c")]
    assert all(np.array_equal(array, ARRAY) for array in arrays)
    assert len(caught) == 1


def test_full_disk_warns_and_goes_on(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.warns(UserWarning, match="No space left on device"):
        array, digest = cached_array("k", lambda: ARRAY)
    assert np.array_equal(array, ARRAY)
    assert digest == array_digest(ARRAY)
    assert entries(own_cache) == []


def test_a_limit_on_file_sizes_warns_and_goes_on(tmp_path: Path) -> None:
    """A real failure inside the write: the system allows files of 1,000 bytes only."""
    code = """
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
assert np.array_equal(cached_array("k", lambda: array)[0], array)
"""
    assert "not kept" in run(code, tmp_path / "limited")
    assert entries(tmp_path / "limited") == []


def test_no_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("FEDRETAIN_CACHE")
    monkeypatch.setattr(Path, "home", nowhere)
    with pytest.warns(UserWarning, match="home directory"):
        assert np.array_equal(cached_array("k", lambda: ARRAY)[0], ARRAY)


def test_folder_is_the_variable_or_in_the_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FEDRETAIN_CACHE", "~/mine")
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("FEDRETAIN_CACHE")
    assert cache_folder() == tmp_path / ".cache" / "fedretain"


def test_an_entry_that_cannot_be_read_is_decoded_again(own_cache: Path) -> None:
    (own_cache / "k-v1.npy").mkdir(parents=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert np.array_equal(cached_array("k", lambda: ARRAY)[0], ARRAY)
    assert len(caught) == 1

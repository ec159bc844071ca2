"""The kernels are compiled once, and whatever goes wrong, there are none and PyTorch's operations stay."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fedretain.engines.native import building

REAL_COMPILER = building.compiler()
needs_compiler = pytest.mark.skipif(REAL_COMPILER is None, reason="no C compiler on this machine (cc, gcc or clang)")


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """What one test built, or failed to, is not another's."""
    building.library.cache_clear()
    yield
    building.library.cache_clear()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDRETAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "native"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """A compiler of our own: a line of shell; it notes its calls."""

    def make(line: str) -> Path:
        compiler, calls = tmp_path / "compiler", tmp_path / "calls"
        compiler.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n{line}\n')
        compiler.chmod(0o755)
        monkeypatch.setenv("CC", str(compiler))
        monkeypatch.delenv("FEDRETAIN_NATIVE", raising=False)
        return calls

    return make


def test_no_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert building.compiler() is None
    assert building.library(torch.float32) is None
    assert not folder.exists()


def test_kept_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDRETAIN_NATIVE", "0")
    assert building.library(torch.float32) is None
    assert not folder.exists()


def test_the_compiler_that_was_asked_for_may_have_arguments(
    script: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script("exit 1")
    monkeypatch.setenv("CC", f"{tmp_path / 'compiler'} --of-its-own")
    assert building.compiler() == [str(tmp_path / "compiler"), "--of-its-own"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64])
def test_other_numbers(dtype: torch.dtype, folder: Path) -> None:
    assert building.library(dtype) is None
    assert not folder.exists()


@needs_compiler
def test_compiled_once(folder: Path, script: Callable[[str], Path]) -> None:
    """For each type of numbers; the next process finds both."""
    calls = script(f'exec {" ".join(REAL_COMPILER or [])} "$@"')
    for _ in range(2):
        assert building.library(torch.float32) is not None
        assert building.library(torch.float64) is not None
        building.library.cache_clear()
    assert len(calls.read_text().splitlines()) == 2
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("echo unknown option >&2; exit 1", "unknown option"),
        ("exit 0", "No such file"),  # it claims to have made something
    ],
)
def test_a_compiler_that_fails(
    line: str, told: str, folder: Path, script: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    script(line)
    with caplog.at_level(logging.INFO, "fedretain"):
        assert building.library(torch.float32) is None
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("no kernels of our own, PyTorch's are used: ")
    assert told in message
    assert list(folder.iterdir()) == []


def test_a_compiler_that_hangs(
    folder: Path, script: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    script("exec sleep 60")
    monkeypatch.setattr(building, "PATIENCE", 0.2)
    assert building.library(torch.float32) is None
    assert list(folder.iterdir()) == []


@needs_compiler
def test_a_damaged_library_is_made_anew(folder: Path) -> None:
    assert REAL_COMPILER is not None
    folder.mkdir(parents=True)
    (folder / f"{building._key(REAL_COMPILER, list(building.FLAGS))}.so").write_bytes(b"no library")
    assert building.library(torch.float32) is None
    assert list(folder.iterdir()) == []
    building.library.cache_clear()
    assert building.library(torch.float32) is not None


@needs_compiler
def test_nowhere_to_keep_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it is made for this process alone."""
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("FEDRETAIN_CACHE", str(tmp_path / "file"))
    assert building.library(torch.float32) is not None


@needs_compiler
def test_another_source_is_another_library(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = Path(building.__file__).parent
    for name in building.SOURCES:
        shutil.copy(here / name, tmp_path / name)
    (tmp_path / "kernels.c").write_text((here / "kernels.c").read_text() + "\nint another;\n")
    assert building.library(torch.float32) is not None
    monkeypatch.setattr(building, "__file__", str(tmp_path / "building.py"))
    building.library.cache_clear()
    assert building.library(torch.float32) is not None
    assert len(list(folder.iterdir())) == 2

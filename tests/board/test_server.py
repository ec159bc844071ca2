"""Starting and ending the board from the command line."""

from __future__ import annotations

import builtins
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedretain import cli
from fedretain.board import Board, open_board
from fedretain.errors import ConfigError, MissingExtraError, RunError

Write = Callable[..., Path]
COMMAND = [sys.executable, "-m", "fedretain", "board"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_says_where_it_is_answers_and_ends_when_asked(tmp_path: Path, write_run: Write, number: int) -> None:
    """Also with a browser tab that keeps its connection open, and without a traceback."""
    write_run(tmp_path / "run")
    arguments = [*COMMAND, str(tmp_path), "--port", "0"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as board:
        assert board.stdout is not None
        said = re.fullmatch(
            rf"board: (http://127\.0\.0\.1:\d+/) \(1 runs? below {re.escape(str(tmp_path))}\); Ctrl-C ends it\n",
            board.stdout.readline(),
        )
        assert said
        assert b"<title>Runs" in urllib.request.urlopen(said[1], timeout=20).read()
        kept = socket.create_connection(("127.0.0.1", int(said[1].split(":")[2].strip("/"))))
        board.send_signal(number)
        _, errors = board.communicate(timeout=20)
        kept.close()
    assert board.returncode == (0 if number == signal.SIGINT else -signal.SIGTERM)
    assert errors == ""


def test_other_machines_are_warned_about(tmp_path: Path) -> None:
    arguments = [*COMMAND, str(tmp_path), "--port", "0", "--host", "0.0.0.0"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as board:
        assert board.stdout is not None
        assert board.stdout.readline().startswith("board: http://0.0.0.0:")
        board.send_signal(signal.SIGINT)
        _, errors = board.communicate(timeout=20)
    assert errors.startswith("warning: --host 0.0.0.0: whoever reaches this machine can read these runs")


def test_a_taken_port_is_one_message(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RunError, match=f"port {port} of 127.0.0.1 is in use.*--port 0 takes a free one"):
            open_board(tmp_path, port=port)


def test_addresses_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--port 70000: a port is a number from 0 to 65535"):
        open_board(tmp_path, port=70000)
    with pytest.raises(RunError, match=r"--host 192\.0\.2\.1 --port 0: cannot be used"):
        open_board(tmp_path, host="192.0.2.1", port=0)


@pytest.mark.parametrize("there", [True, False], ids=["a file", "nothing"])
def test_a_folder_is_needed(tmp_path: Path, there: bool) -> None:
    if there:
        (tmp_path / "runs").touch()
    with pytest.raises(RunError, match=r"no folder at .*runs: give the folder that holds run directories"):
        open_board(tmp_path / "runs")


@pytest.mark.parametrize("package", ["starlette", "uvicorn"])
def test_a_missing_extra_is_named_with_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    imported = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name == package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return imported(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=rf"the board needs the package '{package}'.*fedretain\[board\]"):
        open_board(tmp_path)


def test_importing_fedretain_does_not_import_the_web_server() -> None:
    code = "import sys, fedretain.cli; sys.exit('starlette' in sys.modules or 'uvicorn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("wanted", [True, False])
def test_a_browser_is_opened_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: bool) -> None:
    opened: list[str] = []
    monkeypatch.setattr(cli.typer, "launch", opened.append)
    monkeypatch.setattr(Board, "serve", lambda board: board._bound.close())
    cli.board(tmp_path, port=0, browser=wanted)
    assert [address.startswith("http://127.0.0.1:") for address in opened] == [True] * wanted


@pytest.mark.parametrize(
    ("host", "exposed"), [("127.0.0.1", False), ("localhost", False), ("127.0.0.2", False), ("0.0.0.0", True)]
)
def test_who_can_reach_it(tmp_path: Path, host: str, exposed: bool) -> None:
    board = open_board(tmp_path, host=host, port=0)
    assert board.exposed is exposed
    board._bound.close()

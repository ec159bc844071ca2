"""Folders of runs for the board, and a board that answers over real HTTP."""

from __future__ import annotations

import http.client
import importlib.util
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

pytest.importorskip("starlette", reason="the board needs starlette: pip install 'fedretain[board]'")
pytest.importorskip("uvicorn", reason="the board needs uvicorn: pip install 'fedretain[board]'")

# The run directories of tests/report: its conftest is not on the path of this folder.
_FILE = Path(__file__).parents[1] / "report" / "conftest.py"
_SPEC = importlib.util.spec_from_file_location("report_runs", _FILE)
assert _SPEC is not None
assert _SPEC.loader is not None
report_runs = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(report_runs)


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


Ask = Callable[..., Answer]


@pytest.fixture
def write_run() -> Callable[..., Path]:
    """``write_run(path, config, …)``: four rounds with accuracy 0.2, 0.4, 0.6, 0.8 and 0.5 s each; forgetting 0.1."""
    made: Callable[..., Path] = report_runs.write_run
    return made


@pytest.fixture
def config() -> dict[str, Any]:
    return dict(report_runs.CONFIG)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Ask]]:
    """``ask = serve(folder)``; ``ask(target)`` sends the target as it stands, dots and all."""
    from fedretain.board import listing, open_board

    monkeypatch.setattr(listing, "FRESH_FOR", 0.0)  # so that every answer is of now
    running: list[tuple[Any, threading.Thread]] = []

    def start(folder: Path, **options: Any) -> Ask:
        board = open_board(folder, port=0, **options)
        thread = threading.Thread(target=board.serve)
        thread.start()
        running.append((board, thread))
        place = urlsplit(board.address)

        def ask(target: str, method: str = "GET", **headers: str) -> Answer:
            connection = http.client.HTTPConnection("127.0.0.1", place.port or 0, timeout=20)
            connection.putrequest(method, target, skip_host="host" in headers)
            for name, value in headers.items():
                connection.putheader(name.replace("_", "-"), value)
            connection.endheaders()
            answer = connection.getresponse()
            told = Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
            connection.close()
            assert b"Traceback" not in told.body
            return told

        return ask

    yield start
    for board, thread in running:
        board.stop()
        thread.join(timeout=10)
        assert not thread.is_alive()

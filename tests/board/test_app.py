"""The board over HTTP: what it answers, and what it refuses."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from fedretain.board.app import MOST_COMPARED

Write = Callable[..., Path]
Serve = Callable[..., Callable[..., Any]]


def test_pages_list_and_reports(tmp_path: Path, write_run: Write, config: dict[str, Any], serve: Serve) -> None:
    write_run(tmp_path / "ce")
    write_run(tmp_path / "group" / "loss=wsm,seed=0", {**config, "loss": {"name": "wsm"}})
    ask = serve(tmp_path)
    runs = ask("/api/runs").json["runs"]
    assert {run["id"]: run["status"] for run in runs} == {"ce": "finished", "group/loss=wsm,seed=0": "finished"}
    assert not any(str(tmp_path) in str(run) for run in runs)
    for target in (
        "/",
        "/run/ce",
        f"/run/{quote('group/loss=wsm,seed=0')}",
        "/compare?run=ce&run=group/loss%3Dwsm,seed%3D0",
    ):
        answer = ask(target)
        assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8"), target
    report = ask("/api/report?run=ce&run=group/loss%3Dwsm,seed%3D0").json
    assert [run["id"] for run in report["runs"]] == ["ce", "group/loss=wsm,seed=0"]
    assert len(report["figures"]) > 4


def test_what_has_not_changed_is_not_sent_again(tmp_path: Path, write_run: Write, serve: Serve) -> None:
    run = write_run(tmp_path / "run", finished=False)
    ask = serve(tmp_path)
    for target in ("/api/runs", "/api/report?run=run", "/static/plotly.js"):
        tag = ask(target).headers["etag"]
        again = ask(target, if_none_match=tag)
        assert (again.status, again.body) == (304, b"")
    tag = ask("/api/report?run=run").headers["etag"]
    with (run / "metrics.jsonl").open("a") as log:
        log.write('{"round": 5, "test_accuracy": 0.9, "seconds": 0.5}\n')
    assert ask("/api/report?run=run", if_none_match=tag).status == 200


WAYS_OUT = [
    *("..", "../outside", "../../etc/passwd", "./run", "run/", "run/..", "run/../run", "/etc", "//etc/passwd", "C:\\"),
    *("%2e%2e/outside", "..%2foutside", "%2e%2e%2foutside", "..%5coutside", "%252e%252e%252foutside", "run%00"),
    *("%c0%ae%c0%ae/outside", "run/config.yaml", "out", "link", "%ff"),
]


@pytest.mark.parametrize(
    "target", [form + way for form in ("/run/", "/compare?run=", "/api/report?run=", "/static/") for way in WAYS_OUT]
)
def test_there_is_no_way_out_of_the_folder(target: str, shared_board: Callable[..., Any]) -> None:
    answer = shared_board(target)
    assert answer.status == 404
    assert b"secret" not in answer.body


@pytest.fixture(scope="module")
def shared_board(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One board for all attempts; outside its folder lies a run of the name ``secret``, two links lead to it."""
    import http.client
    import threading
    from urllib.parse import urlsplit

    from fedretain.board import open_board

    folder = tmp_path_factory.mktemp("board")
    outside = folder / "outside"
    outside.mkdir()
    (outside / "config.yaml").write_text("name: secret")
    (outside / "metrics.jsonl").write_text('{"round": 1, "test_accuracy": 0.5}\n')
    root = folder / "root"
    shutil.copytree(outside, root / "run")
    (root / "run" / "config.yaml").write_text("name: shown")
    (root / "out").symlink_to(folder)
    (root / "link").symlink_to(outside)
    board = open_board(root, port=0)
    thread = threading.Thread(target=board.serve)
    thread.start()

    def ask(target: str) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", urlsplit(board.address).port or 0, timeout=20)
        connection.putrequest("GET", target)
        connection.endheaders()
        answer = connection.getresponse()
        answer.body = answer.read()  # type: ignore[attr-defined]
        connection.close()
        return answer

    assert ask("/run/run").status == 200
    yield ask
    board.stop()
    thread.join(timeout=10)


def test_runs_may_have_names_that_look_like_ways_out(tmp_path: Path, write_run: Write, serve: Serve) -> None:
    """They are names in the list like any other."""
    for name in ("..run", "%2e%2e", "a&run=b", "#x?y", "ä ö"):
        write_run(tmp_path / name)
    ask = serve(tmp_path)
    for run in ask("/api/runs").json["runs"]:
        place = quote(run["id"], safe="")
        assert ask(f"/run/{place}").status == 200
        assert ask(f"/api/report?run={place}").json["runs"][0]["id"] == run["id"]


def test_of_runs_that_are_gone_the_others_are_shown(tmp_path: Path, write_run: Write, serve: Serve) -> None:
    write_run(tmp_path / "kept")
    run = write_run(tmp_path / "gone")
    ask = serve(tmp_path)
    assert ask("/api/report?run=kept&run=gone").json["problems"] == []
    shutil.rmtree(run)
    assert ask("/api/report?run=kept&run=gone").json["problems"] == ["gone: no longer there"]
    assert ask("/api/report?run=gone").status == 404
    assert ask("/run/gone").status == 404


def test_the_page_knows_how_many_runs_can_be_compared() -> None:
    script = files("fedretain.board").joinpath("pages/list.js").read_text(encoding="utf-8")
    assert f"const MOST_COMPARED = {MOST_COMPARED};" in script


def test_too_many_runs_are_refused_with_the_number(tmp_path: Path, write_run: Write, serve: Serve) -> None:
    write_run(tmp_path / "run")
    answer = serve(tmp_path)("/api/report?" + "&".join(f"run={number}" for number in range(101)))
    assert (answer.status, answer.json) == (
        400,
        {"error": "101 runs are too many for one page; choose at most 100"},
    )


def test_it_only_shows(tmp_path: Path, serve: Serve) -> None:
    ask = serve(tmp_path)
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        answer = ask("/api/runs", method)
        assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")
    assert (ask("/api/runs", "HEAD").status, ask("/api/runs", "HEAD").body) == (200, b"")


def test_an_empty_folder_is_an_empty_list(tmp_path: Path, serve: Serve) -> None:
    ask = serve(tmp_path)
    assert ask("/").status == 200
    assert ask("/api/runs").json == {"folder": str(tmp_path), "complete": True, "runs": []}
    assert ask("/compare").status == 404


def test_every_answer_forbids_what_a_page_does_not_need(tmp_path: Path, write_run: Write, serve: Serve) -> None:
    write_run(tmp_path / "run")
    ask = serve(tmp_path)
    for target in ("/", "/api/runs", "/static/list.js", "/nowhere", "/run/nowhere"):
        headers = ask(target).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers
        assert "server" not in headers


OWN_NAMES = ["127.0.0.1", "127.0.0.1:80", "localhost:8100", "LOCALHOST", "[::1]:8100"]
FOREIGN_NAMES = ["evil.example", "evil.example:8100", "127.0.0.1.evil.example", "", "[::2]", "localhost.evil:80"]


def test_a_foreign_name_is_refused(tmp_path: Path, serve: Serve) -> None:
    """A page of evil.example whose name is made to lead to 127.0.0.1 asks under its own name (DNS rebinding)."""
    ask = serve(tmp_path)
    assert {host: ask("/api/runs", host=host).status for host in OWN_NAMES} == dict.fromkeys(OWN_NAMES, 200)
    assert {host: ask("/api/runs", host=host).status for host in FOREIGN_NAMES} == dict.fromkeys(FOREIGN_NAMES, 421)


def test_who_listens_to_other_machines_is_asked_under_any_name(tmp_path: Path, serve: Serve) -> None:
    assert serve(tmp_path, host="0.0.0.0")("/api/runs", host="trainer.lab").status == 200


def test_a_failure_is_one_sentence(tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedretain.board.listing import Listing

    def fail(listing: Listing) -> None:
        raise MemoryError("no room")

    ask = serve(tmp_path)
    monkeypatch.setattr(Listing, "snapshot", fail)
    answer = ask("/api/runs")
    assert answer.status == 500
    assert b"no room" not in answer.body
    assert answer.body == b"The board could not answer; its terminal says why.\n"

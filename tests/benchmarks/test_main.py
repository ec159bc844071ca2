"""The benchmark as a whole, with stand-ins for the measured processes."""

import json

import benchmarks.__main__ as benchmark
import numpy as np
import pytest
from benchmarks.measuring import RunnerFailed, Turn
from benchmarks.runners import RUNNERS

from fedretain.errors import ConfigError

WEIGHTS = [{"a": np.array([1.0])}]


@pytest.fixture
def stand_in(monkeypatch):
    """Replaces packing, installing and measuring; ``outcomes[runner]`` is the turn that it has, or its failure."""
    outcomes = {}
    calls = []

    def measure(command, out):
        runner = out.name
        if out.parent.name != "check":
            calls.append(runner)
        outcome = outcomes.get(runner, Turn([2.0, 2.0, 2.0], 1.0, 100.0, WEIGHTS))
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(benchmark, "measure", measure)
    monkeypatch.setattr(benchmark, "pack", lambda *given: None)
    monkeypatch.setattr(benchmark, "python_of", lambda environment: environment)
    return outcomes, calls


def run(tmp_path, *arguments):
    file = tmp_path / "out.json"
    status = benchmark.main(["--works", "W3-tiny-many", "--rounds", "3", "--json", str(file), *arguments])
    return status, json.loads(file.read_text())


def test_json_is_a_list_with_exactly_these_keys(stand_in, tmp_path):
    status, found = run(tmp_path, "--runners", "plain-pytorch", "fluke")
    assert status == 0
    assert found == [
        {
            "work": "W3-tiny-many",
            "runner": runner,
            "seconds_per_round": 2.0,
            "spread": 0.0,
            "startup_seconds": 1.0,
            "peak_rss_mb": 100.0,
        }
        for runner in ("plain-pytorch", "fluke")
    ]


def test_a_peer_that_fails_is_named_with_its_reason_and_the_rest_goes_on(stand_in, tmp_path, capsys):
    outcomes, calls = stand_in
    outcomes["fluke"] = RunnerFailed("status 1: no module named fluke")
    status, found = run(tmp_path, "--runners", "plain-pytorch", "fluke", "fedlab")
    assert status == 0
    assert [m["runner"] for m in found] == ["plain-pytorch", "fedlab"]
    assert "W3-tiny-many, fluke: failed: status 1: no module named fluke" in capsys.readouterr().out
    assert calls.count("fluke") == 0
    assert calls.count("fedlab") == 2


def test_a_peer_that_cannot_be_installed_is_not_started(stand_in, tmp_path, capsys, monkeypatch):
    def python_of(environment):
        if environment == "flower":
            raise RuntimeError("no such version")

    monkeypatch.setattr(benchmark, "python_of", python_of)
    status, found = run(tmp_path, "--runners", "plain-pytorch", "flower-ray")
    assert status == 0
    assert [m["runner"] for m in found] == ["plain-pytorch"]
    assert "flower-ray: failed: not installed: no such version" in capsys.readouterr().out
    assert "flower-ray" not in stand_in[1]


def test_an_interrupt_keeps_the_finished_works(stand_in, tmp_path, monkeypatch):
    """W3 is measured; Ctrl-C while W2 is packed leaves W3's measurement, and the shell's status for Ctrl-C."""

    def pack(work, *given):
        if work.name == "W2-cifar-lenet":
            raise KeyboardInterrupt

    monkeypatch.setattr(benchmark, "pack", pack)
    file = tmp_path / "out.json"
    works = ["--works", "W3-tiny-many", "W2-cifar-lenet", "--rounds", "3"]
    arguments = [*works, "--runners", "fedretain-loop", "--json", str(file)]
    assert benchmark.main(arguments) == 130
    assert [m["work"] for m in json.loads(file.read_text())] == ["W3-tiny-many"]


def test_ours_failing_is_an_error(stand_in, tmp_path):
    stand_in[0]["fedretain-loop"] = RunnerFailed("status 1: broken")
    status, found = run(tmp_path, "--runners", "plain-pytorch", "fedretain-loop")
    assert status == 1
    assert [m["runner"] for m in found] == ["plain-pytorch"]


def test_an_engine_that_is_not_in_this_version_is_no_failure_of_ours(stand_in, tmp_path, capsys, monkeypatch):
    def make_experiment(given):
        if given["engine"] == "workers":
            raise ConfigError("engine.name: must be 'auto' or 'loop'")

    monkeypatch.setattr(benchmark, "make_experiment", make_experiment)
    status, found = run(tmp_path, "--runners", "fedretain-loop", "fedretain-workers")
    assert status == 0
    assert [m["runner"] for m in found] == ["fedretain-loop"]
    assert "fedretain-workers: failed: not in this version: engine.name" in capsys.readouterr().out


def test_a_runner_that_did_other_work_is_not_measured(stand_in, tmp_path, capsys):
    """1 against 1.5 is far above the tolerance of 1e-6; 1 against 1.0000005 is below."""
    outcomes, calls = stand_in
    outcomes["fluke"] = Turn([0.1] * 3, 1.0, 1.0, [{"a": np.array([1.5])}])
    outcomes["fedlab"] = Turn([0.1] * 3, 1.0, 1.0, [{"a": np.array([1.0000005])}])
    status, found = run(tmp_path, "--runners", "plain-pytorch", "fluke", "fedlab")
    assert status == 0
    assert [m["runner"] for m in found] == ["plain-pytorch", "fedlab"]
    assert "did other work: parameters differ from those of plain-pytorch by 0.5" in capsys.readouterr().out
    assert "fluke" not in calls


def test_parameters_that_are_no_numbers_are_other_work(stand_in, tmp_path):
    stand_in[0]["fluke"] = Turn([0.1] * 3, 1.0, 1.0, [{"a": np.array([np.nan])}])
    assert [m["runner"] for m in run(tmp_path, "--runners", "plain-pytorch", "fluke")[1]] == ["plain-pytorch"]


def test_a_runner_is_checked_against_plain_pytorch_even_when_that_is_not_measured(stand_in, tmp_path):
    stand_in[0]["plain-pytorch"] = Turn([0.1] * 3, 1.0, 1.0, [{"a": np.array([2.0])}])
    status, found = run(tmp_path, "--runners", "fedretain-loop")
    assert (status, found) == (1, [])


def test_a_runner_with_too_few_rounds_is_not_measured(stand_in, tmp_path, capsys):
    stand_in[0]["fluke"] = Turn([0.1], 1.0, 1.0, WEIGHTS)
    assert [m["runner"] for m in run(tmp_path, "--runners", "plain-pytorch", "fluke")[1]] == ["plain-pytorch"]
    assert "did 1 timed rounds, not 3" in capsys.readouterr().out


def test_turns_alternate(stand_in, tmp_path):
    """Every runner has a turn before any has its second."""
    run(tmp_path, "--runners", "plain-pytorch", "fluke", "fedlab", "--turns", "3")
    calls = stand_in[1]
    assert [sorted(calls[i : i + 3]) for i in (0, 3, 6)] == [["fedlab", "fluke", "plain-pytorch"]] * 3


def test_without_peers_nothing_is_installed():
    names = benchmark.chosen(benchmark.parse(["--no-peers"]))
    assert names == [name for name, runner in RUNNERS.items() if runner.environment is None]
    assert {"plain-pytorch", "plain-2-processes", "fedretain-loop"} <= set(names)
    assert set(benchmark.chosen(benchmark.parse([]))) == set(RUNNERS)


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--works", "W9"], ["--runners", "nobody"]])
def test_wrong_arguments_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as refused:
        benchmark.parse(arguments)
    assert refused.value.code == 2
    assert arguments[0] in capsys.readouterr().err

import sys
from pathlib import Path

import pytest
from benchmarks.runners import RUNNERS

from benchmarks import environments

PEERS = sorted({runner.environment for runner in RUNNERS.values() if runner.environment})


@pytest.mark.parametrize("name", PEERS)
def test_every_peer_is_pinned_and_has_our_pytorch(name):
    lines = (environments.PINS / f"{name}.txt").read_text().splitlines()
    ours = (environments.PINS.parents[1] / "constraints.txt").read_text().splitlines()
    assert all(line.count("==") == 1 for line in lines)
    assert lines == sorted(lines, key=lambda line: line.partition("==")[0].lower())
    assert {line for line in lines if line.startswith("torch==")} == {
        line for line in ours if line.startswith("torch==")
    }


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """What would be run, for an environment ``peer`` with two pins; making the folder stands in for running it."""
    noted = []

    def install(command):
        if command[1:3] == ["-m", "venv"]:
            Path(command[3]).mkdir(parents=True)
        noted.append(" ".join(command[1:4]))

    monkeypatch.setattr(environments, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(environments, "PINS", tmp_path)
    monkeypatch.setattr(environments, "_run", install)
    (tmp_path / "peer.txt").write_text("peer==2.0\ntorch==1.0\n")
    return noted


def test_an_environment_is_made_once_for_its_pins(commands, tmp_path):
    """Three commands make it (venv, PyTorch, the pins), none the second time; other pins make another."""
    first = environments.python_of("peer")
    assert len(commands) == 3
    assert environments.python_of("peer") == first
    assert len(commands) == 3
    (tmp_path / "peer.txt").write_text("peer==3.0\ntorch==1.0\n")
    assert environments.python_of("peer") != first
    assert len(commands) == 6


def test_a_half_made_environment_is_made_again(commands, tmp_path):
    python = environments.python_of("peer")
    (python.parents[1] / "complete").unlink()
    assert environments.python_of("peer") == python
    assert len(commands) == 6


def test_no_environment_is_this_one():
    assert str(environments.python_of(None)) == sys.executable


def test_a_failed_install_says_why():
    with pytest.raises(RuntimeError, match="failed: no such thing"):
        environments._run([sys.executable, "-c", "raise SystemExit('no such thing')"])


def test_a_failed_install_with_nothing_to_say():
    with pytest.raises(RuntimeError, match="no output"):
        environments._run([sys.executable, "-c", "raise SystemExit(3)"])

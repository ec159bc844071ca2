"""The command line: every verb, exit codes (0, 1, 2, 130), one clear message on stderr, never a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pytest
import yaml

import fedretain
from fedretain import cli
from fedretain.errors import MissingExtraError, RunError

COMMAND = [sys.executable, "-m", "fedretain"]


class Said(NamedTuple):
    code: int
    out: str
    err: str


Call = Callable[..., Said]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    """``fedretain ARGUMENTS`` in an empty folder and an 80-column terminal."""
    monkeypatch.chdir(tmp_path)
    for console in (cli.out, cli.err):
        monkeypatch.setattr(console, "_width", 80)

    def fedretain_command(*arguments: object) -> Said:
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.setattr(sys, "argv", ["fedretain", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0
        said = Said(code, *capsys.readouterr())
        assert "Traceback" not in said.out + said.err
        return said

    return fedretain_command


@pytest.fixture
def experiment(tmp_path: Path, small: dict[str, Any]) -> Path:
    """Two rounds; by the engine that needs no planning, whose line on a busy machine would stand among the messages."""
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump({**small, "rounds": 2, "engine": "loop"}))
    return path


@pytest.fixture
def grid(tmp_path: Path, small: dict[str, Any]) -> Path:
    path = tmp_path / "grid.yaml"
    variants = {"loss": ["ce", "wsm"], "local.lr": [0.05], "seed": [0, 1]}
    given = {**small, "rounds": 2, "engine": "loop", "variants": variants}
    path.write_text(yaml.safe_dump(given, sort_keys=False))
    return path


def fail_with(error: BaseException) -> Callable[..., NoReturn]:
    def fail(*arguments: object, **settings: object) -> NoReturn:
        raise error

    return fail


# ------------------------------------------------------------------ every verb


def test_version_and_help(call: Call) -> None:
    assert call("--version") == Said(0, fedretain.__version__ + "\n", "")
    said = call("--help")
    assert said.code == 0
    for verb in ("run", "compare", "partition", "list", "doctor", "report"):
        assert verb in said.out
        assert call(verb, "--help").code == 0
    assert call().code == 2


def test_wrong_usage_is_2(call: Call) -> None:
    for arguments in (["nothing"], ["run"], ["--bogus"], ["partition", "x.yaml", "--rows", "-1"]):
        said = call(*arguments)
        assert said.code == 2
        assert said.err
        assert said.out == ""


def test_run(call: Call, experiment: Path) -> None:
    said = call("run", experiment, "rounds=3", "--out", "here")
    assert said.code == 0
    assert "small" in said.err
    assert "3/3" in said.err
    run = fedretain.Run("here")
    assert len(run.metrics) == 3
    assert f"{run.summary['final_accuracy']['last']:.3f}" in said.out
    assert said.out.splitlines()[-1] == f"report: {Path('here/report.html').resolve()}"
    again = call("run", experiment, "rounds=3", "--out", "here")
    assert again.code == 1
    assert again.err.startswith("error: here: already holds this experiment (3 of 3 rounds)")
    assert call("run", experiment, "rounds=4", "--out", "here", "--resume", "--quiet").code == 0
    assert len(fedretain.Run("here").metrics) == 4


def test_quiet_prints_no_bar(call: Call, experiment: Path, grid: Path) -> None:
    assert call("run", experiment, "--quiet").err == ""
    assert call("compare", grid, "--quiet").err == ""
    assert Path("runs/small/comparison.json").exists()


def test_compare_is_legible_in_80_columns(call: Call, grid: Path) -> None:
    said = call("compare", grid, "--out", "here")
    assert said.code == 0
    assert "[4/4] loss=wsm,local.lr=0.05,seed=1" in said.err
    table = said.out[: said.out.index("report:")]
    assert max(len(line) for line in table.splitlines()) <= 80
    assert "…" not in table
    for word in ("accuracy", "%", "forgets", "points", "forgettable", "time", "up", "down", "MB", "seeds", "±"):
        assert word in table
    assert "loss=ce" in table
    assert "loss=wsm" in table
    last = [fedretain.Run(f"here/loss=ce,local.lr=0.05,seed={s}").metrics[-1]["test_accuracy"] for s in (0, 1)]
    assert f"{100 * fmean(last):.1f}±{100 * stdev(last):.1f}" in table
    again = call("compare", grid, "--out", "here")
    assert again.err.count(" 2/2 ") == 4, "what is finished shows as finished"


def test_compare_names_the_variant_that_failed(call: Call, experiment: Path) -> None:
    said = call("compare", experiment, "variants={local.lr: [0.1, 1e30]}", "--out", "here", "--quiet")
    assert said.code == 1
    assert said.err.startswith("failed: local.lr=1e+30: round 1, client")
    assert "report:" in said.out
    assert fedretain.Run("here/local.lr=0.1").summary["status"] == "finished"
    nothing = call("compare", experiment, "variants={local.lr: [1e30]}", "--out", "there", "--quiet")
    assert (nothing.code, nothing.out) == (1, "")


def test_partition(call: Call, experiment: Path) -> None:
    said = call("partition", experiment, "--rows", "3", "--out", "bars.html")
    assert said.code == 0
    assert "dirichlet (clients=10, alpha=0.3), seed 0" in said.out
    assert "… and 7 more clients (--rows 10 shows all)" in said.out
    assert "picture: bars.html" in said.out
    assert Path("bars.html").stat().st_size > 1000
    counts = fedretain.partition(experiment).class_counts
    assert counts.sum(1).tolist() == [129] * 10
    first = next(line for line in said.out.splitlines() if line.startswith("│ 0 "))
    assert [cell.strip() for cell in first.strip("│").split("│")][3:] == [str(n) if n else "·" for n in counts[0]]


def test_partition_of_many_classes_is_legible(call: Call, tmp_path: Path) -> None:
    """A hundred classes do not fit side by side; square brackets in a class name are no markup."""
    y = np.arange(400) % 100
    x = np.zeros((400, 2), np.float32)
    names = [f"[class {c}]" for c in range(100)]
    np.savez(tmp_path / "many.npz", x_train=x, y_train=y, x_test=x, y_test=y, class_names=names)
    (tmp_path / "many.yaml").write_text(
        "data: {name: npz, path: many.npz}\npartition: {kind: shards, clients: 8, shards_per_client: 2}\n"
    )
    said = call("partition", "many.yaml")
    assert said.code == 0
    assert "[class " in said.out
    assert " classes)" in said.out
    assert max(len(line) for line in said.out.splitlines()) <= 80


@pytest.mark.parametrize("kind", ["methods", "losses", "models", "datasets", "partitions"])
def test_list(kind: str, call: Call) -> None:
    said = call("list", kind)
    assert said.code == 0
    for entry in fedretain.available(kind):
        assert entry.name in said.out


def test_list_of_something_else(call: Call) -> None:
    said = call("list", "modells")
    assert (said.code, said.out) == (2, "")
    assert "did you mean 'models'?" in said.err


def test_doctor(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["fedretain.doctor"], "find_spec", lambda name: None)
    monkeypatch.delenv("FEDRETAIN_DATA", raising=False)
    said = call("doctor")
    assert said.code == 0
    for word in ("fedretain", "torch", "cpu", "mnist", "FEDRETAIN_DATA", "pip install 'fedretain[hub]'"):
        assert word in said.out


def test_report(call: Call, experiment: Path) -> None:
    for seed in (0, 1):
        call("run", experiment, f"seed={seed}", "--out", f"run-{seed}", "--quiet")
    said = call("report", "run-0", "run-1", "--out", "both.html")
    assert said == Said(0, "report: both.html\n", "")
    said = call("report", "run-0", "run-1", "--out", "both.html", "--png", "pictures")
    pictures = sorted(file.name for file in Path("pictures").iterdir())
    assert said == Said(0, f"pictures: {len(pictures)} files in pictures\nreport: both.html\n", "")
    assert {"accuracy.png", "accuracy.pdf", "heatmaps.pdf", "partition.png"} <= set(pictures)
    for wrong in ("nowhere", experiment):
        missing = call("report", wrong)
        assert missing.code == 1
        assert "no run directory at" in missing.err


# ------------------------------------------------------------------ bad luck


@pytest.mark.parametrize(
    ("override", "code", "words"),
    [
        ("lr=0.1", 2, "error: unknown key 'lr'; did you mean 'local.lr' or 'server.lr'?"),
        ("local.optimizer=sdg", 2, "did you mean 'sgd'?"),
        ("method=fedavgg", 2, "did you mean 'fedavg'?"),
        ("method=os:getcwd", 2, "makes no fedretain.Method"),
        ("participation=0.01", 2, "selects nobody"),
        ("participation=11", 2, "11 of only 10 clients"),
        ("local={batch_size: 500, drop_last: true}", 2, "lower batch_size or set drop_last: false"),
        ("partition.clients=2000", 1, "2000 is more than the 1437 examples"),
        ("device=cuda:99", 2, "there is no 'cuda:99' here"),
        ("local.lr=1e30", 1, "round 1, client 2: training diverged"),
        ("foo", 2, "an override is written key=value"),
        ("variants={seed: [1]}", 2, "run it with 'fedretain compare'"),
        ("data={name: npz, path: nowhere.npz}", 1, "nowhere.npz: no such file"),
    ],
)
def test_bad_input(override: str, code: int, words: str, call: Call, experiment: Path) -> None:
    said = call("run", experiment, override, "--out", "here", "--quiet")
    assert (said.code, said.out) == (code, "")
    assert said.err.startswith("error: ")
    assert words in said.err


def test_bad_files(call: Call, experiment: Path) -> None:
    Path("empty.yaml").touch()
    Path("list.yaml").write_text("- a\n")
    Path("binary.yaml").write_bytes(bytes(range(256)))
    Path("folder.yaml").mkdir()
    for name in ("empty", "list", "binary", "folder", "nothing"):
        for verb in ("run", "compare", "partition"):
            said = call(verb, f"{name}.yaml")
            assert (said.code, said.out) == (2, "")
            assert said.err.startswith(f"error: {name}.yaml: ")


def test_corrupt_parquet(call: Call, experiment: Path) -> None:
    Path("kit/mnist").mkdir(parents=True)
    arguments = ("run", experiment, "data={name: mnist, root: kit}", "--out", "here")
    missing = call(*arguments)
    assert missing.code == 1
    assert "kit/mnist: no train.parquet" in missing.err
    for split in ("train", "test"):
        Path(f"kit/mnist/{split}.parquet").write_bytes(b"PAR1 and then nothing")
    broken = call(*arguments)
    assert broken.code == 1
    assert "kit/mnist/train.parquet: cannot read the parquet file" in broken.err
    assert not Path("here").exists()


def test_square_brackets_are_printed_as_they_are(call: Call, experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = call("run", experiment, "--out", "ünïcödé 🎉 [x] [/red]", "--quiet")
    assert said.code == 0
    assert said.out.splitlines()[-1].endswith("/ünïcödé 🎉 [x] [/red]/report.html")
    monkeypatch.setattr(fedretain, "run", fail_with(MissingExtraError("datasets", "hub", "this [/bold] thing")))
    said = call("run", experiment)
    assert said.code == 1
    assert "error: this [/bold] thing needs the package 'datasets'" in said.err
    assert "pip install 'fedretain[hub]'" in said.err
    said = call("compare", experiment, "variants=[loss]")
    assert "such as 'loss: [ce, wsm]'" in said.err


def test_square_brackets_in_the_bar(call: Call, experiment: Path) -> None:
    x, y = np.zeros((40, 2), np.float32), np.arange(40) % 2
    np.savez("[bold].npz", x_train=x, y_train=y, x_test=x, y_test=y)
    said = call("compare", experiment, "data.name=npz", "variants={data.path: ['[bold].npz']}", "--out", "here")
    assert said.code == 0
    assert "[1/1] data.path=[bold].npz" in said.err


def test_ctrl_c_is_130(call: Call, experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    for verb in ("run", "compare"):
        monkeypatch.setattr(fedretain, verb, fail_with(KeyboardInterrupt()))
        said = call(verb, experiment, "--quiet")
        assert said.code == 130
        assert "--resume" in said.err
    assert signal.getsignal(signal.SIGTERM) is handler


def test_trouble_with_files_is_one_line(call: Call, experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedretain, "run", fail_with(OSError(28, "No space left on device", "some/file")))
    said = call("run", experiment)
    assert said.code == 1
    assert said.err.startswith("error: some/file: No space left on device")


def test_a_method_in_a_file_beside_the_experiment(call: Call, experiment: Path) -> None:
    Path("own_method_of_test_cli.py").write_text(
        "from dataclasses import dataclass\n"
        "from fedretain import Method\n"
        "@dataclass(frozen=True)\n"
        "class Mine(Method):\n"
        '    """FedAvg under another name."""\n'
        "    strength: float = 1.0\n"
    )
    said = call("run", experiment, "method={name: own_method_of_test_cli:Mine, strength: 2}", "--out", "here", "-q")
    assert said.code == 0, said.err
    assert yaml.safe_load(Path("here/config.yaml").read_text())["method"]["strength"] == 2.0


# ------------------------------------------------------------------ real processes


def test_a_reader_that_goes_away(experiment: Path, tmp_path: Path) -> None:
    """``fedretain run … | head``: the run is whole, the exit is not 0, and there is no traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    ran = subprocess.run(
        [*COMMAND, "run", experiment, "--out", "here", "--quiet"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    os.close(writer)
    assert ran.returncode == 1
    assert ran.stderr == ""
    assert fedretain.Run(tmp_path / "here").summary["status"] == "finished"


def test_two_processes_and_a_polite_kill(experiment: Path, tmp_path: Path, small: dict[str, Any]) -> None:
    """The second process is refused while the first is at work; SIGTERM lets the first save, and the run goes on."""
    endless = [*COMMAND, "run", experiment, "rounds=100000", "--out", "here", "--quiet"]
    first = subprocess.Popen(endless, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    try:
        metrics = tmp_path / "here" / "metrics.jsonl"
        deadline = time.monotonic() + 60
        while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.05)
        with pytest.raises(RunError, match="another process is writing to this run"):
            fedretain.run({**small, "rounds": 100_000, "engine": "loop"}, out=tmp_path / "here", resume=True)
        first.terminate()
        _, complaint = first.communicate(timeout=60)
    finally:
        first.kill()
    assert first.returncode == 130
    assert "stopped; the finished rounds are saved" in complaint
    assert "Traceback" not in complaint
    run = fedretain.Run(tmp_path / "here")
    saved = run.checkpoint().state.round
    assert saved >= 1
    assert abs(saved - len(run.metrics)) <= 1
    more = fedretain.run(
        {**small, "rounds": len(run.metrics) + 1, "engine": "loop"}, out=tmp_path / "here", resume=True
    )
    assert more.summary["rounds"] == len(run.metrics) + 1

"""Worker processes give the loop engine's bits whatever their number, and break down with a clear error."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.agreement.conftest import Ended, assert_agree, dataset, settings

from fedretain.config import make_experiment
from fedretain.engines import LoopEngine, World
from fedretain.engines.native import kernels
from fedretain.engines.native.building import library
from fedretain.engines.processes import can_copy_this_process
from fedretain.engines.stack import Prepared, Work
from fedretain.engines.vectorised import VectorisedEngine
from fedretain.engines.worker import OneByOne
from fedretain.engines.workers import Worker, WorkersEngine
from fedretain.errors import ConfigError, TrainingError
from fedretain.experiment import build_world
from fedretain.methods import Method, Own, Received
from fedretain.rounds import initial_state
from fedretain.tensors import Tensors

Trained = Callable[..., Ended]

FDS = Path("/proc/self/fd")
STATEFUL = [{"name": "scaffold", "option": "I"}, {"name": "fedwavg", "alpha": 0.5}]


def with_workers(engines: list[WorkersEngine], workers: int, inner: str = "loop") -> Callable[[World], WorkersEngine]:
    def build(world: World) -> WorkersEngine:
        engines.append(WorkersEngine(world, workers=workers, inner=inner))
        return engines[-1]

    return build


@pytest.fixture
def engines() -> Iterator[list[WorkersEngine]]:
    """Closed after the test, whatever happened."""
    made: list[WorkersEngine] = []
    yield made
    for engine in made:
        engine.close()


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_bits_of_the_loop_engine(workers: int, trained: Trained, engines: list[WorkersEngine]) -> None:
    """Three rounds with a state of every size, in single precision; five clients over one, two and three processes.

    The first of them is this one.
    """
    given = settings(rounds=3, method=STATEFUL, loss="wsm", precision="float32", local={"epochs": 1})
    loop, spread = trained(LoopEngine, given), trained(with_workers(engines, workers), given)
    assert_agree(loop, spread, tolerance=0)


def test_stacks_in_workers(trained: Trained, engines: list[WorkersEngine]) -> None:
    given = settings(rounds=3, method=STATEFUL, local={"epochs": 1, "batch_size": 8})
    assert_agree(trained(LoopEngine, given), trained(with_workers(engines, 2, "vectorised"), given))


@pytest.mark.parametrize(
    ("method", "local"),
    [
        ("fedavg", {}),
        (STATEFUL, {"momentum": 0.9, "weight_decay": 0.01}),
        ({"name": "fedprox", "mu": 0.3}, {"optimizer": "adam", "lr": 0.01}),
    ],
    ids=["fedavg", "states", "fedprox and Adam"],
)
def test_own_kernels_in_workers(
    method: Any, local: dict[str, Any], trained: Trained, engines: list[WorkersEngine]
) -> None:
    """LeNet on 16 × 16 pixels: uneven clients, partial batches, convolutions and poolings of our own."""
    given = settings(model="lenet", method=method, loss="wsm", local={"epochs": 1, **local})
    data = dataset(96, (2, 16, 16))
    assert_agree(trained(LoopEngine, given, data), trained(with_workers(engines, 2, "native"), given, data))
    trainer = engines[0].trainer
    assert isinstance(trainer, OneByOne)
    played = [recording for engine in trainer.engines for recording in engine.recordings.values()]
    operations = {node.target for recording in played for node in recording.module.graph.nodes}
    if method == "fedavg":  # the others' steps are recorded for each size of a client's data, too few of them here
        assert (kernels.convolve in operations) is kernels.available(torch.float64)


def test_uneven_stacks_in_workers_are_made_ahead(
    trained: Trained, engines: list[WorkersEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty of 22 clients of 4 to some 60 examples a round: this process trains the stack that it made ahead.

    Shares keep their size from round to round, and those with most steps are the other process's.
    """
    prepared: list[bool] = []
    fits = Prepared.fits
    monkeypatch.setattr(Prepared, "fits", lambda *given: (prepared.append(fits(*given)), prepared[-1])[1])
    partition = {"clients": 22, "alpha": 0.5, "minimum": 4}
    given = settings(rounds=4, participation=20, partition=partition, method=STATEFUL)
    data = dataset(400)
    assert_agree(
        trained(LoopEngine, given, data), trained(with_workers(engines, 2, "vectorised"), given, data), tolerance=1e-9
    )
    assert prepared == [True] * 3
    assert len(engines[0].cuts) == 1


def test_without_kernels_native_is_loop(
    trained: Trained, engines: list[WorkersEngine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And says so. Float64, where the operations that are left out besides change nothing but last bits."""
    given = settings(model="lenet", rounds=1, participation=2, local={"epochs": 1})
    data = dataset(96, (1, 16, 16))
    library.cache_clear()
    try:
        with caplog.at_level(logging.INFO, "fedretain"), monkeypatch.context() as here:
            here.setenv("CC", "no-such-compiler")
            native = trained(with_workers(engines, 2, "native"), given, data)
    finally:
        library.cache_clear()
    assert_agree(trained(LoopEngine, given, data), native)
    (message,) = [record.getMessage() for record in caplog.records if record.name == "fedretain"]
    assert message.startswith("engine: native has no kernels here and trains like loop")


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_every_process_gets_a_share(
    workers: int, trained: Trained, engines: list[WorkersEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many shares as processes, the last of them for this one."""
    given_to: list[int] = []
    order = Worker.order

    def noted(self: Worker, *given: Any, **named: Any) -> None:
        given_to.append(engines[-1].pool.workers.index(self))
        order(self, *given, **named)

    monkeypatch.setattr(Worker, "order", noted)
    trained(with_workers(engines, workers, "vectorised"), settings(rounds=1, participation=6))
    assert given_to == list(range(workers - 1))


def rounds_of(engine: Any, worlds: list[World], cohorts: list[np.ndarray]) -> list[dict[int, Tensors]]:
    """The changes of every client of every experiment in a first round."""
    works = [
        Work(
            Received({name: p.detach() for name, p in world.model.named_parameters()}, {}, {}, 1),
            cohort,
            lambda client: None,
            True,
        )
        for world, cohort in zip(worlds, cohorts, strict=True)
    ]
    found: list[dict[int, Tensors]] = [{} for _ in worlds]
    order: list[list[int]] = [[] for _ in worlds]
    for which, uploads in engine.train_all(works):
        order[which] += uploads.clients.tolist()
        for index, client in enumerate(uploads.clients.tolist()):
            found[which][client] = {name: value[index] for name, value in uploads.delta.items()}
    assert order == [cohort.tolist() for cohort in cohorts]
    return found


@pytest.mark.parametrize("inner", ["loop", "native", "vectorised"])
def test_several_experiments_at_once(inner: str, engines: list[WorkersEngine]) -> None:
    """Other seeds, rates, losses, and cohorts of different lengths; each as if it were alone."""
    changes: list[dict[str, Any]] = [
        {"seed": 0, "loss": "ce"},
        {"seed": 1, "loss": "wsm", "local": {"lr": 0.03}},
        {"seed": 2, "loss": "tce"},
    ]
    worlds: list[World] = []
    for change in changes:
        experiment = make_experiment(settings(**{**change, "local": {"epochs": 1, **change.get("local", {})}}))
        worlds.append(build_world(experiment, dataset(), worlds[0] if worlds else None))
    cohorts = [np.array([0, 2, 5]), np.array([1]), np.array([0, 1, 2, 3, 4])]
    engines.append(WorkersEngine(*worlds, workers=2, inner=inner))
    spread = rounds_of(engines[0], worlds, cohorts)
    for world, cohort, found in zip(worlds, cohorts, spread, strict=True):
        received = Received({name: p.detach() for name, p in world.model.named_parameters()}, {}, {}, 1)
        for uploads in LoopEngine(world).train(received, cohort, lambda client: None):
            for name, value in uploads.delta.items():
                mine = found[int(uploads.clients[0])][name]
                torch.testing.assert_close(mine, value[0], rtol=0 if inner == "loop" else 1e-9, atol=1e-12)
    together = rounds_of(VectorisedEngine(*worlds), worlds, cohorts)
    for ours, theirs in zip(spread, together, strict=True):
        for client, delta in ours.items():
            for name, value in delta.items():
                torch.testing.assert_close(value, theirs[client][name], rtol=1e-9, atol=1e-12)


@dataclass(frozen=True)
class Breaking(Method):
    """Breaks down on every client that holds more than twenty examples; or ends every process but its parent."""

    parent: int = 0

    def direction(self, gradient: Tensors, params: Tensors, received: Received, own: Own) -> Tensors:
        if self.parent and self.parent != os.getpid():
            os.kill(os.getpid(), signal.SIGKILL)
        if not self.parent and len(own.data.labels) > 20:
            raise ValueError("not this client")
        return gradient


def test_an_error_in_a_worker_names_round_and_client(trained: Trained, engines: list[WorkersEngine]) -> None:
    """Client 0 is the one with 23 examples."""
    given = settings(participation=6, method=Breaking(), local={"epochs": 1})
    with pytest.raises(TrainingError, match="round 1, client 0: local training failed: not this client") as raised:
        trained(with_workers(engines, 2), given)
    assert raised.value.which == 0


def test_a_killed_worker_is_an_error_with_advice(trained: Trained, engines: list[WorkersEngine]) -> None:
    given = settings(participation=6, method=Breaking(os.getpid()), local={"epochs": 1})
    started = time.monotonic()
    with pytest.raises(
        TrainingError, match=r"killed by signal 9.*memory ran out; use fewer of them \(engine.workers\)"
    ):
        trained(with_workers(engines, 2), given)
    engines[0].close()
    assert time.monotonic() - started < 60


STARTED = """
    import os, sys, threading
    import numpy as np
    import torch
    from fedretain.config import make_experiment
    from fedretain.engines import LoopEngine
    from fedretain.engines.processes import Copy
    from fedretain.engines.workers import Worker, WorkersEngine
    from fedretain.experiment import build_world
    from fedretain.methods import Received

    copies, held = sys.argv[1] == "copies", open(sys.argv[2], "wb")
    over = threading.Event()
    if not copies:
        threading.Thread(target=over.wait).start()
    given = {"data": "digits", "device": "cpu", "loss": "wsm", "local": {"steps": 4}}
    world = build_world(make_experiment(given))
    before = world.federation.inputs.clone()
    received = Received({name: p.detach() for name, p in world.model.named_parameters()}, {}, {}, 1)
    engine = WorkersEngine(world, workers=2)
    found = list(engine.train(received, np.arange(6), lambda client: None))
    (worker,) = engine.pool.workers
    assert isinstance(worker.process, Copy) is copies
    folder = f"/proc/{worker.process.pid}/fd"
    assert held.name not in [os.readlink(f"{folder}/{name}") for name in os.listdir(folder)]

    at, shared = world.federation.inputs.data_ptr(), False
    for line in open("/proc/self/maps"):
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        shared |= first <= at < last and "memfd:fedretain" in line
    assert shared is not copies
    assert torch.equal(world.federation.inputs, before)

    expected = list(LoopEngine(world).train(received, np.arange(6), lambda client: None))
    for ours, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(ours.delta[name], value) for name, value in theirs.delta.items())
    engine.close()
    over.set()
    print("well")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("how", ["copies", "new processes"])
def test_how_workers_are_started(how: str, tmp_path: Path) -> None:
    """Copies of a process of one thread; else new ones, and then the parent's examples lie in the shared memory too.

    A worker holds none of its parent's files (a lock, say), and either way trains to the loop engine's bits.
    """
    script = tmp_path / "started.py"
    script.write_text(textwrap.dedent(STARTED))
    done = subprocess.run([sys.executable, script, how, tmp_path / "file"], capture_output=True, text=True, check=False)
    assert done.stdout == "well\n", done.stderr


@pytest.mark.parametrize(
    ("platform", "threads", "accelerator", "copies"),
    [
        ("linux", 1, False, True),
        ("linux", 2, False, False),
        ("linux", 1, True, False),
        ("darwin", 1, False, False),
    ],
)
def test_when_this_process_can_be_copied(
    platform: str, threads: int, accelerator: bool, copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may hold a lock that nobody in the copy would release."""
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(threading, "active_count", lambda: threads)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: accelerator)
    assert can_copy_this_process() is copies


SCRIPT = """
    from dataclasses import dataclass
    import sys
    import fedretain

    @dataclass(frozen=True)
    class Mine(fedretain.Method):
        pass

    given = {"rounds": 1, "data": "digits", "method": Mine(), "device": "cpu",
             "engine": {"name": "workers", "workers": 2}}
    try:
        fedretain.run(given, out=sys.argv[1])
    except fedretain.errors.ConfigError as error:
        print(error)
"""


def test_what_the_script_itself_defines_cannot_travel(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    done = subprocess.run([sys.executable, script, tmp_path / "run"], capture_output=True, text=True, check=True)
    assert "cannot see what is defined in the script itself; move your method, loss or model to a module" in done.stdout


def test_what_cannot_be_pickled_is_refused() -> None:
    class Local(Method):
        pass

    experiment = make_experiment(settings())
    world = build_world(experiment, dataset())
    object.__setattr__(world, "method", Local())
    engine = WorkersEngine(world, workers=2)
    received = Received(initial_state(experiment, world).params, {}, {}, 1)
    with pytest.raises(ConfigError, match=r"workers cannot be sent this experiment .*; use engine: loop"):
        list(engine.train(received, np.array([0]), lambda client: None))
    engine.close()


@pytest.mark.skipif(not FDS.exists(), reason="needs /proc")
def test_nothing_is_left_behind(trained: Trained) -> None:
    """Neither processes, two beside this one, nor open files."""
    made: list[WorkersEngine] = []
    gc.collect()  # engines of earlier tests let go of their files now, not in the middle
    before = _open_files()
    children = _children(os.getpid())
    trained(with_workers(made, 3), settings(rounds=1, participation=3, local={"epochs": 1}))
    assert len(_children(os.getpid()) - children) == 2
    made[0].close()
    made[0].close()
    assert _children(os.getpid()) == children
    made.clear()  # its world holds the examples, in shared memory where processes could not be forked
    gc.collect()
    assert _open_files() == before


ORPHANS = """
    import sys, time
    import numpy as np
    from fedretain.config import make_experiment
    from fedretain.engines.workers import Worker, WorkersEngine
    from fedretain.experiment import build_world
    from fedretain.methods import Received

    world = build_world(make_experiment({"data": "digits", "device": "cpu", "local": {"steps": 1000000}}))
    engine = WorkersEngine(world, workers=3)
    received = Received({name: p.detach() for name, p in world.model.named_parameters()}, {}, {}, 1)
    waiting = engine.train(received, np.array([0]), lambda client: None)
    print("started", flush=True)
    next(waiting)
"""


@pytest.mark.skipif(not FDS.exists(), reason="needs /proc")
def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    """One of them has nothing to do and waits; the other one is in the middle of a million steps."""
    script = tmp_path / "orphans.py"
    script.write_text(textwrap.dedent(ORPHANS))
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            assert parent.stdout.readline() == "started\n"
            assert _until(lambda: len(_children(parent.pid)) == 2)
            workers = _children(parent.pid)
            # Importing takes a few seconds of processor time; whoever took far more than the idle one is training.
            assert _until(lambda: np.ptp([_seconds(worker) for worker in workers]) > 2), "nobody trains"
        finally:
            parent.kill()
    assert _until(lambda: not any(_alive(worker) for worker in workers)), "a worker outlived its parent"


def _open_files() -> int:
    return len(list(FDS.iterdir()))


def _children(pid: int) -> set[int]:
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.add(int(stat.parent.name))
    return found


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def _seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _until(condition: Callable[[], Any], seconds: float = 40) -> Any:
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.1)
    return found

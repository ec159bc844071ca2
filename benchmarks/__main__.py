"""Side-by-side speed on identical work: fedretain's engines, other frameworks, plain PyTorch; one run, one table.

Ratios are what counts: the runners of a work take turns in shuffled order, so that a busy machine slows them alike.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from benchmarks.environments import python_of
from benchmarks.measuring import Measurement, RunnerFailed, Turn, Weights, difference, measure, summarise
from benchmarks.runners import REFERENCE, RUNNERS, Runner
from benchmarks.tables import table_of
from benchmarks.works import WORKS, Work, pack
from fedretain.config import make_experiment
from fedretain.errors import ConfigError
from fedretain.randomness import stream

TOLERANCE = 1e-6
"""All runners must end with the same parameters in double precision, up to arithmetic in another order.

In single precision that cannot be told: rounding alone moves LeNet's parameters by up to 5e-4 in two rounds of W2, and
a learning rate that is 1 % too high by 7e-4.
"""
CHECKED_ROUNDS = 2

Failures = dict[tuple[str, str], str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, show, write. Status 1: an engine of fedretain failed (not: is missing in this version); 130: Ctrl-C."""
    options = parse(arguments)
    console = Console(stderr=True, width=140)
    runners = [RUNNERS[name] for name in chosen(options)]
    pythons, uninstalled = install(runners, console)
    measurements: list[Measurement] = []
    failures: Failures = {}
    interrupted = False
    try:
        for name in options.works:
            work = WORKS[name]
            failures |= {(name, runner): why for runner, why in uninstalled.items()}
            ready = [runner for runner in runners if runner.name not in uninstalled]
            taken = take_turns(work, ready, pythons, work.rounds(options.rounds), options.turns, failures, console)
            measurements += [summarise(name, runner, turns) for runner, turns in taken.items()]
    except KeyboardInterrupt:
        interrupted = True
        console.print("interrupted: the works that were finished follow")
    notes = {name: f"{WORKS[name].at_most_rounds} round a turn" for name in options.works if WORKS[name].at_most_rounds}
    Console(width=170).print(table_of(measurements, failures, notes))
    for (work_name, runner_name), why in failures.items():
        print(f"{work_name}, {runner_name}: failed: {why}")
    if options.json:
        options.json.write_text(json.dumps([asdict(m) for m in measurements], indent=2) + "\n")
    if interrupted:
        return 130
    return int(any(RUNNERS[runner].ours and runner not in uninstalled for _, runner in failures))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    for option, known in (("--works", list(WORKS)), ("--runners", list(RUNNERS))):
        parser.add_argument(
            option, nargs="+", choices=known, default=known, metavar="NAME", help=f"only these of {', '.join(known)}"
        )
    parser.add_argument(
        "--peers",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also the frameworks that need an environment of their own, which is installed on first use",
    )
    parser.add_argument("--rounds", type=positive, help="timed rounds per turn (default 3, of W3-tiny-many 30)")
    parser.add_argument("--turns", type=positive, default=2, help="how often every runner has its turn (default 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the measurements here")
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    """A number of at least one."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def chosen(options: argparse.Namespace) -> list[str]:
    """The runners' names, in the table's order."""
    return [
        n for n, runner in RUNNERS.items() if n in options.runners and (options.peers or runner.environment is None)
    ]


def install(runners: Sequence[Runner], console: Console) -> tuple[dict[str, Path], dict[str, str]]:
    """The interpreter of every runner, and the reason for each that has none or is not in this version."""
    pythons, failed = {}, {}
    for runner in runners:
        try:
            if runner.engine is not None:
                make_experiment({"engine": runner.engine})
            with console.status(f"environment of {runner.name}"):
                pythons[runner.name] = python_of(runner.environment)
        except (RuntimeError, OSError) as error:
            failed[runner.name] = f"not installed: {error}"
        except ConfigError as error:
            failed[runner.name] = f"not in this version: {error}"
    return pythons, failed


def take_turns(
    work: Work,
    runners: Sequence[Runner],
    pythons: dict[str, Path],
    rounds: int,
    turns: int,
    failures: Failures,
    console: Console,
) -> dict[str, list[Turn]]:
    """Every runner's turns on a work; one that fails is noted in ``failures`` and has no further turn."""
    taken: dict[str, list[Turn]] = {runner.name: [] for runner in runners}
    with tempfile.TemporaryDirectory(prefix="fedretain-benchmark-") as name:
        folder = Path(name)
        check(work, runners, pythons, folder, failures, console)
        given = made(folder / "given")
        pack(work, rounds + 1, given)  # the first round is start-up
        for turn in range(turns):
            for index in stream(0, "turns", turn).permutation(len(runners)).tolist():
                runner = runners[index]
                if (work.name, runner.name) in failures:
                    continue
                out = made(folder / f"turn-{turn}" / runner.name)
                try:
                    with console.status(f"{work.name}: {runner.name}, turn {turn + 1} of {turns}"):
                        done = measure(runner.command(pythons[runner.name], given, out), out)
                    if len(done.seconds) != rounds:
                        raise RunnerFailed(f"did {len(done.seconds)} timed rounds, not {rounds}")
                    taken[runner.name].append(done)
                    console.print(f"{work.name}: {runner.name}: {[round(s, 3) for s in done.seconds]}")
                except RunnerFailed as error:
                    failures[work.name, runner.name] = str(error)
                    console.print(escape(f"{work.name}: {runner.name}: failed: {error}"))
    return {name: found for name, found in taken.items() if (work.name, name) not in failures}


def check(
    work: Work,
    runners: Sequence[Runner],
    pythons: dict[str, Path],
    folder: Path,
    failures: Failures,
    console: Console,
) -> None:
    """Every runner trains the work with fewer examples, in double precision, and must end where the reference ends."""
    given = made(folder / "small")
    pack(work.small(), CHECKED_ROUNDS, given, "float64")
    expected: Weights = []
    reference = RUNNERS[REFERENCE]
    for runner in (reference, *(runner for runner in runners if runner is not reference)):
        out = made(folder / "check" / runner.name)
        try:
            with console.status(f"{work.name}: {runner.name}, same work?"):
                python = pythons.get(runner.name) or python_of(runner.environment)
                found = measure(runner.command(python, given, out), out).weights
            expected = expected or found
            apart = difference(found, expected)
            if not apart <= TOLERANCE:
                raise RunnerFailed(f"did other work: parameters differ from those of {REFERENCE} by {apart:.2g}")
            console.print(f"{work.name}: {runner.name}: same parameters to {apart:.1e}")
        except RunnerFailed as error:
            failures[work.name, runner.name] = str(error)
            console.print(escape(f"{work.name}: {runner.name}: failed: {error}"))


def made(folder: Path) -> Path:
    """A new folder."""
    folder.mkdir(parents=True)
    return folder


if __name__ == "__main__":
    sys.exit(main())

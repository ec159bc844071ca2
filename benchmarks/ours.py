"""fedretain as its users run it: ``python -m benchmarks.ours WORK_FOLDER OUT_FOLDER ENGINE``.

The rounds go through ``fedretain.run``: run directory, metrics and checkpoints are part of the time.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import fedretain
from benchmarks.peers.given import Watch
from benchmarks.works import Work, dataset_of, unpack
from fedretain.config import Experiment
from fedretain.runs.metrics import Row


def main() -> None:
    """Train the work; the members of a sweep as one comparison."""
    folder, watch, engine = Path(sys.argv[1]), Watch(Path(sys.argv[2])), sys.argv[3]
    work, rounds, precision = unpack(folder)
    data = dataset_of(np.load(folder / "inputs.npy"), np.load(folder / "labels.npy"))
    experiments = [work.experiment(variant, rounds, engine=engine, precision=precision) for variant in work.variants]
    with tempfile.TemporaryDirectory() as runs:
        watch.variant()
        if len(experiments) == 1:
            run = fedretain.run(
                experiments[0], out=Path(runs) / "run", data=data, watch=lambda experiment, row: watch.round()
            )
            watch.keep(dict(run.model().named_parameters()))
        else:
            sweep(work, experiments, watch, Path(runs), data)
    watch.report()


def sweep(work: Work, experiments: list[dict[str, Any]], watch: Watch, runs: Path, data: fedretain.Dataset) -> None:
    """All variants as ``fedretain compare`` runs them; a round of the sweep is one round of each."""
    ended = 0

    def count(experiment: Experiment, row: Row) -> None:
        nonlocal ended
        ended += 1
        if ended % len(experiments) == 0:
            watch.round()

    grid = {
        "seed": sorted({variant.seed for variant in work.variants}),
        "local.lr": sorted({variant.lr for variant in work.variants}),
        "loss": sorted({variant.loss for variant in work.variants}),
    }
    comparison = fedretain.compare({**experiments[0], "variants": grid}, out=runs / "sweep", data=data, watch=count)
    by_setting = {}
    for run in comparison.runs.values():
        config = run.experiment
        by_setting[config.seed, config.local.lr, config.loss.name] = run
    for number, variant in enumerate(work.variants):
        run = by_setting[variant.seed, variant.lr, variant.loss]
        watch.keep(dict(run.model().named_parameters()), number)


if __name__ == "__main__":
    main()

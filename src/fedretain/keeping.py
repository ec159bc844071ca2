"""Keeps a run while it trains: metrics, arrays, checkpoints and trackers, whatever interrupts it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from fedretain.centralised import centralised_start
from fedretain.config import Experiment
from fedretain.engines import World
from fedretain.errors import RunError
from fedretain.evaluation import evaluate
from fedretain.rounds import Ended, initial_state
from fedretain.runs.checkpoint import Checkpoint
from fedretain.runs.directory import RunDirectory
from fedretain.runs.environment import describe_environment
from fedretain.runs.metrics import Row
from fedretain.runs.run import Run
from fedretain.runs.summary import summarise
from fedretain.runs.trackers.tracking import Tracking

Watcher = Callable[[Experiment, Row], None]
"""Called after every round with the experiment and the round's metrics."""


class Keeper:
    """One run on its way into its directory."""

    def __init__(
        self,
        directory: RunDirectory,
        experiment: Experiment,
        world: World,
        tracking: Tracking,
        *,
        watch: Watcher | None = None,
        group: str | None = None,
    ) -> None:
        self.directory, self.experiment, self.world = directory, experiment, world
        self.tracking, self.watch, self.group = tracking, watch, group
        self.over = False
        found, self.rows = directory.last_good()
        self._describe(fresh=found is None)
        if found is not None:
            self.last = found.to(str(world.federation.device))
            return
        start = centralised_start if experiment.training == "centralised" else initial_state
        state = start(experiment, world)
        first = evaluate(world, state.params, state.buffers, experiment.evaluate.batch_size)
        self.last = Checkpoint(state, {}, {"initial_accuracy": first["test_accuracy"]})

    def note(self, **facts: Any) -> None:
        """Facts of the whole run that a run that goes on will need."""
        self.last = self.last._replace(facts={**self.last.facts, **facts})

    def begin(self) -> None:
        """Save where the run stands, and open the trackers."""
        self.directory.save(self.last)
        self.tracking.begin(self.directory.path, self.experiment, self.rows, self.group)

    def keep(self, ended: Ended) -> None:
        """A round that is over."""
        reached, row, records = ended
        for folder, arrays in records.items():
            self.directory.write_arrays(f"{folder}/round-{reached.state.round:06d}.npz", **arrays)
        self.directory.append(row)
        self.rows.append(row)
        before, self.last = self.last, reached
        self.directory.advance(before, reached, row["clients"]["id"])
        if self.directory.checkpoint_is_due(reached.state.round):
            self.directory.save(reached)
        self.tracking.log(row)
        if self.watch is not None:
            self.watch(self.experiment, row)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Whatever ends the block, the last whole round is saved."""
        try:
            yield
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Save the last whole round, as far as that is still possible; once is enough."""
        if self.over:
            return
        self.over = True
        if self.last.state.round == len(self.rows):
            with contextlib.suppress(RunError):
                self.directory.save(self.last)
        self.tracking.end(None)

    def finish(self) -> None:
        """All rounds are done: save them and the summary."""
        self.directory.save(self.last)
        self.over = True
        clients, accuracy = self.world.federation.clients, self.last.facts["initial_accuracy"]
        summary = summarise(self.rows, accuracy, clients, self.experiment.evaluate)
        self.directory.write_json("summary.json", summary)
        self.tracking.end(summary)

    def _describe(self, *, fresh: bool) -> None:
        """Record environment and partition; when going on, the data must be the same."""
        federation = self.world.federation
        facts = {
            "fingerprint": federation.fingerprint,
            "shape": list(federation.shape),
            "classes": federation.classes,
            "train_examples": len(federation.labels),
            "test_examples": len(federation.test.labels),
        }
        if not fresh:
            held = Run(self.directory.path).environment["data"]
            if held["fingerprint"] != facts["fingerprint"]:
                raise RunError(
                    f"{self.directory.path}: was made with other examples (data.name is "
                    f"{self.experiment.data.name!r}); bring back the same data or choose another --out"
                )
            return
        self.directory.write_json("environment.json", {**describe_environment(federation.device), "data": facts})
        self.directory.write_partition(
            federation.train, federation.validation, federation.all_class_counts(), federation.class_names
        )

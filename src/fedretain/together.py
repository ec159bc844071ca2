"""Variants of a comparison that train together: round by round, all their clients as one piece of work."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedretain.config import Experiment, Variant
from fedretain.data.federation import Parts
from fedretain.engines import Uploads, World
from fedretain.engines.planner import SAME_BITS, Plan, build_engine_for_all, plan_for_all
from fedretain.engines.stack import Work
from fedretain.engines.varied import alike
from fedretain.errors import ConfigError, TrainingError
from fedretain.keeping import Keeper, Watcher
from fedretain.rounds import Gathered, Moved, Order, Rounds, evaluate_moved
from fedretain.runs.directory import RunDirectory
from fedretain.runs.trackers import Tracker
from fedretain.runs.trackers.tracking import Tracking, build_trackers

LOG = logging.getLogger("fedretain")


@dataclass(frozen=True)
class Entry:
    """A variant, its place, and what it needs to train."""

    variant: Variant
    path: Path
    world: World
    needs: str = ""
    """What its clients' states need on the disk, to be told before it trains."""

    @property
    def experiment(self) -> Experiment:
        """Its experiment."""
        return self.variant.experiment

    @property
    def parts(self) -> tuple[Parts, Parts]:
        """Who holds what, for training and for validation."""
        return self.world.federation.train, self.world.federation.validation


def groups(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Entries that can train together: the same shapes, hooks and number of rounds, and stacking allowed."""
    found: list[list[Entry]] = []
    for entry in entries:
        for group in found:
            if _fit(group[0], entry):
                group.append(entry)
                break
        else:
            found.append([entry])
    return found


def train_together(
    entries: Sequence[Entry],
    *,
    watch: Watcher | None = None,
    trackers: Sequence[Tracker] = (),
    group: str | None = None,
    failed: Callable[[Entry, str], None],
) -> bool:
    """Train a group if that is faster than one after the other; False where it is not, and nothing was done.

    A variant that breaks down is reported to ``failed``, and the others go on. Whatever interrupts the training, the
    last whole round of every variant is saved. A hook that cannot be stacked leaves all of them to be trained alone.
    """
    with contextlib.ExitStack() as held:
        keepers: list[Keeper] = []
        for entry in entries:
            directory = held.enter_context(RunDirectory.opened(entry.path, entry.experiment, resume=True))
            tracking = Tracking(build_trackers(entry.experiment, trackers))
            keepers.append(Keeper(directory, entry.experiment, entry.world, tracking, watch=watch, group=group))
        open_keepers = [keeper for keeper in keepers if keeper.last.state.round < keeper.experiment.rounds]
        if len(open_keepers) < 2 or len({keeper.last.state.round for keeper in open_keepers}) > 1:
            return False
        plan = _plan(open_keepers)
        if plan is None:
            return False
        LOG.info("engine: %s for %d variants together%s", plan.label, len(open_keepers), plan.why and f", {plan.why}")
        for needs in dict.fromkeys(entry.needs for entry in entries if entry.needs):
            LOG.info(needs)
        for keeper in open_keepers:
            keeper.note(engine={"name": plan.name, "inner": plan.inner, "together": True})
            keeper.begin()
            held.enter_context(keeper.saving())
        _train(open_keepers, plan, lambda keeper, reason: failed(entries[keepers.index(keeper)], reason))
    return True


def _train(keepers: list[Keeper], plan: Plan, failed: Callable[[Keeper, str], None]) -> None:
    """All rounds of all variants; one that breaks down is left out from there on.

    Where it is not known which of them did, or where only the stack is at fault, all stop at their last whole round.
    """
    rounds = {
        id(keeper): Rounds(keeper.experiment, keeper.world, keeper.last, keeper.directory.store) for keeper in keepers
    }
    while keepers:
        with contextlib.closing(build_engine_for_all([keeper.world for keeper in keepers], plan)) as engine:
            while not rounds[id(keepers[0])].over:
                orders = [rounds[id(keeper)].open() for keeper in keepers]
                try:
                    chunks = engine.train_all([_work(order) for order in orders])
                    gathered = _gathered(chunks, [rounds[id(keeper)] for keeper in keepers], orders)
                except (TrainingError, ConfigError) as error:
                    if not isinstance(error, TrainingError) or error.which is None:
                        LOG.info("these variants cannot train together (%s); each goes on alone", error)
                        for keeper in keepers:
                            keeper.abandon()
                        return
                    keepers = _without(keepers, [(keepers[error.which], error)], failed)
                    break
                if broken := _end([(keeper, rounds[id(keeper)]) for keeper in keepers], orders, gathered, plan):
                    keepers = _without(keepers, broken, failed)
                    break
            else:
                for keeper in keepers:
                    keeper.finish()
                return


def _work(order: Order) -> Work:
    return Work(order.received, order.cohort, order.states, order.measuring, order.summed_by, order.upcoming)


def _gathered(
    chunks: Iterator[tuple[int, Uploads]], rounds: Sequence[Rounds], orders: Sequence[Order]
) -> list[Gathered]:
    """The sums of each experiment, made as soon as its last upload is in: nobody holds those of all of them."""
    waiting: list[list[Uploads]] = [[] for _ in orders]
    found: dict[int, Gathered] = {}
    for which, uploads in chunks:
        waiting[which].append(uploads)
        if sum(len(chunk.clients) for chunk in waiting[which]) == len(orders[which].cohort):
            try:
                found[which] = rounds[which].gather(orders[which], waiting[which])
            except TrainingError as error:
                error.which = which
                raise
            waiting[which] = []
    return [found[which] for which in range(len(orders))]


def _end(
    trained: Sequence[tuple[Keeper, Rounds]], orders: Sequence[Order], gathered: Sequence[Gathered], plan: Plan
) -> list[tuple[Keeper, TrainingError]]:
    """Move all servers, test the new models together, keep each round; who broke down on the way, and why."""
    broken: list[tuple[Keeper, TrainingError]] = []
    moved: list[tuple[Keeper, Rounds, Moved]] = []
    for (keeper, rounds), order, own in zip(trained, orders, gathered, strict=True):
        try:
            moved.append((keeper, rounds, rounds.move(order, own, sharing=len(trained))))
        except TrainingError as error:
            broken.append((keeper, error))
    # Where training keeps the bits that each variant has alone, testing does too.
    tested = evaluate_moved([(rounds, its) for _, rounds, its in moved], stacked=plan.key not in SAME_BITS)
    for (keeper, rounds, its), its_test in zip(moved, tested, strict=True):
        try:
            keeper.keep(rounds.end(its, its_test))
        except TrainingError as error:
            broken.append((keeper, error))
    return broken


def _without(
    keepers: list[Keeper], broken: list[tuple[Keeper, TrainingError]], failed: Callable[[Keeper, str], None]
) -> list[Keeper]:
    for keeper, error in broken:
        keeper.abandon()
        failed(keeper, str(error))
    gone = [keeper for keeper, _ in broken]
    return [keeper for keeper in keepers if keeper not in gone]


def _plan(keepers: Sequence[Keeper]) -> Plan | None:
    """How to train together, or None where one after the other is faster or the only way."""
    first = keepers[0]
    left = first.experiment.rounds - first.last.state.round
    cohorts = [keeper.experiment.cohort_size(keeper.world.federation.clients) for keeper in keepers]
    return plan_for_all([keeper.world for keeper in keepers], first.experiment.engine, cohorts, left)


def _fit(first: Entry, second: Entry) -> bool:
    a, b = first.experiment, second.experiment
    federated = a.training == b.training == "federated"
    return (
        federated
        and a.rounds == b.rounds
        and a.engine == b.engine
        and a.engine.stack
        and a.engine.name != "loop"
        and alike(first.world, second.world)
    )

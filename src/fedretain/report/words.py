"""What a report says in plain words: what was trained, what came out, how to read the pictures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedretain.forgetting import Vanishing
from fedretain.report.comparison import COLUMNS
from fedretain.report.figures import MOST_LEGEND_CLASSES
from fedretain.report.reading import IntArray, RunData

FORGETTING = (
    "Each client starts from the model it received and trains on its own data. Forgetting is the accuracy of "
    "the received model on another client's validation data, minus that of the locally trained model, before "
    "the server averages: positive means that local training made the model worse there."
)
HEATMAP = (
    "A row is the model of one participant after local training, a column the validation data of one client; "
    "a white dot marks a model on its own client's data. The slider chooses the round. Red cells were "
    "forgotten, blue cells improved, grey cells have no validation data."
)

FORGETTABLE = (
    "How many of its own training examples a client had right after local training that the global model then gets "
    "wrong. A client that stays high is one whose knowledge the average drops. A dash: the client did not take part "
    "in that round."
)

TRAINING = (
    "Forgetting events, added up over the measured rounds. Federated: a training example that a client's local model "
    "had right and the averaged global model has wrong. Centralised: an example that one model, trained on the data of "
    "all clients together, had right when it last saw it and has wrong now."
)
SUMMARIES = (
    "Four summaries of one accuracy curve, and client forgetting averaged over the measured rounds: by model is what "
    "each local model lost on the data of the other clients, by data what the data of each client lost under the "
    "models of the others."
)
ROUNDS_TO = (
    "Rounds to a: the first round whose test accuracy reaches a times the reference. The reference is the experiment's "
    "evaluate.reference (given), else the final accuracy of the FedSGD run of the same setting among these runs "
    "(FedSGD), else 100 % (none)."
)
FURTHER = "What else was measured (forgetting.measures). Lines are means over seeds, bands ± one standard deviation."
CLASSES = (
    "The first map: how much of each class the global model recognises after a round. A dot marks a class that no "
    "participant of the round holds, a cross one that vanished: some of its test examples were recognised before the "
    "round, none after. The second map: how many of the round's participants hold the class."
)
DRIFT = (
    "Each participant changes the received model w into its own w_k. Long changes in different directions cancel out "
    "in the average: a cosine of 1 means the same direction, 0 nothing in common, below 0 that clients undo each other."
)
COSINES = (
    "The cosine between the changes of two participants. Blue pairs pull in the same direction, red ones against each "
    "other. The slider chooses the round."
)
LOSS_INCREASE = (
    "Loss increase: mean loss of this round's local models on the training data of a client of the round before, minus "
    "that of the model they received. Positive means forgetting."
)
FISHER = (
    "Fisher agreement: correlation over all parameters between the Fisher information of a client's pseudo data and "
    "that of the data of the last ten rounds' participants. 1 means that pseudo data protect just the parameters that "
    "these data need."
)


def about_vanished(vanished: Sequence[Vanishing], names: Sequence[str]) -> str:
    """How often classes vanished, how often for want of anybody who held them, and which one most."""
    if not vanished:
        return "No class vanished in the measured rounds."
    absent = sum(not one.holders for one in vanished)
    times = "once" if len(vanished) == 1 else f"{len(vanished)} times"
    often = Counter(one.label for one in vanished).most_common(1)[0]
    most = f" Most often: {names[often[0]]} ({often[1]})." if len(vanished) > 1 else ""
    return f"A class vanished {times} in the measured rounds, {absent} of them while no participant held it.{most}"


def about_run(run: RunData) -> str:
    """What was trained on what, in one sentence; leaves out what the config does not say."""
    config = run.config
    parts = [key for key in ("method", "loss", "model", "data") if config.get(key)]
    words = [f"{key} {_part_name(config[key])}" for key in parts]
    partition = config.get("partition")
    clients = partition.get("clients") if isinstance(partition, Mapping) else None
    if partition:
        split = f"split by {_part_name(partition)}"
        words.append(f"{split} over {clients} clients" if clients else split)
    if config.get("participation") is not None:
        words.append(_participation_words(config["participation"]))
    setting = ", ".join(words)
    sentence = f"{setting[:1].upper()}{setting[1:]}" if setting else "A run"
    rounds = config.get("rounds")
    if run.summary is None:
        planned = f" of {rounds}" if rounds is not None else ""
        return f"{sentence}. Unfinished: {run.last_round}{planned} rounds are in the log so far."
    done = run.summary.get("rounds", rounds)
    return f"{sentence}. {run.status.capitalize()} after {done} rounds."


def _part_name(part: Any) -> str:
    if isinstance(part, Mapping):
        return str(part.get("name", part.get("kind", "?")))
    return " + ".join(map(_part_name, part)) if isinstance(part, list) else str(part)


def _participation_words(participation: Any) -> str:
    if isinstance(participation, float):
        return f"{100 * participation:g} % of the clients a round"
    return "1 client a round" if participation == 1 else f"{participation} clients a round"


def about_result(run: RunData) -> str:
    """The final accuracy and the mean client forgetting, as far as they were measured."""
    headline = run.headline()
    accuracy, forgetting = headline["final_accuracy"], headline["mean_forgetting"]
    words = []
    if accuracy is not None:
        so_far = " so far" if run.summary is None else ""
        words.append(f"The global model classifies {100 * accuracy:.1f} % of the test examples correctly{so_far}.")
    if forgetting is not None:
        change = "costs" if forgetting >= 0 else "gains"
        words.append(
            f"On average a client's local training {change} {100 * abs(forgetting):.1f} percentage points of "
            "accuracy on the data of other clients."
        )
    return " ".join(words) or "No accuracy has been measured yet."


def about_partition(class_counts: IntArray) -> str:
    """How many clients, of what sizes, with how many classes."""
    clients, classes = class_counts.shape
    if clients == 0:
        return "There is no client."
    sizes = class_counts.sum(axis=1)
    held = (class_counts > 0).sum(axis=1)
    if sizes.min() == sizes.max():
        size = f"{sizes.min()} training examples each"
    else:
        size = f"{sizes.min()} to {sizes.max()} training examples each (median {np.median(sizes):g})"
    words = f"{clients} clients with {size}; a client holds {held.mean():.1f} of {classes} classes on average."
    if classes > MOST_LEGEND_CLASSES:
        words += " Colours follow the number of the class; point at a bar to read its name."
    return words


def about_comparison(rows: Sequence[Mapping[str, Any]]) -> str:
    """How much is compared, and which setting is best in what matters most."""
    runs = sum(len(row["runs"]) for row in rows)
    words = [f"{_counted(runs, 'run')} of {_counted(len(rows), 'setting')}."]
    unfinished = sum(row["unfinished"] for row in rows)
    if unfinished:
        words.append(f"Unfinished so far: {_counted(unfinished, 'run')}.")
    accuracy, forgetting = COLUMNS[:2]
    for column, claim, unit in (
        (accuracy, "Most accurate in the end", "% of the test examples"),
        (forgetting, "Forgets least", "percentage points"),
    ):
        winners = [row for row in rows if column.key in row["best"]]
        words += [f"{claim}: {row['label']}, {column.text(row[column.key])} {unit}." for row in winners]
    return " ".join(words)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"

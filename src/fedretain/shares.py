"""Who holds what, before any training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedretain.config import expand_variants, read_experiment
from fedretain.data import Dataset
from fedretain.data.federation import class_counts_of, split_examples
from fedretain.experiment import Source, load_data


@dataclass(frozen=True)
class Shares:
    """The class counts of every client."""

    title: str
    class_counts: np.ndarray
    class_names: tuple[str, ...]
    train_sizes: np.ndarray
    validation_sizes: np.ndarray

    @property
    def clients(self) -> int:
        """The size of the population."""
        return len(self.class_counts)

    def write_picture(self, path: str | Path) -> Path:
        """A page with one stacked bar per client, as in Fig. 2 of the WSM paper."""
        from fedretain.report import write_partition_page

        return write_partition_page(self.class_counts, self.class_names, Path(path), self.title)


def partition(source: Source, *, overrides: Sequence[str] = (), data: Dataset | None = None) -> Shares:
    """Split an experiment's examples over its clients (of the first variant, if it is a grid)."""
    experiment = expand_variants(read_experiment(source, overrides))[0].experiment
    dataset = data if data is not None else load_data(experiment)
    train, validation = split_examples(dataset, experiment.partition, experiment.seed)
    settings = {"clients": len(train), **experiment.partition.parameters}
    told = ", ".join(f"{key}={value}" for key, value in settings.items() if value is not None)
    return Shares(
        f"{dataset.name}: {experiment.partition.kind} ({told}), seed {experiment.seed}",
        class_counts_of(train, dataset.train.labels, dataset.classes),
        dataset.class_names,
        train.sizes,
        validation.sizes,
    )

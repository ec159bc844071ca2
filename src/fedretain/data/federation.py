"""A federation: all examples on one device, and for each client the numbers of those that it holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedretain.components import find
from fedretain.data.dataset import Dataset, Examples
from fedretain.data.partition import PARTITIONS, split_validation
from fedretain.data.transforms import Normalise
from fedretain.errors import DataError, PartitionError, unknown

if TYPE_CHECKING:
    from fedretain.config import PartitionSettings

KEPT_ON_CPU, KEPT_ON_ACCELERATOR = 2**26, 2**30
"""Bytes up to which normalised test inputs are kept for the next evaluation, beside the raw ones."""
_BLOCK = 2048


@dataclass(frozen=True)
class Parts:
    """Index arrays of all clients, laid end to end: client k holds ``indices[offsets[k]:offsets[k + 1]]``."""

    indices: np.ndarray
    offsets: np.ndarray

    @classmethod
    def of(cls, arrays: Sequence[np.ndarray]) -> Parts:
        """From one array per client."""
        sizes = np.fromiter((len(a) for a in arrays), dtype=np.int64, count=len(arrays))
        flat = np.concatenate(arrays) if arrays else np.empty(0)
        return cls(flat.astype(np.int64), np.concatenate([[0], np.cumsum(sizes)]))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, client: int) -> np.ndarray:
        return self.indices[self.offsets[client] : self.offsets[client + 1]]

    @cached_property
    def sizes(self) -> np.ndarray:
        """Examples per client."""
        return np.diff(self.offsets)

    @cached_property
    def largest(self) -> int:
        """The most that any client holds."""
        return int(self.sizes.max(initial=0))

    @cached_property
    def even(self) -> bool:
        """Whether all clients hold the same number of examples."""
        return bool((self.sizes == self.sizes[:1]).all())


@dataclass(frozen=True, eq=False)
class EvaluationSet:
    """The test examples, and how a model sees them."""

    inputs: Tensor
    labels: Tensor
    normalise: Normalise

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Normalised inputs and labels, in their order."""
        for start in range(0, len(self.labels), size):
            here = slice(start, start + size)
            seen = self.normalise(self.inputs[here]) if self._normalised is None else self._normalised[here]
            yield seen, self.labels[here]

    @cached_property
    def _normalised(self) -> Tensor | None:
        """All inputs as a model sees them; None where they are too large to be kept."""
        kept = KEPT_ON_CPU if self.inputs.device.type == "cpu" else KEPT_ON_ACCELERATOR
        if self.inputs.numel() * self.normalise.dtype.itemsize > kept:
            return None
        seen = torch.empty_like(self.inputs, dtype=self.normalise.dtype)
        for start in range(0, len(seen), _BLOCK):
            here = slice(start, start + _BLOCK)
            seen[here] = self.normalise(self.inputs[here])
        return seen

    def __getstate__(self) -> dict[str, Any]:
        """What other processes are sent: without the normalised inputs, for only this one evaluates."""
        return {"inputs": self.inputs, "labels": self.labels, "normalise": self.normalise}


@dataclass(frozen=True)
class Federation:
    """Everything the engines and probes need to know about data."""

    inputs: Tensor
    labels: Tensor
    test: EvaluationSet
    train: Parts
    validation: Parts
    normalise: Normalise
    class_names: tuple[str, ...]
    fingerprint: str

    @property
    def clients(self) -> int:
        """The size of the population."""
        return len(self.train)

    @property
    def classes(self) -> int:
        """The number of classes."""
        return len(self.class_names)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of one input."""
        channels, height, width = self.inputs.shape[1:]
        return channels, height, width

    @property
    def device(self) -> torch.device:
        """Where the examples are."""
        return self.inputs.device

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All examples and their labels."""
        return self.inputs, self.labels, self.test.inputs, self.test.labels

    def sharing(self, other: Federation) -> Federation:
        """The same federation on the examples that the other one holds, if these are the same."""
        like = (
            self.fingerprint == other.fingerprint
            and self.inputs.dtype == other.inputs.dtype
            and self.device == other.device
            and self.normalise.dtype == other.normalise.dtype
            and torch.equal(self.normalise.offset, other.normalise.offset)
            and torch.equal(self.normalise.divisor, other.normalise.divisor)
        )
        if not like:
            return self
        return replace(self, inputs=other.inputs, labels=other.labels, test=other.test, normalise=other.normalise)

    def class_counts(self, client: int) -> Tensor:
        """How many training examples of each class a client holds."""
        return torch.bincount(self.labels[self.on_device(self.train[client])], minlength=self.classes)

    def all_class_counts(self) -> np.ndarray:
        """The class counts of every client [clients, classes], for the record and the pictures."""
        return class_counts_of(self.train, self.labels.cpu().numpy(), self.classes)

    def on_device(self, numbers: np.ndarray) -> Tensor:
        """An array of example numbers, ready to index with."""
        return torch.from_numpy(numbers).to(self.device)

    def examples(self, numbers: np.ndarray) -> tuple[Tensor, Tensor]:
        """Normalised inputs and labels of the given examples."""
        at = self.on_device(numbers)
        return self.normalise(self.inputs.index_select(0, at)), self.labels[at]


def class_counts_of(parts: Parts, labels: np.ndarray, classes: int) -> np.ndarray:
    """How many examples of each class every client holds [clients, classes]."""
    owners = np.repeat(np.arange(len(parts)), parts.sizes)
    flat = np.bincount(owners * classes + labels[parts.indices], minlength=len(parts) * classes)
    return flat.reshape(len(parts), classes)


def split_examples(dataset: Dataset, settings: PartitionSettings, seed: int) -> tuple[Parts, Parts]:
    """Divide the training examples over the clients: (training parts, validation parts)."""
    seed = seed if settings.seed is None else settings.seed
    labels = dataset.train.labels
    arguments: dict[str, Any] = settings.parameters
    function = find("partition", PARTITIONS, settings.kind)
    if settings.column is not None:
        if settings.column not in dataset.train.columns:
            raise DataError(
                f"partition.column: {unknown('column', settings.column, dataset.train.columns)} in {dataset.name}"
            )
        parts = function(dataset.train.columns[settings.column], labels=labels, seed=seed, **arguments)
    else:
        parts = function(labels, seed=seed, **arguments)
    train, validation = split_validation(parts, fraction=settings.validation, labels=labels, seed=seed)
    return Parts.of(train), Parts.of(validation)


def build_federation(
    dataset: Dataset,
    train: Parts,
    validation: Parts,
    normalise: Normalise,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> Federation:
    """Put the examples on the device; a client without training data is an error."""
    empty = np.flatnonzero(train.sizes == 0)
    if len(empty):
        raise PartitionError(
            f"client {empty[0]} has no training data ({len(empty)} of {len(train)} clients have none); "
            "use fewer clients or another partition"
        )
    inputs, labels = _on(device, dtype, dataset.train)
    normalise = normalise.to(device, dtype)
    return Federation(
        inputs,
        labels,
        EvaluationSet(*_on(device, dtype, dataset.test), normalise),
        train,
        validation,
        normalise,
        dataset.class_names,
        dataset.fingerprint,
    )


def _on(device: torch.device, dtype: torch.dtype, examples: Examples) -> tuple[Tensor, Tensor]:
    inputs, labels = (_tensor(array).to(device) for array in (examples.inputs, examples.labels))
    return inputs.to(dtype) if inputs.is_floating_point() else inputs, labels


def _tensor(array: np.ndarray) -> Tensor:
    """The dataset's own memory, which nobody writes to; a copy where PyTorch cannot use that."""
    usable = array.flags.writeable and all(stride >= 0 for stride in array.strides)
    return torch.from_numpy(array if usable else np.array(array))

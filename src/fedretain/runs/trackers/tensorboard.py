"""TensorBoard: event files in the run directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedretain.errors import MissingExtraError
from fedretain.runs.trackers.protocol import RunFacts


@dataclass
class TensorBoard:
    """Event files in ``tensorboard/`` of the run directory: scalars, histograms over clients, the configuration.

    Opening writes them anew from the first round, so that what a killed process left half-written does not matter.
    """

    _library: Any = field(init=False, repr=False)
    _writer: Any = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        try:
            from torch.utils import tensorboard
        except ImportError as error:
            raise MissingExtraError("tensorboard", "track", "track: tensorboard") from error
        self._library = tensorboard

    def open(self, facts: RunFacts) -> int:
        """Start a new event file in place of all earlier ones."""
        folder = facts.path / "tensorboard"
        for earlier in folder.glob("events.out.tfevents.*"):
            earlier.unlink()
        # A TensorBoard that is looking on still holds the old events in memory: purge_step makes it drop them.
        self._writer = self._library.SummaryWriter(str(folder), purge_step=1)
        lines = [f"| {key} | {value} |" for key, value in facts.config.items()]
        self._writer.add_text("config", "\n".join([f"| {facts.name} | |", "| --- | --- |", *lines]), 0)
        return 0

    def log(self, round: int, numbers: Mapping[str, float], clients: Mapping[str, list[float]]) -> None:
        """Scalars in float32: TensorBoard's fast data server shows no other."""
        for key, value in numbers.items():
            self._writer.add_scalar(key, value, round)
        for key, values in clients.items():
            self._writer.add_histogram(key, np.asarray(values, dtype=np.float64), round)
        self._writer.flush()

    def close(self, rounds: int, summary: Mapping[str, float] | None) -> None:
        """The summary stands at the last round."""
        for key, value in (summary or {}).items():
            self._writer.add_scalar(key, value, rounds)
        self._writer.close()

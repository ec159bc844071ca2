"""FedSGD: the baseline that forgets nothing because it never trains locally for long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedretain.errors import ConfigError
from fedretain.methods.method import Method

if TYPE_CHECKING:
    from fedretain.config import LocalSettings

WHOLE = 2**31
"""A batch size that no client's data exceeds."""


@dataclass(frozen=True)
class FedSGD(Method):
    """One step on all of a client's data per round; local.batch_size is not used (McMahan et al. 2017)."""

    def local(self, settings: LocalSettings) -> LocalSettings:
        """A single full-batch step; more local work asked for in the experiment file is a contradiction."""
        if settings.epochs not in (None, 1.0) or settings.steps not in (None, 1):
            raise ConfigError("method: fedsgd takes one full-batch step a round; remove local.epochs and local.steps")
        changes = {"epochs": None, "steps": 1, "batch_size": WHOLE, "drop_last": False}
        return settings.model_copy(update=changes)

"""Errors that a user can act on: each message says what is wrong, where, and what to do next."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class FedretainError(Exception):
    """Base of every error that fedretain raises on purpose."""


class ConfigError(FedretainError):
    """The experiment file or call asks for something that does not exist or cannot be."""


class DataError(FedretainError):
    """A dataset is missing, corrupt, or not what it claims to be."""


class PartitionError(FedretainError):
    """The examples cannot be split over the clients as asked."""


class TrainingError(FedretainError):
    """Training broke down; names the round and the client."""

    def __init__(self, message: str, *, round: int, client: int | None = None, which: int | None = None) -> None:
        where = f"round {round}" if client is None else f"round {round}, client {client}"
        super().__init__(f"{where}: {message}")
        self.message = message
        self.round = round
        self.client = client
        self.which = which
        """The number of the experiment, where several train together and only this one broke down."""


class RunError(FedretainError):
    """A run directory cannot be written, read, or continued."""


class MissingExtraError(FedretainError):
    """An optional package is needed; the message carries the pip command."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package!r}, which is not installed: pip install 'fedretain[{extra}]'"
        )


def unknown(what: str, given: object, valid: Iterable[str]) -> str:
    """The message for a name that does not exist: the nearest valid spelling, then all of them."""
    names = sorted(valid)
    if not names:
        return f"unknown {what} {given!r}: there are none to choose from"
    near = get_close_matches(str(given), names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {given!r}{hint} (valid: {', '.join(names)})"

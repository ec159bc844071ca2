"""Checkpoints: safetensors beside JSON, written atomically, never pickle.

``round-000012.safetensors`` holds every tensor of the state after round 12, ``round-000012.json`` the rest and the
tensors' checksum; the JSON is written last, so a checkpoint without it does not exist. The two newest are kept: a
damaged one is passed over.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load, save
from torch import Tensor

from fedretain.files import write_atomically
from fedretain.runs.clients import ClientStore
from fedretain.server import ServerState
from fedretain.tensors import under_prefix, with_prefix

_SECTIONS = ("params", "buffers", "server", "optimizer")


class Checkpoint(NamedTuple):
    """All that is needed to go on: the server's state, and after which round each client's kept state was made."""

    state: ServerState
    clients: dict[int, int]
    facts: dict[str, Any]

    def to(self, device: str) -> Checkpoint:
        """The same on another device."""
        moved = ({n: t.to(device) for n, t in part.items()} for part in self.state[1:])
        return self._replace(state=ServerState(self.state.round, *moved))


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint, then remove all but the two newest."""
    tensors: dict[str, Tensor] = {}
    for section in _SECTIONS:
        tensors |= with_prefix(section, getattr(checkpoint.state, section))
    blob = save({name: value.detach().cpu().contiguous() for name, value in tensors.items()})
    stem = f"round-{checkpoint.state.round:06d}"
    write_atomically(folder / f"{stem}.safetensors", blob)
    facts = {
        "round": checkpoint.state.round,
        "names": list(tensors),
        "clients": {str(client): number for client, number in checkpoint.clients.items()},
        "sha256": hashlib.sha256(blob).hexdigest(),
        "facts": checkpoint.facts,
    }
    write_atomically(folder / f"{stem}.json", json.dumps(facts).encode())
    for old in sorted(folder.glob("round-*.json"))[:-2]:
        old.unlink()
        old.with_suffix(".safetensors").unlink(missing_ok=True)


def load_checkpoints(folder: Path, *, at_most: int, store: ClientStore) -> list[Checkpoint]:
    """The whole checkpoints up to a round, newest first; one of which a client's state is missing is not whole."""
    found = (_load(path) for path in sorted(folder.glob("round-*.json"), reverse=True))
    return [
        checkpoint
        for checkpoint in found
        if checkpoint is not None
        and checkpoint.state.round <= at_most
        and all(store.has(version) for version in checkpoint.clients.items())
    ]


def _load(path: Path) -> Checkpoint | None:
    """One checkpoint, or None when a part of it is missing or damaged."""
    try:
        facts = json.loads(path.read_bytes())
        blob = path.with_suffix(".safetensors").read_bytes()
        if hashlib.sha256(blob).hexdigest() != facts["sha256"]:
            return None
        number, extra = int(facts["round"]), dict(facts["facts"])
        clients = {int(client): int(version) for client, version in facts["clients"].items()}
        stored = load(blob)
        # safetensors gives the names in no fixed order; sums over all parameters depend on it to the last bit.
        tensors: Mapping[str, Tensor] = {name: stored[name] for name in facts["names"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    sections = (under_prefix(section, tensors) for section in _SECTIONS)
    return Checkpoint(ServerState(number, *sections), clients, extra)

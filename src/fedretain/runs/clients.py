"""Where stateful methods keep what belongs to each client: bounded memory, the rest in files.

A client's state after its round t is one version, ``(client, t)``. A version never changes: a new round writes a new
one. So a checkpoint only needs to remember which version each client had, an interrupted round disturbs nothing, and
saving writes just the versions that are not on disk yet.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save

from fedretain.errors import RunError
from fedretain.files import write_atomically
from fedretain.tensors import Tensors, size_in_bytes

Version = tuple[int, int]
"""A client and the round after which it had this state."""


class ClientStore:
    """Versions of client states. At most ``memory`` bytes stay in RAM; without a folder everything does.

    ``half`` keeps arrays of real numbers in bfloat16 (single numbers stay as they are). They are rounded when they come
    in, whether or not they ever leave RAM, so results do not depend on the memory bound.
    """

    def __init__(self, folder: Path | None = None, *, memory: int | None = None, half: bool = False) -> None:
        self.folder = folder
        self.memory = memory if folder is not None else None
        self.half = half
        self.in_memory = 0
        self._held: OrderedDict[Version, Tensors] = OrderedDict()
        self._unsynced: set[Version] = set()

    def write(self, version: Version, state: Tensors) -> None:
        """Take in a state, rounded if asked for; the least recently used ones make room."""
        kept = {name: value.detach().to("cpu", copy=True) for name, value in packed(state, self.half).items()}
        if self.folder is not None:
            self._path(version).unlink(missing_ok=True)  # of a round that was interrupted
        self._hold(version, kept)

    def read(self, version: Version, like: torch.Tensor) -> Tensors:
        """A state on the device of ``like``; what was kept in half precision comes back in its type."""
        state = self._held.get(version)
        if state is None:
            state = self._load(version)
            self._hold(version, state)
        else:
            self._held.move_to_end(version)
        return {
            name: value.to(like.device, like.dtype if value.dtype == torch.bfloat16 else value.dtype, copy=True)
            for name, value in sorted(state.items())  # one order, whether it comes from memory or from a file
        }

    def save(self, index: Mapping[int, int]) -> None:
        """Bring every version of an index safely to disk; those already there are not touched."""
        if self.folder is None:
            return
        for version in index.items():
            if version in self._held and not self._path(version).exists():
                self._spill(version)
        for version in sorted(self._unsynced & set(index.items())):
            with self._path(version).open("rb") as file:
                os.fsync(file.fileno())
            self._unsynced.discard(version)

    def forget_all_but(self, keep: Collection[Version]) -> None:
        """Drop every version that no checkpoint and no client needs any more, in memory and on disk."""
        wanted = set(keep)
        for version in [v for v in self._held if v not in wanted]:
            self.in_memory -= size_in_bytes(self._held.pop(version))
        if self.folder is not None and self.folder.exists():
            for path in self.folder.glob("*.safetensors"):
                client, _, number = path.stem.partition("-")
                if (int(client), int(number)) not in wanted:
                    path.unlink(missing_ok=True)
        self._unsynced &= wanted

    def drop(self, version: Version) -> None:
        """Forget one version."""
        if version in self._held:
            self.in_memory -= size_in_bytes(self._held.pop(version))
        if self.folder is not None:
            self._path(version).unlink(missing_ok=True)
        self._unsynced.discard(version)

    def has(self, version: Version) -> bool:
        """Whether a version can be read."""
        return version in self._held or (self.folder is not None and self._path(version).exists())

    def _hold(self, version: Version, state: Tensors) -> None:
        if version in self._held:
            self.in_memory -= size_in_bytes(self._held.pop(version))
        self._held[version] = state
        self.in_memory += size_in_bytes(state)
        while self.memory is not None and self.in_memory > self.memory and self._held:
            oldest = next(iter(self._held))
            if not self._path(oldest).exists():
                self._spill(oldest)
            self.in_memory -= size_in_bytes(self._held.pop(oldest))

    def _spill(self, version: Version) -> None:
        write_atomically(self._path(version), save(self._held[version]), durable=False)
        self._unsynced.add(version)

    def _load(self, version: Version) -> Tensors:
        path = self._path(version)
        try:
            return load_file(path)
        except Exception as error:
            raise RunError(f"{path}: the state of client {version[0]} cannot be read ({error})") from error

    def _path(self, version: Version) -> Path:
        if self.folder is None:
            raise RunError(f"the state of client {version[0]} after round {version[1]} is not held")
        return self.folder / f"{version[0]:07d}-{version[1]:06d}.safetensors"


def packed(state: Tensors, half: bool) -> Tensors:
    """A state as it is kept: in half precision its arrays of real numbers are bfloat16."""
    return {
        name: value.to(torch.bfloat16) if half and value.is_floating_point() and value.numel() > 1 else value
        for name, value in state.items()
    }


def worst_case_bytes(state_bytes: int, clients: int, cohort: int, rounds: int) -> int:
    """The most that client states can take on disk.

    A client that was seen has its current version, the two checkpoints that are kept may each hold an older one, and
    the round under way writes new ones; but there are never more versions than were written.
    """
    return state_bytes * min(3 * min(clients, cohort * rounds) + cohort, cohort * rounds)

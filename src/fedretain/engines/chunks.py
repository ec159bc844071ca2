"""Chunks of uploads: put in order, cut, and summed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from fedretain.engines.engine import Uploads
from fedretain.engines.sums import Sums
from fedretain.tensors import Tensors


def summed_up(uploads: Uploads, weights: Tensor, *, keep_models: bool = False) -> Uploads:
    """The same with the sums by weight in place of single uploads; the local models stay where they are asked for."""
    sums = Sums()
    sums.add(uploads, weights)
    summed = uploads._replace(delta={}, extras={}, sums=sums)
    return summed if keep_models else summed._replace(params={}, buffers={})


def in_order(chunks: list[Uploads], positions: np.ndarray) -> Iterator[Uploads]:
    """The chunks of a cohort in its order; ``positions`` says where in it their clients stand."""
    if bool((positions == np.arange(len(positions))).all()):
        yield from chunks
        return
    if all(len(chunk.clients) == 1 for chunk in chunks):
        yield from (chunks[at] for at in np.argsort(positions).tolist())
        return
    order = np.argsort(positions)
    at = torch.from_numpy(order).to(chunks[0].train_loss.device)

    def joined(kind: str) -> Tensors:
        parts = [getattr(chunk, kind) for chunk in chunks]
        return {name: torch.cat([part[name] for part in parts])[at] for name in parts[0]}

    yield Uploads(
        clients=np.concatenate([chunk.clients for chunk in chunks])[order],
        params=joined("params"),
        delta=joined("delta"),
        buffers=joined("buffers"),
        extras=joined("extras"),
        state=joined("state"),
        train_loss=torch.cat([chunk.train_loss for chunk in chunks])[at],
        steps=np.concatenate([chunk.steps for chunk in chunks])[order],
        sums=_together(chunks),
    )


def _together(chunks: list[Uploads]) -> Sums | None:
    whole = Sums()
    for chunk in chunks:
        if chunk.sums is None:
            return None
        whole.include(chunk.sums)
    return whole


def part_of(uploads: Uploads, start: int, end: int) -> Uploads:
    """The uploads of the clients from ``start`` to ``end``."""
    here = slice(start, end)

    def cut(tensors: Tensors) -> Tensors:
        return {name: value[here] for name, value in tensors.items()}

    return Uploads(
        clients=uploads.clients[here],
        params=cut(uploads.params),
        delta=cut(uploads.delta),
        buffers=cut(uploads.buffers),
        extras=cut(uploads.extras),
        state=cut(uploads.state),
        train_loss=uploads.train_loss[here],
        steps=uploads.steps[here],
    )


def only(uploads: Uploads, index: int, per_example: frozenset[str], examples: int) -> Uploads:
    """One client's upload; its state without padding."""
    alone = part_of(uploads, index, index + 1)
    state = {name: value[:, :examples] if name in per_example else value for name, value in alone.state.items()}
    return alone._replace(state=state)

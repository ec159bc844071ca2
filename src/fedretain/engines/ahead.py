"""The next round's stacks, made on the host while the GPU works on this round's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fedretain.engines.engine import World
from fedretain.engines.stack import Member, Stack, Work, stack


class Ahead:
    """Draws the batches of a round before it is asked for; what nobody asks for is forgotten.

    Where other participants come than were told, nothing is found and the stack is made when it is needed.
    """

    def __init__(self, *, gather: bool) -> None:
        self.gather = gather
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.made: dict[Any, Stack] = {}

    def take(self, members: Sequence[Member], round: int) -> Stack:
        """The stack of these clients, with the states that they have now."""
        found = self.made.pop(_key(members, round), None)
        if found is None:
            return stack(members, round, gather=self.gather)
        torch.cuda.current_stream().wait_stream(self.stream)
        for leaf in tree_leaves(found._replace(members=())):
            if isinstance(leaf, Tensor):
                leaf.record_stream(torch.cuda.current_stream())
        return found._replace(members=members)

    def make(self, groups: Sequence[Sequence[Member]], round: int) -> None:
        """Make these stacks, in place of any that were never taken."""
        self.made.clear()
        with torch.cuda.stream(self.stream):
            for members in groups:
                self.made[_key(members, round)] = stack(members, round, gather=self.gather)


def next_members(worlds: Sequence[World], works: Sequence[Work]) -> list[Member]:
    """Who will take part in the next round; nobody where that is not known."""
    if any(work.upcoming is None for work in works):
        return []
    return [
        Member(world, client, None, which)
        for which, (world, work) in enumerate(zip(worlds, works, strict=True))
        if work.upcoming is not None
        for client in work.upcoming.tolist()
    ]


def _key(members: Sequence[Member], round: int) -> Any:
    return round, tuple((member.which, member.client) for member in members)

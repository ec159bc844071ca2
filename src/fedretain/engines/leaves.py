"""The tensors of nested tuples and dictionaries as flat lists, and how they lie in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fedretain.engines.functional import Carry


def leaves_of(tree: Any) -> list[Any]:
    """The leaves of nested tuples and dictionaries, in the order of ``tree_flatten``."""
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, tuple):
        return [tree]
    return [leaf for part in tree for leaf in leaves_of(part)]


def carry_of(leaves: Sequence[Tensor], like: Carry) -> Carry:
    """The leaves under the names that they had."""
    rest = iter(leaves)
    return Carry(*({name: next(rest) for name in part} for part in like))


def laid(value: Tensor, *, turned: bool) -> Tensor:
    """The same numbers, lying in the order of their axes, or with the last two axes turned."""
    return value.mT.contiguous().mT if turned else value.contiguous()

"""What can be named in an experiment file."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fedretain.components import Parameter, help_line, parameters
from fedretain.config import LOSS_SUPPLIED, PARTITION_SUPPLIED
from fedretain.data import DATASETS
from fedretain.data.partition import PARTITIONS
from fedretain.errors import ConfigError, unknown
from fedretain.losses import LOSSES
from fedretain.methods import METHODS
from fedretain.models import MODELS
from fedretain.models import SUPPLIED as MODEL_SUPPLIED


class Entry(NamedTuple):
    """A name, what it is, and its parameters with types and defaults."""

    name: str
    help: str
    parameters: list[str]


def available(kind: str) -> list[Entry]:
    """The methods, losses, models, datasets or partitions."""
    tables: dict[str, Callable[[], list[Entry]]] = {
        "methods": lambda: _entries(METHODS),
        "losses": lambda: _entries(LOSSES, LOSS_SUPPLIED),
        "models": lambda: _entries(MODELS, MODEL_SUPPLIED),
        "partitions": lambda: _entries(PARTITIONS, PARTITION_SUPPLIED),
        "datasets": lambda: [Entry(name, s.help, list(s.options)) for name, s in DATASETS.items()],
    }
    if kind not in tables:
        raise ConfigError(unknown("kind of component", kind, tables))
    return tables[kind]()


def _entries(table: Mapping[str, Any], skip: tuple[str, ...] = ()) -> list[Entry]:
    return [
        Entry(name, help_line(factory), [_described(p) for p in parameters(factory, skip)])
        for name, factory in table.items()
    ]


def _described(parameter: Parameter) -> str:
    default = "required" if parameter.required else repr(parameter.default)
    return f"{parameter.name}: {_type_name(parameter.annotation)} ({default})"


def _type_name(annotation: Any) -> str:
    """A type hint as a user would say it: ``batch | group``, ``float > 0``, ``integer or none``."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        limits = " and ".join(_limits(arguments[1:]))
        return f"{_type_name(arguments[0])} {limits}".strip()
    if origin is typing.Literal:
        return " | ".join(str(value) for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_name(part) for part in arguments)
    if annotation is type(None):
        return "null"
    if origin is not None:
        return f"list of {_type_name(arguments[0])}"
    plain: str = getattr(annotation, "__name__", str(annotation))
    return plain


def _limits(metadata: tuple[Any, ...]) -> list[str]:
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    found = []
    for item in metadata:
        for limit in (item, *getattr(item, "metadata", ())):
            bounds = ((sign, getattr(limit, key, None)) for key, sign in signs.items())
            found += [f"{sign} {bound}" for sign, bound in bounds if bound is not None]
    return found

"""Named components (methods, losses, models, partitions) and their parameters, read off their signatures.

A component is a function or class; its keyword parameters, with their type hints and defaults, *are* its keys in the
experiment file. Nothing is declared twice.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any, NamedTuple, get_type_hints

import pydantic

from fedretain.errors import ConfigError, unknown

Factory = Callable[..., Any]


class Parameter(NamedTuple):
    """One key of a component."""

    name: str
    annotation: Any
    default: Any

    @property
    def required(self) -> bool:
        """Whether the experiment file must give it."""
        return self.default is inspect.Parameter.empty


def find(what: str, table: Mapping[str, Any], name: str) -> Any:
    """The component called ``name``, or the user's own at the import path ``package.module:attribute``."""
    if name in table:
        return table[name]
    if ":" not in name:
        raise ConfigError(unknown(what, name, table) + f"; your own: package.module:{what.capitalize()}")
    module_name, _, attribute = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{what} {name!r} cannot be imported ({error}); is the module on PYTHONPATH and the name right?"
        ) from error
    if not callable(found):
        raise ConfigError(f"{what} {name!r} is no function or class but {type(found).__name__}")
    return found


def parameters(factory: Factory, skip: Collection[str] = ()) -> list[Parameter]:
    """The keyword parameters of a component, without those that fedretain itself supplies."""
    function = factory.__init__ if inspect.isclass(factory) and not dataclasses.is_dataclass(factory) else factory
    hints = get_type_hints(factory if dataclasses.is_dataclass(factory) else function, include_extras=True)
    return [
        Parameter(p.name, hints.get(p.name, Any), p.default)
        for p in inspect.signature(factory).parameters.values()
        if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name not in skip
    ]


def help_line(factory: Factory) -> str:
    """The first line of the docstring."""
    return (inspect.getdoc(factory) or "").partition("\n")[0]


def complete(key: str, factory: Factory, given: Mapping[str, Any], skip: Collection[str] = ()) -> dict[str, Any]:
    """The given parameters, validated, with every default written out."""
    schema = _schema(factory, frozenset(skip))
    try:
        checked = schema.model_validate(dict(given))
    except pydantic.ValidationError as error:
        raise ConfigError(explain(error, schema, key)) from None
    return {name: getattr(checked, name) for name in type(checked).model_fields}


def check_fields(instance: Any) -> None:
    """Validate a frozen dataclass by the type hints of its fields (ranges included)."""
    cls = type(instance)
    given = {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance)}
    for name, value in complete(cls.__name__.lower(), cls, given).items():
        object.__setattr__(instance, name, value)


@cache
def _schema(factory: Factory, skip: frozenset[str]) -> type[pydantic.BaseModel]:
    fields: dict[str, Any] = {
        p.name: (p.annotation, ... if p.required else p.default) for p in parameters(factory, skip)
    }
    return pydantic.create_model(factory.__name__, __base__=_Parameters, **fields)


def refuse_bool(cls: type[pydantic.BaseModel], value: Any, info: pydantic.ValidationInfo) -> Any:
    """``true`` is not the number 1."""
    if isinstance(value, bool) and info.field_name:
        annotation = cls.model_fields[info.field_name].annotation
        if "bool" not in str(annotation) and annotation is not Any:
            raise ValueError("a number or text is expected here, not true/false")
    return value


class _Parameters(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(
        extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False, protected_namespaces=()
    )
    _no_bools = pydantic.field_validator("*", mode="before")(classmethod(refuse_bool))


def explain(
    error: pydantic.ValidationError,
    model: type[pydantic.BaseModel],
    prefix: str = "",
    elsewhere: Mapping[str, Collection[str]] | None = None,
) -> str:
    """A validation error in words: key, value, what is allowed, and the nearest valid spelling.

    ``elsewhere`` says for a key where it belongs when it stands at the wrong level.
    """
    lines: list[str] = []
    refused: dict[str, list[Any]] = {}
    for item in error.errors():
        if item["type"] == "extra_forbidden":
            lines.append(_explain_unknown(item["loc"], model, prefix, elsewhere or {}))
        else:
            refused.setdefault(_path(prefix, _place(model, item["loc"])), []).append(item)
    return "\n".join([*lines, *(_explain_value(path, items) for path, items in refused.items())])


def _explain_unknown(
    loc: tuple[int | str, ...],
    model: type[pydantic.BaseModel],
    prefix: str,
    elsewhere: Mapping[str, Collection[str]],
) -> str:
    path, key, siblings = _path(prefix, loc), str(loc[-1]), _keys_beside(model, loc)
    if key in elsewhere and not get_close_matches(key, siblings, cutoff=0.8):
        return f"unknown key {path!r}; did you mean {' or '.join(map(repr, elsewhere[key]))}?"
    if not siblings:
        return f"unknown key {path!r}: {prefix or 'this'} takes no parameters"
    head, dot, _ = path.rpartition(".")
    return unknown("key", path, [f"{head}{dot}{sibling}" for sibling in siblings])


def _explain_value(path: str, items: Sequence[Any]) -> str:
    """What is wrong with one value; a key that takes several kinds of value has an item for each of them."""
    if items[0]["type"] == "missing":
        return f"{path}: missing, and it has no default"
    allowed = [_allowed(item) for item in items]
    message = " or ".join([allowed[0], *(text.removeprefix("must be ") for text in dict.fromkeys(allowed[1:]))])
    # A rule about a whole section names the keys itself; the text of the section would only hide it.
    whole = items[0]["type"] == "value_error" and isinstance(items[0]["input"], dict)
    return f"{path}: {message}" if whole else f"{path}: {message} (given: {items[0]['input']!r})"


_PLAIN_WORDS = {
    "model_type": "must be a mapping of keys to values",
    "tuple_type": "must be a list, such as [a, b]",
    "sequence_str": "must be a list, such as [a, b]",
    "invalid_key": "a key must be text",
}


def _allowed(item: Any) -> str:
    """What may stand there, in the words of an experiment file."""
    if item["type"] in _PLAIN_WORDS:
        return _PLAIN_WORDS[item["type"]]
    message = str(item["msg"]).removeprefix("Value error, ")
    if message.startswith("Input should be "):
        message = "must be " + message.removeprefix("Input should be ")
    if item["type"] == "literal_error":
        near = get_close_matches(str(item["input"]), re.findall(r"'([^']*)'", message), n=1, cutoff=0.5)
        message += f"; did you mean {near[0]!r}?" if near else ""
    return message


def _path(prefix: str, loc: Sequence[int | str]) -> str:
    return ".".join(str(part) for part in (prefix, *loc) if part != "")


def _place(model: type[pydantic.BaseModel], loc: tuple[int | str, ...]) -> list[int | str]:
    """The key that a location leads to, without the names of types that pydantic adds for a union."""
    place: list[int | str] = []
    inside: type[pydantic.BaseModel] | None = model
    for part in loc:
        if inside is None and isinstance(part, str):
            continue
        place.append(part)
        field = inside.model_fields.get(str(part)) if inside is not None else None
        annotation = field.annotation if field else None
        inside = annotation if inspect.isclass(annotation) and issubclass(annotation, pydantic.BaseModel) else None
    return place


def _keys_beside(model: type[pydantic.BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """The valid keys at the place of an unknown one."""
    for part in loc[:-1]:
        field = model.model_fields.get(str(part))
        annotation = field.annotation if field else None
        if not (inspect.isclass(annotation) and issubclass(annotation, pydantic.BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)

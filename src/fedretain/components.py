"""Named components (methods, losses, models, partitions) and their parameters, read off their signatures.

A component is a function or class; its keyword parameters, with their type hints and defaults, *are* its keys in the
experiment file. Nothing is declared twice.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Collection, Mapping
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
    elsewhere: Mapping[str, str] | None = None,
) -> str:
    """A validation error in words: key, value, what is allowed, and the nearest valid spelling of an unknown key."""
    return "\n".join(_explain_one(item, model, prefix, elsewhere or {}) for item in error.errors())


def _explain_one(item: Any, model: type[pydantic.BaseModel], prefix: str, elsewhere: Mapping[str, str]) -> str:
    path = ".".join(str(part) for part in (prefix, *item["loc"]) if part != "")
    if item["type"] == "extra_forbidden":
        key = str(item["loc"][-1])
        siblings = _keys_beside(model, item["loc"])
        if key in elsewhere and not get_close_matches(key, siblings, cutoff=0.8):
            return f"unknown key {path!r}; did you mean {elsewhere[key]!r}?"
        if not siblings:
            return f"unknown key {path!r}: {prefix or 'this'} takes no parameters"
        head, dot, _ = path.rpartition(".")
        return unknown("key", path, [f"{head}{dot}{sibling}" for sibling in siblings])
    if item["type"] == "missing":
        return f"{path}: missing, and it has no default"
    message = item["msg"].removeprefix("Value error, ")
    if message.startswith("Input should be "):
        message = "must be " + message.removeprefix("Input should be ")
    shown = "" if isinstance(item["input"], dict) else f" (given: {item['input']!r})"
    return f"{path}: {message}{shown}"


def _keys_beside(model: type[pydantic.BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """The valid keys at the place of an unknown one."""
    for part in loc[:-1]:
        field = model.model_fields.get(str(part))
        annotation = field.annotation if field else None
        if not (inspect.isclass(annotation) and issubclass(annotation, pydantic.BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)

"""Reading experiments: YAML, ``key=value`` overrides, grids of variants."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pydantic
import yaml

from fedretain.components import explain
from fedretain.config.settings import (
    DataSettings,
    EvaluateSettings,
    Experiment,
    LocalSettings,
    ServerSettings,
    described,
)
from fedretain.errors import ConfigError
from fedretain.methods import Method


def make_experiment(given: Mapping[str, Any]) -> Experiment:
    """Validate a plain mapping; every mistake is named with its key."""
    if "variants" in given:
        raise ConfigError("variants: this experiment is a grid; run it with 'fedretain compare' or fedretain.compare")
    try:
        return Experiment.model_validate(dict(given))
    except pydantic.ValidationError as error:
        raise ConfigError(explain(error, Experiment, elsewhere=_full_names())) from None


class Variant(pydantic.BaseModel):
    """One point of a grid: its name, what it sets, and the experiment."""

    model_config = pydantic.ConfigDict(frozen=True)

    name: str
    settings: dict[str, Any]
    experiment: Experiment


def expand_variants(given: Mapping[str, Any]) -> list[Variant]:
    """Every combination of the values under ``variants``, the last key running fastest."""
    base = {k: v for k, v in given.items() if k != "variants"}
    grid = given.get("variants") or {}
    if not isinstance(grid, Mapping):
        raise ConfigError("variants: must be a mapping from keys to lists, such as 'loss: [ce, wsm]'")
    for key, values in grid.items():
        if not isinstance(values, list | tuple) or not values:
            raise ConfigError(f"variants.{key}: must be a list with at least one value (given: {values!r})")
    variants = []
    for combination in product(*grid.values()):
        settings = dict(zip(grid, combination, strict=True))
        point = base
        for key, value in settings.items():
            point = with_key(point, key, value)
        label = ",".join(f"{key}={_short(value)}" for key, value in settings.items()) or "only"
        variants.append(Variant(name=label, settings=settings, experiment=make_experiment(point)))
    names = [variant.name for variant in variants]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"variants: {sorted(repeated)[0]!r} appears twice")
    return variants


def read_experiment(
    source: str | Path | Mapping[str, Any] | Experiment, overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """A file, mapping or Experiment as a plain mapping, with ``key=value`` overrides applied; not yet validated."""
    if isinstance(source, Experiment):
        given: Any = source.as_dict()
    elif isinstance(source, Mapping):
        given = dict(source)
    else:
        given = read_yaml(Path(source))
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise ConfigError(f"{override!r}: an override is written key=value, for example local.lr=0.05")
        given = with_key(given, key, _parse(text, f"{key}="))
    return dict(given)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such experiment file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    given = _parse(text, str(path))
    if not isinstance(given, Mapping):
        raise ConfigError(f"{path}: an experiment file is a mapping of keys to values")
    return dict(given)


def with_key(given: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A copy with one dotted key set. A named component given as text becomes a mapping when a parameter is set."""
    head, dot, rest = key.partition(".")
    changed = dict(given)
    if not dot:
        changed[head] = value
        return changed
    inner = changed.get(head, {})
    if isinstance(inner, str):
        inner = {"kind" if head == "partition" else "name": inner}
    if isinstance(inner, list | tuple):
        raise ConfigError(f"{key}: {head} is a chain; set the whole of it")
    if not isinstance(inner, Mapping):
        raise ConfigError(f"{key}: {head} is no mapping (given: {inner!r})")
    other = {"local.epochs": "steps", "local.steps": "epochs"}.get(key)
    changed[head] = with_key({k: v for k, v in inner.items() if k != other}, rest, value)
    return changed


class _Loader(yaml.SafeLoader):
    """YAML 1.2 floats (1e-4 is a number) and no repeated keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)$"),
    list("-+0123456789."),
)


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not valid YAML: {error}") from None


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        named = dict(value)
        name = named.pop("name", named.pop("kind", ""))
        inside = ",".join(f"{k}={_short(v)}" for k, v in named.items())
        return f"{name}({inside})" if inside else str(name)
    if isinstance(value, list | tuple):
        return "+".join(_short(v) for v in value)
    if isinstance(value, Method):
        return _short(described(value))
    return str(value)


def _full_names() -> dict[str, str]:
    """Where a key that was written at the wrong level belongs: lr -> local.lr."""
    sections: dict[str, type[pydantic.BaseModel]] = {
        "local": LocalSettings,
        "data": DataSettings,
        "server": ServerSettings,
        "evaluate": EvaluateSettings,
    }
    places: dict[str, str] = {}
    for section, model in sections.items():
        for name in model.model_fields:
            places.setdefault(name, f"{section}.{name}")
    return places | {"clients": "partition.clients", "alpha": "partition.alpha", "kind": "partition.kind"}

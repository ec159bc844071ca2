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
from fedretain.config.settings import Experiment, described
from fedretain.errors import ConfigError
from fedretain.methods import Method


def make_experiment(given: Mapping[str, Any]) -> Experiment:
    """Validate a plain mapping; every mistake is named with its key."""
    if given.get("variants"):
        raise ConfigError("variants: this experiment is a grid; run it with 'fedretain compare' or fedretain.compare")
    try:
        return Experiment.model_validate({key: value for key, value in given.items() if key != "variants"})
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
        _check_key(key, "variants")
        if not isinstance(values, list | tuple) or not values:
            raise ConfigError(f"variants.{key}: must be a list with at least one value (given: {values!r})")
    variants = []
    for combination in product(*grid.values()):
        settings = dict(zip(grid, combination, strict=True))
        point = base
        for key, value in settings.items():
            point = with_key(point, key, value)
        label = ",".join(f"{key}={_short(value)}" for key, value in settings.items()) or "only"
        try:
            experiment = make_experiment(point)
        except ConfigError as error:
            raise ConfigError(f"variant {label}: {error}" if grid else str(error)) from None
        variants.append(Variant(name=label, settings=settings, experiment=experiment))
    names = [variant.name for variant in variants]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"variants: {sorted(repeated)[0]!r} appears twice; remove one of them")
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
        if not equals:
            raise ConfigError(f"{override!r}: an override is written key=value, for example local.lr=0.05")
        _check_key(key, repr(override))
        given = with_key(given, key, _parse(text, override))
    return dict(given)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such experiment file; check the path") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder; give the experiment file itself, for example {path}/x.yaml") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is no text; an experiment file is YAML in UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error}); check the file") from None
    given = _parse(text, str(path))
    if not isinstance(given, Mapping):
        found = "is empty" if given is None else f"holds a {'list' if isinstance(given, list) else 'single value'}"
        raise ConfigError(f"{path}: {found}; an experiment file is a mapping, with lines such as 'rounds: 10'")
    return dict(given)


def with_key(given: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A copy with one dotted key set. A named component given as text becomes a mapping when a parameter is set."""
    head, dot, rest = key.partition(".")
    changed = dict(given)
    if not dot:
        changed[head] = value
        return changed
    inner = changed.get(head)
    if isinstance(inner, Method):
        inner = described(inner)
    if isinstance(inner, str):
        inner = {"kind" if head == "partition" else "name": inner}
    if isinstance(inner, list | tuple):
        raise ConfigError(f"{key}: {head} is a chain; set the whole of it, for example {head}=[a, b]")
    if inner is not None and not isinstance(inner, Mapping):
        raise ConfigError(f"{key}: {head} is no mapping with keys of its own (given: {inner!r})")
    other = {"local.epochs": "steps", "local.steps": "epochs"}.get(key)
    kept = {k: v for k, v in (inner or {}).items() if k != other}
    if "." in rest:
        raise ConfigError(f"{key}: {head}.{rest.partition('.')[0]} has no keys of its own; set it as a whole")
    changed[head] = {**kept, rest: value}
    return changed


def _check_key(key: Any, where: str) -> None:
    """A dotted key is text without empty parts."""
    if not isinstance(key, str) or not all(key.split(".")):
        raise ConfigError(f"{where}: {key!r} is no key; write it as rounds or local.lr")


class _Loader(yaml.SafeLoader):
    """YAML 1.2 floats (1e-4 is a number) and no repeated keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        plain = (key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge")
        keys = [self.construct_object(key, deep=True) for key in plain]
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
        reason = str(error).replace('in "<unicode string>", ', "at ")
        raise ConfigError(f"{where}: not valid YAML: {reason}") from None
    except RecursionError:
        raise ConfigError(f"{where}: not valid YAML: nested too deeply") from None


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


def _full_names() -> dict[str, list[str]]:
    """Where a key that was written at the wrong level belongs: lr -> local.lr, local.rounds -> rounds."""
    places = {name: [name] for name in Experiment.model_fields}
    for section in ("local", "data", "server", "evaluate", "forgetting", "checkpoint"):
        model = Experiment.model_fields[section].annotation
        for name in getattr(model, "model_fields", ()):
            places.setdefault(name, []).append(f"{section}.{name}")
    return {**places, "clients": ["partition.clients"], "alpha": ["partition.alpha"], "kind": ["partition.kind"]}

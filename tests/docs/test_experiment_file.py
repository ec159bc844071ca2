"""The page of the experiment file against the code: every key with its default, and no key that does not exist."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pydantic
import pytest
import yaml

from fedretain.components import parameters
from fedretain.config import (
    LOSS_SUPPLIED,
    PARTITION_SUPPLIED,
    Experiment,
    flatten,
    make_experiment,
    read_experiment,
)
from fedretain.config.settings import Section
from fedretain.data.partition import PARTITIONS
from fedretain.errors import ConfigError
from fedretain.losses import LOSSES
from fedretain.methods import METHODS
from fedretain.models import MODELS
from fedretain.models import SUPPLIED as MODEL_SUPPLIED

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "experiment-file.md").read_text(encoding="utf-8")
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]

NAMED = ("model", "loss", "method")
TABLES: Mapping[str, tuple[Mapping[str, Any], tuple[str, ...]]] = {
    "partition": (PARTITIONS, PARTITION_SUPPLIED),
    "model": (MODELS, MODEL_SUPPLIED),
    "loss": (LOSSES, LOSS_SUPPLIED),
    "method": (METHODS, ()),
}


def sections() -> dict[str, type[pydantic.BaseModel]]:
    """The sections with keys of their own (not the named components)."""
    found = {}
    for name, field in Experiment.model_fields.items():
        annotation = field.annotation
        if name not in NAMED and inspect.isclass(annotation) and issubclass(annotation, pydantic.BaseModel):
            found[name] = annotation
    return found


def keys() -> dict[str, Any]:
    """Every key that is no component's own parameter, with its type."""
    found: dict[str, Any] = {}
    for name, field in Experiment.model_fields.items():
        if name in NAMED:
            found[f"{name}.name"] = str
        elif name in sections():
            found |= {f"{name}.{key}": inner.annotation for key, inner in sections()[name].model_fields.items()}
        else:
            found[name] = field.annotation
    return found


def documented() -> dict[str, tuple[str, str]]:
    """The rows with four cells: key, type, default, meaning."""
    rows = re.findall(r"^\| `([\w.]+)` \| (.+?) \| (.+?) \| .+ \|$", PAGE, re.MULTILINE)
    assert len(rows) == len({row[0] for row in rows}), "a key is documented twice"
    return {key: (kind, default) for key, kind, default in rows}


def component_rows(section: str) -> dict[str, dict[str, Any]]:
    """The rows with three cells of a section: name, parameters (default), what it is."""
    text = PAGE.split(f"\n## `{section}`\n")[1].split("\n## ")[0]
    table = text.split("parameters (default)")[1]
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| .+ \|$", table, re.MULTILINE)
    return {name: dict(re.findall(r"`(\w+)` \((required|`[^`]*`)\)", cell)) for name, cell in rows}


def test_there_are_sections_to_check() -> None:
    assert {"data", "local", "server", "partition"} <= sections().keys()
    assert all(issubclass(section, Section) for name, section in sections().items() if name != "partition")


def test_every_key_is_documented_and_no_other() -> None:
    assert documented().keys() == keys().keys() | {"variants"}


@pytest.mark.parametrize("key", sorted(keys()))
def test_the_documented_default_is_the_one_in_config_yaml(key: str) -> None:
    cell = documented()[key][1]
    assert re.fullmatch(r"`[^`]+`", cell), "a default stands in backquotes"
    given, expected = yaml.safe_load(cell.strip("`")), flatten(make_experiment({}).as_dict())[key]
    assert (given, type(given)) == (expected, type(expected))


def choices(kind: Any) -> list[str]:
    """The values of a ``Literal``, or of one that may be left out."""
    literals = [part for part in (kind, *get_args(kind)) if get_origin(part) is Literal]
    return [value for literal in literals for value in get_args(literal)]


@pytest.mark.parametrize("key", sorted(key for key, kind in keys().items() if choices(kind)))
def test_the_documented_choices_are_all_there_are(key: str) -> None:
    assert re.findall(r"`([^`]+)`", documented()[key][0]) == choices(keys()[key])


@pytest.mark.parametrize("section", ["partition", "model"])
def test_the_tables_of_components_are_complete(section: str) -> None:
    """Every name, each with its parameters and defaults; tuples are lists in YAML."""
    table, supplied = TABLES[section]
    expected = {
        name: {
            p.name: "required" if p.required else list(p.default) if isinstance(p.default, tuple) else p.default
            for p in parameters(factory, supplied)
        }
        for name, factory in table.items()
    }
    found = {
        name: {key: cell if cell == "required" else yaml.safe_load(cell.strip("`")) for key, cell in row.items()}
        for name, row in component_rows(section).items()
    }
    assert found == expected


def test_mistakes_are_answered_as_shown() -> None:
    shown = re.findall(r"^\$ fedretain run experiment.yaml (\S+)\nerror: (.+)$", PAGE, re.MULTILINE)
    assert shown
    for override, message in shown:
        with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
            make_experiment(read_experiment({}, [override]))


def test_the_defaults_of_a_dirichlet_partition_are_the_ones_named() -> None:
    chosen = make_experiment({}).partition.parameters
    assert f"`clients` is {chosen['clients']} and `alpha` {chosen['alpha']} unless given" in PAGE


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_names_a_key_that_does_not_exist(page: Path) -> None:
    """A dotted key such as ``local.lr`` (or ``local.lr=0.1``, ``local.lr: 0.1``) in backquotes."""
    heads = "|".join([*sections(), *NAMED])
    own = {
        f"{head}.{p.name}"
        for head, (table, skip) in TABLES.items()
        for f in table.values()
        for p in parameters(f, skip)
    }
    named = re.findall(
        rf"`((?:{heads})\.(?!(?:py|md|npz|json|html)`)\w+)(?:[=:][^`]*)?`", page.read_text(encoding="utf-8")
    )
    assert set(named) <= keys().keys() | own

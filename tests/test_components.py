"""Components: their parameters are read off their signatures, never declared twice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

import fedretain
from fedretain.catalogue import available
from fedretain.components import check_fields, complete, find, help_line, parameters
from fedretain.engines.native.building import library
from fedretain.errors import ConfigError
from fedretain.methods import METHODS
from fedretain.models import MODELS


def pooled(
    labels: object,
    *,
    clients: Annotated[int, Field(ge=1)],
    kind: Literal["a", "b"] = "a",
    sizes: tuple[int, ...] | None = None,
) -> None:
    """The first line.

    Not this one.
    """


@dataclass(frozen=True)
class Point:
    """A frozen dataclass."""

    x: Annotated[float, Field(gt=0)] = 1.0


def test_parameters_are_those_of_the_signature() -> None:
    found = parameters(pooled, skip=("labels",))
    assert [(p.name, p.required) for p in found] == [("clients", True), ("kind", False), ("sizes", False)]
    assert help_line(pooled) == "The first line."


def test_complete_writes_out_defaults() -> None:
    assert complete("p", pooled, {"clients": 3}, ("labels",)) == {"clients": 3, "kind": "a", "sizes": None}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "p.clients: missing, and it has no default"),
        ({"clients": 0}, "p.clients: must be greater than or equal to 1 (given: 0)"),
        ({"clients": True}, "p.clients: a number or text is expected here, not true/false"),
        ({"client": 1}, "unknown key 'p.client'; did you mean 'p.clients'?"),
        ({"clients": 1, "kind": "c"}, "p.kind: must be 'a' or 'b'"),
        ({"clients": 1, "sizes": 3}, "p.sizes: must be a list, such as [a, b] (given: 3)"),
        ({"clients": 1, "labels": 3}, "unknown key 'p.labels'"),
    ],
)
def test_wrong_parameters(given: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        complete("p", pooled, given, ("labels",))
    assert words in str(error.value)


def test_fields_of_a_dataclass_are_checked_and_converted() -> None:
    point = Point(2)
    check_fields(point)
    assert isinstance(point.x, float)
    with pytest.raises(ConfigError, match=r"point\.x: must be greater than 0 \(given: -1\)"):
        check_fields(Point(-1))


def test_find_by_name_or_import_path() -> None:
    assert find("model", MODELS, "mlp") is MODELS["mlp"]
    assert find("method", METHODS, "fedretain.methods:FedAvg") is METHODS["fedavg"]
    for name, words in (
        ("mpl", "did you mean 'mlp'"),
        ("no_such:Net", "cannot be imported"),
        ("os:nothing", "cannot be imported"),
        (":x", "cannot be imported"),
        ("os:sep", "is no function or class but str"),
    ):
        with pytest.raises(ConfigError, match=words):
            find("model", MODELS, name)


@pytest.mark.parametrize("kind", ["methods", "losses", "models", "datasets", "partitions"])
def test_everything_that_can_be_named_has_a_line_of_help(kind: str) -> None:
    entries = available(kind)
    assert entries
    for entry in entries:
        assert entry.help, f"{kind}: {entry.name} has no help"


def test_parameters_are_shown_in_words() -> None:
    mlp, resnet = ({e.name: e for e in available("models")}[name] for name in ("mlp", "resnet18"))
    assert mlp.parameters == ["hidden: list of int > 0 ((64,))"]
    assert "norm: batch | group | layer | mixed ('batch')" in resnet.parameters
    dirichlet = {e.name: e for e in available("partitions")}["dirichlet"]
    assert "alpha: float > 0 (required)" in dirichlet.parameters


def test_unknown_kind_of_component() -> None:
    with pytest.raises(ConfigError, match="did you mean 'models'"):
        available("modells")


def test_doctor_finds_the_core() -> None:
    findings = {f.name: f for f in fedretain.doctor()}
    assert findings["fedretain"].detail == fedretain.__version__
    assert findings["torch"].good
    assert findings["cpu"].good
    assert {"hub", "mnist", "cache"} <= findings.keys()


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("CC", "no-such-compiler", "no C compiler"),
        ("CC", "false", "false cannot make them"),
        ("FEDRETAIN_NATIVE", "0", "kept out by FEDRETAIN_NATIVE=0"),
    ],
)
def test_doctor_says_why_there_are_no_kernels(
    name: str, value: str, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FEDRETAIN_CACHE", str(tmp_path))
    monkeypatch.delenv("FEDRETAIN_NATIVE", raising=False)
    monkeypatch.setenv(name, value)
    library.cache_clear()
    try:
        (finding,) = [f for f in fedretain.doctor() if f.name == "c kernels"]
    finally:
        library.cache_clear()
    assert not finding.good
    assert finding.detail.startswith(why)

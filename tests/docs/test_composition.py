"""The page of compositions against the code: its table is the one that the code makes."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fedretain.composition import BEGIN, END, EXAMPLES, adaptations, composition_table, refusal, with_table
from fedretain.errors import ConfigError
from fedretain.methods import METHODS, FedAvg, FedNova, FedProx, FedReg, Method

PAGE = Path(__file__).parents[2] / "docs" / "composition.md"

FOLDS = ("direction", "upload", "weigh", "local")
"""Hooks that pass from one member of a chain to the next, so that their order matters."""


def cells(table: str) -> dict[tuple[str, str], str]:
    rows = [[cell.strip(" `") for cell in row.split("|")[1:-1]] for row in table.split("\n\n")[0].splitlines()]
    return {(row[0], column): cell for row in rows[2:] for column, cell in zip(rows[0][1:], row[1:], strict=True)}


def notes(table: str) -> dict[str, str]:
    rows = table.strip().split("\n\n")[1].splitlines()[2:]
    return {number.strip(): text.strip() for number, text in (row.strip("|").split("|") for row in rows)}


def test_the_page_holds_the_table_that_the_code_makes() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert composition_table() in page
    assert with_table(page) == page, "make it anew: python -m fedretain.composition docs/composition.md"


def test_every_method_has_an_example_of_itself() -> None:
    assert {name: type(method) for name, method in EXAMPLES.items()} == dict(METHODS)


@pytest.mark.parametrize("pair", list(itertools.product(METHODS, repeat=2)), ids="+".join)
def test_a_cell_says_what_chaining_does(pair: tuple[str, str]) -> None:
    """✓ without an error; ✗ with a number whose note is the reason that the error gives."""
    cell = cells(composition_table())[pair]
    reason = refusal(*(EXAMPLES[name] for name in pair))
    assert cell.startswith("✗" if reason else "✓")
    if reason:
        assert notes(composition_table())[cell.split()[1]] == reason


def test_known_cells() -> None:
    table = composition_table()
    assert cells(table)["fedprox", "fedwavg"] == "✓"
    assert cells(table)["fedreg", "fedprox"].startswith("✗")
    number = cells(table)["fednova", "fedprox"].removeprefix("✓ ")
    assert notes(table)[number] == "fednova sets its proximal to 0.1, taken from the other"
    assert adaptations(FedProx(0.1), FedAvg()) == []


@pytest.mark.parametrize("three", list(itertools.combinations(METHODS, 3)), ids="+".join)
def test_three_compose_when_each_two_of_them_do(three: tuple[str, ...]) -> None:
    members = [EXAMPLES[name] for name in three]
    pairs = [refusal(*pair) for pair in itertools.combinations(members, 2)]
    assert (refusal(*members) is None) == (pairs == [None] * 3)


@pytest.mark.parametrize("hook", FOLDS)
def test_no_two_built_in_methods_change_a_hook_whose_order_matters(hook: str) -> None:
    assert sum(method.uses(hook) for method in EXAMPLES.values()) == 1


def test_a_method_of_ones_own_and_reasons_in_other_words() -> None:
    """A refusal in ``beside`` that does not use chain's words is told whole."""

    @dataclass(frozen=True)
    class Alone(Method):
        def beside(self, others: Any) -> Method:
            if others:
                raise ConfigError("alone wants no company")
            return self

    table = composition_table({"fedreg": FedReg(gamma=0.4, eta_s=0.1), "alone": Alone(), "fednova": FedNova()})
    assert cells(table)["alone", "fedreg"] == "✗ 2"
    assert notes(table)["2"] == "alone wants no company"


def test_the_command_makes_the_table_anew(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"above\n\n{BEGIN}\nan old table\n{END}\n\nbelow\n", encoding="utf-8")
    subprocess.run([sys.executable, "-m", "fedretain.composition", str(page)], check=True)
    assert page.read_text(encoding="utf-8") == f"above\n\n{BEGIN}\n\n{composition_table()}\n{END}\n\nbelow\n"
    with pytest.raises(ConfigError, match="no table to replace"):
        with_table("a page without markers")

"""The page of the architecture against the code: hooks, fields and modules are those that exist."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import fedretain
from fedretain.config.settings import NOT_DECIDING
from fedretain.methods import Aggregate, Method, Own, Received, Task

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_hooks() -> None:
    """Every public function or property of Method but its name and ``uses``, with its arguments."""
    hooks = {}
    for name, hook in vars(Method).items():
        if isinstance(hook, property):
            hooks[name] = ""
        elif inspect.isfunction(hook) and not name.startswith("_"):
            hooks[name] = ", ".join(list(inspect.signature(hook).parameters)[1:])
    del hooks["name"], hooks["uses"]
    table = PAGE.split("| hook | where |")[1].split("\n\n")[0]
    assert dict(re.findall(r"^\| `(\w+)(?:\((.*?)\))?` \|", table, re.MULTILINE)) == hooks


def test_received_and_own() -> None:
    table = PAGE.split("| `Received`: ")[1].split("\n\n")[0].split("| --- | --- |\n")[1]
    rows = [line.strip("|").split("|") for line in table.splitlines()]
    for fields, column in ((Received._fields, 0), (Own._fields, 1)):
        assert {name for row in rows for name in re.findall(r"`(\w+)`", row[column])} - {"prepare"} == set(fields)


def test_modules() -> None:
    package = Path(fedretain.__file__).parent
    table = PAGE.split("| module | what it is |")[1].split("\n\n")[0]
    named = {
        name for cell in re.findall(r"^\| (`.+?) \|", table, re.MULTILINE) for name in re.findall(r"`(.+?)`", cell)
    }
    folders = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    files = {path.name for path in package.glob("*.py")} - {"__init__.py", "version.py"}
    assert named == folders | files


def test_task() -> None:
    """Every member of Task, with the arguments of those that are functions."""
    members = {name: member for name, member in vars(Task).items() if not name.startswith("_")}
    expected = {
        name: ", ".join(list(inspect.signature(member).parameters)[1:]) if inspect.isfunction(member) else ""
        for name, member in members.items()
    }
    table = PAGE.split("| of `Task` | what |")[1].split("\n\n")[0]
    assert dict(re.findall(r"^\| `(\w+)(?:\((.*?)\))?` \|", table, re.MULTILINE)) == expected


def test_aggregate() -> None:
    table = PAGE.split("| of `Aggregate` | what |")[1].split("\n\n")[0]
    cells = re.findall(r"^\| (`.+?) \|", table, re.MULTILINE)
    assert [name for cell in cells for name in re.findall(r"`(\w+)`", cell)] == list(Aggregate._fields)


@pytest.mark.parametrize("page", ["architecture.md", "run-directory.md"])
def test_keys_that_may_change_on_resume(page: str) -> None:
    """The sentence before 'may change' or after 'all keys but' names them all, and no other."""
    text = " ".join((ROOT / "docs" / page).read_text(encoding="utf-8").split())
    found = re.search(r"decided by all keys but (.*?)\. |- (`rounds` may be raised.*?) may change too", text)
    assert found
    assert set(re.findall(r"`([\w.]+)`", found[1] or found[2])) == set(NOT_DECIDING)


def test_the_guide_to_methods_names_every_hook() -> None:
    guide = (ROOT / "docs" / "write-a-method.md").read_text(encoding="utf-8")
    table = guide.split("| when | hooks |")[1].split("\n\n")[0]
    hooks = {name for name in vars(Method) if not name.startswith("_")} - {"name", "uses"}
    assert set(re.findall(r"`(\w+)`", table)) == hooks

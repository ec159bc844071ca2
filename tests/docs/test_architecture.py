"""The page of the architecture against the code: hooks, fields and modules are those that exist."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import fedretain
from fedretain.losses import LOSSES
from fedretain.methods import Method, Own, Received

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


def test_losses_and_methods_names_every_loss() -> None:
    page = (ROOT / "docs" / "losses-and-methods.md").read_text(encoding="utf-8")
    table = page.split("| `loss` | formula |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(LOSSES)

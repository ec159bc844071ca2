"""The blocks of the documentation: YAML validates, Python compiles, and what is marked to run prints as said."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from fedretain.config import expand_variants
from fedretain.config.reading import read_yaml

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]

BLOCK = re.compile(r"(?:^<!-- ([^\n]+?) -->\n\n?)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SAID = re.compile(r"^ *print\(.*\)  # (.+)$", re.MULTILINE)


class Block(NamedTuple):
    mark: str
    language: str
    text: str
    line: int


def blocks_of(text: str) -> list[Block]:
    return [Block(m[1] or "", m[2], m[3], text.count("\n", 0, m.start(3))) for m in BLOCK.finditer(text)]


def test_blocks_are_found_with_mark_language_and_place() -> None:
    text = (
        "<!-- run -->\n```python\nx = 1\n```\n```yaml\nseed: 1\n```\n\n<!-- file: a.py -->\n\n```python\ny = 2\n```\n"
    )
    assert blocks_of(text) == [
        Block("run", "python", "x = 1\n", 2),
        Block("", "yaml", "seed: 1\n", 5),
        Block("file: a.py", "python", "y = 2\n", 11),
    ]


def test_the_documentation_has_blocks_of_every_kind() -> None:
    blocks = [block for page in PAGES for block in blocks_of(page.read_text(encoding="utf-8"))]
    assert {"python", "yaml", "bash"} <= {block.language for block in blocks}
    assert {"", "run"} <= {block.mark for block in blocks}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page(page: Path, workshop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Blocks of one page run in order and see each other's names."""
    blocks = blocks_of(page.read_text(encoding="utf-8"))
    for block in blocks:
        if block.mark.startswith("file: "):
            (workshop / block.mark.removeprefix("file: ")).write_text(block.text, encoding="utf-8")
    importlib.invalidate_caches()
    names: dict[str, object] = {"__name__": "documentation"}
    for block in blocks:
        assert block.mark in ("", "run") or re.fullmatch(r"file: \w+\.py", block.mark), f"unknown mark {block.mark!r}"
        if block.language in ("yaml", "yml"):
            file = workshop / "experiment.yaml"
            file.write_text(block.text, encoding="utf-8")
            assert expand_variants(read_yaml(file)), f"line {block.line}"
        elif block.language == "python":
            # Empty lines in front, so that a traceback shows the line of the page.
            code = compile("\n" * block.line + block.text, str(page), "exec", dont_inherit=True)
            if block.mark == "run":
                capsys.readouterr()
                exec(code, names)
                assert capsys.readouterr().out.splitlines() == SAID.findall(block.text), f"line {block.line}"
        else:
            assert block.mark == "", f"line {block.line}: a mark above a block that is no Python"

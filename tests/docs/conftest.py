"""A folder to try the pages in, and the files that a page tells its reader to write."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
FILE = re.compile(r"^<!-- file: (\w+\.py) -->\n\n?```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder to work in; modules written there can be imported, and are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def write_files(workshop: Path) -> Callable[[str], dict[str, str]]:
    """Write the files of a page into the workshop; returns their texts by name."""

    def write(page: str) -> dict[str, str]:
        found = dict(FILE.findall((DOCS / page).read_text(encoding="utf-8")))
        for name, text in found.items():
            (workshop / name).write_text(text, encoding="utf-8")
        importlib.invalidate_caches()
        return found

    return write

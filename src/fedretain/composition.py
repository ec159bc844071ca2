"""Which methods compose: every ordered pair is really chained, and the outcome told in a Markdown table.

``python -m fedretain.composition docs/composition.md`` writes the table anew between the markers of the page.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType

from fedretain.errors import ConfigError
from fedretain.files import write_atomically
from fedretain.methods import FedAvg, FedCurv, FedNova, FedProx, FedReg, FedSGD, FedWAvg, Method, Scaffold, chain
from fedretain.methods.chain import parts

EXAMPLES: Mapping[str, Method] = MappingProxyType(
    {
        "fedavg": FedAvg(),
        "fedsgd": FedSGD(),
        "fedprox": FedProx(mu=0.1),
        "scaffold": Scaffold(),
        "fednova": FedNova(),
        "fedcurv": FedCurv(lam=0.1),
        "fedreg": FedReg(gamma=0.4, eta_s=0.1),
        "fedwavg": FedWAvg(alpha=0.3),
    }
)
"""Every built-in method with hyper-parameters that it accepts."""

BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


def refusal(*methods: Method) -> str | None:
    """Why ``chain`` refuses these methods, or None when it takes them."""
    try:
        chain(*methods)
    except ConfigError as error:
        _, _, reason = str(error).partition(" cannot be chained: ")
        return reason or str(error)
    return None


def adaptations(first: Method, second: Method) -> list[str]:
    """What the members of an allowed pair change in themselves because of each other."""
    changed = []
    for alone, chained in zip((first, second), parts(chain(first, second)), strict=True):
        new = [(f.name, getattr(chained, f.name)) for f in fields(alone)]
        new = [(name, value) for name, value in new if value != getattr(alone, name)]
        changed += [f"{alone.name} sets its {name} to {value!r}, taken from the other" for name, value in new]
    return changed


def composition_table(methods: Mapping[str, Method] = EXAMPLES) -> str:
    """Row: the first of the chain; column: the second. ✓ composes, ✗ is refused; the numbers lead to the reasons."""
    notes: dict[str, int] = {}
    rows = []
    for name, first in methods.items():
        cells = []
        for second in methods.values():
            reason = refusal(first, second)
            told = [reason] if reason else adaptations(first, second)
            numbers = [str(notes.setdefault(text, len(notes) + 1)) for text in told]
            cells.append(" ".join(["✗" if reason else "✓", *numbers]))
        rows.append(f"| `{name}` | {' | '.join(cells)} |")
    head = f"| | {' | '.join(f'`{name}`' for name in methods)} |"
    rule = "| --- " * (len(methods) + 1) + "|"
    listed = [f"| {number} | {text} |" for text, number in notes.items()]
    return "\n".join([head, rule, *rows, "", "| note | |", "| --- | --- |", *listed]) + "\n"


def with_table(page: str) -> str:
    """The page with the table between its markers made anew."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ConfigError(f"the page has no table to replace: put {BEGIN} and {END} on lines of their own")
    return f"{before}{BEGIN}\n\n{composition_table()}\n{END}{after}"


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        write_atomically(path, with_table(path.read_text(encoding="utf-8")).encode())

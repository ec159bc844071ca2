"""One self-contained HTML page from titled sections of figures: no network, opens from the file system."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedretain.errors import RunError
from fedretain.files import write_atomically
from fedretain.report.figures import escape, graph_objects

# Nothing may be fetched, whatever text a run put into the page; plotly draws heatmaps through data: images.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


@dataclass(frozen=True)
class Section:
    """A heading, HTML below it, then figures two abreast, each with a button that saves its data.

    Figures with frames share one round slider.
    """

    title: str
    figures: tuple[Any, ...] = ()
    html: str = ""
    wide: bool = False


def paragraph(text: str, style: str = "") -> str:
    """One paragraph of plain text; ``style`` is a class of style.css."""
    return f'<p class="{style}">{escape(text)}</p>' if style else f"<p>{escape(text)}</p>"


def folded(title: str, text: str) -> str:
    """Preformatted text behind a heading that opens on a click."""
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], style: str = "") -> str:
    """A table that scrolls sideways on a narrow screen; cells are finished ``<td>`` or ``<th>`` elements.

    Numbers stand right-aligned; the style ``text`` aligns everything left.
    """
    titles = "".join(f'<th scope="col">{escape(title)}</th>' for title in head)
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    content = f"<thead><tr>{titles}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll"><table class="{style}">{content}</table></div>'


def numbers(entries: Sequence[tuple[str, str]]) -> str:
    """The headline numbers as a row of tiles."""
    tiles = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in entries)
    return f'<dl class="numbers">{tiles}</dl>'


def write_page(out: str | Path, title: str, introduction: str, sections: Sequence[Section]) -> Path:
    """Write the page; readers see the old file or the whole new one, never a part."""
    out = Path(out)
    content = _render(title, introduction, sections).encode()
    try:
        write_atomically(out, content)
    except OSError as error:
        raise RunError(f"the report {out} cannot be written: {error}; free some space or give another path") from error
    return out


def _render(title: str, introduction: str, sections: Sequence[Section]) -> str:
    graph_objects()  # says how to install plotly where it is missing
    from plotly.offline import get_plotlyjs

    body, specs = lay_out(sections)
    here = files("fedretain.report")
    # Inside <script> only "<" could end the element; JSON lets it be written as an escape.
    data = json.dumps(specs, separators=(",", ":")).replace("<", "\\u003c")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="fedretain">
<title>{escape(title)}</title>
<style>
{here.joinpath("style.css").read_text(encoding="utf-8")}</style>
</head>
<body>
<h1>{escape(title)}</h1>
{introduction}
{body}
<script type="application/json" id="figures">{data}</script>
<script>{get_plotlyjs()}</script>
<script>
{here.joinpath("page.js").read_text(encoding="utf-8")}</script>
</body>
</html>
"""


def lay_out(sections: Sequence[Section]) -> tuple[str, list[dict[str, Any]]]:
    """The sections as HTML, and the figures that page.js draws into it, as plotly's JSON."""
    specs: list[dict[str, Any]] = []
    return "".join(_section(section, specs) for section in sections), specs


def _section(section: Section, specs: list[dict[str, Any]]) -> str:
    charts = "".join(_chart(figure, section, specs) for figure in section.figures)
    rounds = sorted({int(frame.name) for figure in section.figures for frame in figure.frames})
    parts = [f"<section><h2>{escape(section.title)}</h2>", section.html]
    if rounds:
        parts.append(
            f'<label class="slider" data-rounds="{json.dumps(rounds)}">Round '
            f'<input type="range" min="0" max="{len(rounds) - 1}" value="{len(rounds) - 1}">'
            f"<output>{rounds[-1]}</output></label>"
        )
    if charts:
        parts.append(f'<div class="charts">{charts}</div>')
    return "\n".join([*parts, "</section>"])


def _chart(figure: Any, section: Section, specs: list[dict[str, Any]]) -> str:
    """The figure's place in the page; its title becomes the caption, which can wrap on a narrow screen."""
    spec = json.loads(figure.to_json())
    layout = spec["layout"]
    caption = layout.pop("title")["text"]  # escaped by the figure
    layout["margin"]["t"] = 15
    specs.append(spec)
    style = ' class="wide"' if section.wide else ""
    number = len(specs) - 1
    return (
        f'<figure{style}><figcaption id="caption-{number}">{caption}</figcaption>'
        f'<div class="chart" data-figure="{number}" style="height:{layout["height"]}px"></div>'
        f'<button type="button" class="data" aria-describedby="caption-{number}">Download data (CSV)</button></figure>'
    )

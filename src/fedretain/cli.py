"""The command line: parses, calls the Python API, prints. No logic of its own."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import fedretain
from fedretain.config import Experiment, Variant
from fedretain.errors import ConfigError, FedretainError
from fedretain.runs.metrics import Row

app = typer.Typer(
    help="Federated learning that measures what a model forgets and stops it from forgetting.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
out = Console()
err = Console(stderr=True)

ExperimentFile = Annotated[Path, typer.Argument(metavar="EXPERIMENT.yaml", help="The experiment file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace those of the file."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")]


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    if version:
        out.print(fedretain.__version__, highlight=False)
        raise typer.Exit


@app.command()
def run(
    experiment: ExperimentFile,
    overrides: Overrides = None,
    directory: Annotated[
        Path | None, typer.Option("--out", help="The run directory (default: a new one below runs/).")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an earlier run stopped.")] = False,
    quiet: Quiet = False,
) -> None:
    """Run one experiment."""
    with _progress(quiet) as bar:
        done = fedretain.run(experiment, out=directory, resume=resume, overrides=overrides or [], watch=bar.watch)
    summary = done.summary
    table = Table("final accuracy", "mean of last 100", "top", "client forgetting", "forgettable examples", "seconds")
    accuracy = summary["final_accuracy"]
    table.add_row(
        *(f"{accuracy[key]:.3f}" for key in ("last", "mean_last_100", "top")),
        _number(summary["mean_forgetting"], ".3f"),
        _number(summary["forgettable_examples"], ".1f"),
        f"{summary['seconds']:.1f}",
    )
    out.print(table)
    _say_where(done.path)


@app.command()
def compare(
    experiment: ExperimentFile,
    overrides: Overrides = None,
    directory: Annotated[
        Path | None, typer.Option("--out", help="Where the variants' runs go (default: runs/NAME).")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Run every variant of an experiment and compare them; finished ones are not done again."""
    with _progress(quiet) as bar:
        comparison = fedretain.compare(
            experiment, out=directory, overrides=overrides or [], watch=bar.watch, begin=bar.begin
        )
    if comparison.runs:
        from fedretain.report import COLUMNS

        table = Table("", *(column.title for column in COLUMNS), "seeds")
        for row in comparison.rows:
            cells = []
            for column in COLUMNS:
                text = column.text(row[column.key])
                cells.append(f"[bold]{text}[/bold]" if column.key in row["best"] else text)
            table.add_row(row["label"], *cells, str(len(row["seeds"])))
        out.print(table)
    _say_where(comparison.path)
    if comparison.failures:
        for failure in comparison.failures:
            err.print(f"[red]failed:[/red] {failure.variant}: {failure.reason}", highlight=False)
        raise typer.Exit(1)


@app.command()
def partition(
    experiment: ExperimentFile,
    overrides: Overrides = None,
    picture: Annotated[Path, typer.Option("--out", help="Where the stacked-bar picture goes.")] = Path(
        "partition.html"
    ),
    rows: Annotated[int, typer.Option(help="How many clients the table shows.")] = 20,
) -> None:
    """Show who holds what: a table, and a picture with a bar per client."""
    shares = fedretain.partition(experiment, overrides=overrides or [])
    table = Table("client", "train", "validation", *shares.class_names, title=shares.title)
    for client in range(min(rows, shares.clients)):
        counts = [str(count) if count else "·" for count in shares.class_counts[client].tolist()]
        table.add_row(str(client), str(shares.train_sizes[client]), str(shares.validation_sizes[client]), *counts)
    out.print(table)
    if shares.clients > rows:
        out.print(f"… and {shares.clients - rows} more clients (--rows {shares.clients} shows all)")
    out.print(f"picture: {shares.write_picture(picture)}", highlight=False, soft_wrap=True)


@app.command("list")
def list_components(
    kind: Annotated[str, typer.Argument(metavar="methods|losses|models|datasets|partitions")],
) -> None:
    """List what can be named in an experiment file, with parameters and defaults."""
    table = Table("name", "what it is", "parameters (default)", show_lines=False)
    for entry in fedretain.available(kind):
        table.add_row(entry.name, entry.help, "\n".join(entry.parameters) or "–")
    out.print(table)


@app.command()
def doctor() -> None:
    """Say what is installed and found."""
    table = Table("", "", "found", "detail")
    for finding in fedretain.doctor():
        table.add_row(finding.topic, finding.name, "yes" if finding.good else "no", finding.detail)
    out.print(table)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")],
    page: Annotated[Path, typer.Option("--out", help="The page to write.")] = Path("report.html"),
) -> None:
    """Make one self-contained page of one run, or of several side by side."""
    from fedretain.report import write_report

    out.print(f"report: {write_report(runs, page)}", highlight=False, soft_wrap=True)


class _Bar:
    """A progress bar that follows one run after another."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.task: Any = None
        self.label = ""

    def begin(self, variant: Variant, number: int, total: int) -> None:
        """The next variant starts."""
        self.label = f"[{number + 1}/{total}] {variant.name}"
        self._add(variant.experiment)

    def watch(self, experiment: Experiment, row: Row) -> None:
        """A round ended."""
        if self.task is None:
            self.label = experiment.name
            self._add(experiment)
        shown = f"accuracy {row['test_accuracy']:.3f}" if "test_accuracy" in row else ""
        self.progress.update(self.task, completed=row["round"], note=shown)

    def _add(self, experiment: Experiment) -> None:
        self.task = self.progress.add_task(self.label, total=experiment.rounds, note="")


@contextmanager
def _progress(quiet: bool) -> Iterator[_Bar]:
    """The bar; Ctrl-C and a polite kill stop after the last finished round, which is saved."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, stop)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
    )
    try:
        with Progress(*columns, console=err, disable=quiet) as progress:
            yield _Bar(progress)
    except KeyboardInterrupt:
        err.print(
            "stopped; the finished rounds are saved. The same command with --resume goes on (compare always does)."
        )
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGTERM, previous)


def _say_where(path: Path) -> None:
    page = path / "report.html"
    if page.exists():
        out.print(f"report: {page.resolve()}", highlight=False, soft_wrap=True)
    else:
        out.print(
            f"run: {path.resolve()} (no report.html: pip install plotly, then 'fedretain report {path}')",
            highlight=False,
            soft_wrap=True,
        )


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def main() -> None:
    """Entry point: an error that the user can act on is one message and a non-zero exit."""
    sys.path.insert(0, str(Path.cwd()))  # so that an experiment can name a method in a file beside it
    try:
        app()
    except FedretainError as error:
        err.print("[bold red]error:[/bold red]", str(error), highlight=False, soft_wrap=True, markup=True)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


if __name__ == "__main__":
    main()

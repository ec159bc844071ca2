"""The command line: parses, calls the Python API, prints. No logic of its own."""

from __future__ import annotations

import logging
import math
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import fedretain
from fedretain.compare import Comparison
from fedretain.config import Experiment, Variant, read_experiment
from fedretain.errors import ConfigError, FedretainError
from fedretain.printing import cost_words, rounds_to_words, summaries_table, training_table
from fedretain.runs.metrics import Row
from fedretain.shares import Shares

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
    _say(rounds_to_words(done))
    _say(cost_words(summary["cost"]))
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
            experiment, out=directory, overrides=overrides or [], watch=bar.watch, begin=bar.begin, end=bar.end
        )
    if comparison.runs:
        out.print(_comparison_table(comparison))
        out.print(summaries_table(comparison))
        if pairs := comparison.training_pairs:
            out.print(training_table(pairs))
        _say_where(comparison.path)
    if comparison.failures:
        for failure in comparison.failures:
            _complain("failed:", f"{failure.variant}: {failure.reason}")
        raise typer.Exit(1)


@app.command()
def partition(
    experiment: ExperimentFile,
    overrides: Overrides = None,
    picture: Annotated[Path, typer.Option("--out", help="Where the stacked-bar picture goes.")] = Path(
        "partition.html"
    ),
    rows: Annotated[int, typer.Option(min=0, help="How many clients the table shows.")] = 20,
) -> None:
    """Show who holds what: a table, and a picture with a bar per client."""
    shares = fedretain.partition(experiment, overrides=overrides or [])
    out.print(_shares_table(shares, rows))
    if shares.clients > rows:
        out.print(f"… and {shares.clients - rows} more clients (--rows {shares.clients} shows all)")
    _say(f"picture: {shares.write_picture(picture)}")


@app.command("list")
def list_components(
    kind: Annotated[str, typer.Argument(metavar="methods|losses|models|datasets|partitions")],
) -> None:
    """List what can be named in an experiment file, with parameters and defaults."""
    table = Table("name", "what it is", "parameters (default)", show_lines=False)
    for entry in fedretain.available(kind):
        table.add_row(*map(escape, (entry.name, entry.help, "\n".join(entry.parameters) or "–")))
    out.print(table)


@app.command()
def doctor() -> None:
    """Say what is installed and found."""
    table = Table("", "", "found", "detail")
    for finding in fedretain.doctor():
        table.add_row(finding.topic, finding.name, "yes" if finding.good else "no", escape(finding.detail))
    out.print(table)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")],
    page: Annotated[Path, typer.Option("--out", help="The page to write.")] = Path("report.html"),
    pictures: Annotated[
        Path | None,
        typer.Option("--png", metavar="DIR", help="Also write each picture as PNG and vector PDF into this folder."),
    ] = None,
) -> None:
    """Make one self-contained page of one run, or of several side by side; with --png also pictures for a paper."""
    from fedretain.report import write_pictures, write_report

    if pictures is not None:
        written = write_pictures(runs, pictures)
        _say(f"pictures: {len(written)} files in {pictures}" if written else "pictures: none, nothing was measured yet")
    _say(f"report: {write_report(runs, page)}")


@app.command()
def track(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")],
    to: Annotated[
        list[str] | None,
        typer.Option(metavar="TRACKER", help="A tracker, or '{name: mlflow, uri: …}'; default: those of the run."),
    ] = None,
) -> None:
    """Send the metrics of runs to TensorBoard, MLflow or W&B, afterwards or once more."""
    targets = read_experiment({}, [f"track=[{', '.join(to)}]"])["track"] if to else None
    for directory in runs:
        fedretain.track(directory, targets)
        _say(f"sent: {directory}")


@app.command()
def board(
    folder: Annotated[Path, typer.Argument(metavar="RUNS_DIR", help="The folder that holds run directories.")],
    host: Annotated[str, typer.Option(help="The address to listen on; the default is seen by this machine alone.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="The port; 0 takes a free one.")] = 8100,
    browser: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a web browser.")] = False,
) -> None:
    """Show the runs below a folder in a local web page: follow those that train, compare any of them."""
    from fedretain.board import open_board

    ready = open_board(folder, host=host, port=port)
    if ready.exposed:
        _complain("warning:", f"--host {host}: whoever reaches this machine can read these runs; there is no password")
    _say(f"board: {ready.address} ({len(ready.listing.snapshot().entries)} runs below {folder}); Ctrl-C ends it")
    if browser:
        typer.launch(ready.address)
    ready.serve()


_SHORT_TITLES = {
    "final_accuracy": "accuracy\n%",
    "mean_forgetting": "forgets\npoints",
    "forgettable_examples": "forgettable\na round",
    "seconds": "time\ns",
    "upload_bytes": "up\nMB",
    "download_bytes": "down\nMB",
}
_WITHOUT_DEVIATION = ("seconds", "upload_bytes", "download_bytes")


def _comparison_table(comparison: Comparison) -> Table:
    """One row per setting, narrow enough for 80 columns; the deviation over seeds where it tells something."""
    from fedretain.report import COLUMNS

    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("", overflow="fold")
    for column in COLUMNS:
        table.add_column(_SHORT_TITLES[column.key], justify="right", no_wrap=True)
    table.add_column("seeds", justify="right")
    for row in comparison.rows:
        cells = []
        for column in COLUMNS:
            spread = row[column.key]
            if spread is not None and column.key in _WITHOUT_DEVIATION:
                spread = spread._replace(std=None)
            text = column.text(spread).replace(" ± ", "±")
            cells.append(f"[bold]{text}[/bold]" if column.key in row["best"] else text)
        table.add_row(escape(row["label"]), *cells, str(len(row["seeds"])))
    return table


def _shares_table(shares: Shares, rows: int) -> Table:
    """A column per class where they fit, else the largest classes of each client in words."""
    sizes = shares.train_sizes, shares.validation_sizes
    counts = shares.class_counts[:rows]
    widest = max((len(str(count)) for count in counts.flat), default=1)
    fit = sum(max(len(name), widest) + 3 for name in shares.class_names) + 26 <= out.width
    names = [escape(name) for name in shares.class_names]
    table = Table("client", "train", "valid.", *(names if fit else ["classes"]), title=escape(shares.title))
    for client, held in enumerate(counts):
        if fit:
            cells = [str(count) if count else "·" for count in held.tolist()]
        else:
            order = [c for c in (-held).argsort(kind="stable").tolist() if held[c]]
            more = f", … ({len(order)} classes)" if len(order) > _CLASSES_IN_WORDS else ""
            cells = [", ".join(f"{names[c]} {held[c]}" for c in order[:_CLASSES_IN_WORDS]) + more]
        table.add_row(str(client), *(str(size[client]) for size in sizes), *cells)
    return table


_CLASSES_IN_WORDS = 5


class _Bar:
    """A progress bar for every run, one after another or together."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.tasks: dict[Any, Any] = {}
        self.drawn = -math.inf

    def begin(self, variant: Variant, number: int, total: int) -> None:
        """The next variant starts."""
        self._add(variant.experiment, f"[{number + 1}/{total}] {variant.name}")

    def end(self, variant: Variant, finished: fedretain.Run) -> None:
        """A variant is finished; perhaps it was before, and no round had to be run."""
        accuracy = finished.summary["final_accuracy"]["last"]
        task = self.tasks[_bar_key(variant.experiment)]
        self.progress.update(task, completed=finished.summary["rounds"], note=f"accuracy {accuracy:.3f}")
        self._draw()

    def watch(self, experiment: Experiment, row: Row) -> None:
        """A round ended."""
        if _bar_key(experiment) not in self.tasks:
            self._add(experiment, experiment.name)
        shown = f"accuracy {row['test_accuracy']:.3f}" if "test_accuracy" in row else ""
        self.progress.update(self.tasks[_bar_key(experiment)], completed=row["round"], note=shown)
        self._draw()

    def close(self) -> None:
        """Leave the last state on the screen; a bar that never began leaves nothing."""
        if self.tasks:
            self.progress.stop()

    def _add(self, experiment: Experiment, label: str) -> None:
        self.progress.start()
        self.tasks[_bar_key(experiment)] = self.progress.add_task(label, total=experiment.rounds, note="")
        self._draw()

    def _draw(self) -> None:
        """Ten times a second at most, and never by a thread: beside one, worker processes would start slowly."""
        now = time.monotonic()
        if now - self.drawn > 0.1:
            self.drawn = now
            self.progress.refresh()


def _bar_key(experiment: Experiment) -> tuple[str, int]:
    return experiment.key, experiment.rounds


@contextmanager
def _progress(quiet: bool) -> Iterator[_Bar]:
    """The bar; Ctrl-C and a polite kill stop after the last finished round, which is saved."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, stop)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
    )
    bar = _Bar(Progress(*columns, console=err, disable=quiet, auto_refresh=False))
    try:
        try:
            yield bar
        finally:
            bar.close()
    except KeyboardInterrupt:
        err.print(
            "stopped; the finished rounds are saved. The same command with --resume goes on (compare always does).",
            soft_wrap=True,
        )
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGTERM, previous)


def _say_where(path: Path) -> None:
    page = path / "report.html"
    if page.exists():
        _say(f"report: {page.resolve()}")
    else:
        _say(f"run: {path.resolve()} (no report.html: pip install plotly, then 'fedretain report {path}')")


def _say(text: str) -> None:
    """One line as it is: not wrapped, and square brackets are no markup."""
    out.print(text, highlight=False, soft_wrap=True, markup=False)


def _complain(what: str, text: str) -> None:
    err.print(f"[bold red]{what}[/bold red] {escape(text)}", highlight=False, soft_wrap=True)


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


class _Notes(logging.Handler):
    """What fedretain has to say while it works, on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        err.print(record.getMessage(), highlight=False, soft_wrap=True, markup=False)


def main() -> None:
    """Entry point: an error that the user can act on is one message and a non-zero exit."""
    log = logging.getLogger("fedretain")
    log.addHandler(_Notes())
    log.setLevel(logging.INFO)
    sys.path.insert(0, str(Path.cwd()))  # so that an experiment can name a method in a file beside it
    try:
        app()
    except FedretainError as error:
        _complain("error:", str(error))
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _complain("error:", f"{where}{error.strerror or error}; check the path, the permissions and the room there")
        sys.exit(1)

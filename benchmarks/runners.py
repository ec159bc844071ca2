"""Who takes part in the benchmark, and how each is started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENGINES = ("auto", "loop", "workers", "vectorised")


@dataclass(frozen=True)
class Runner:
    """A module that trains a given work in a process of its own."""

    name: str
    module: str
    environment: str | None = None
    """The peer environment that it runs in; None means this one."""
    engine: str | None = None
    """fedretain's engine; None for those that know nothing of fedretain."""

    @property
    def ours(self) -> bool:
        """Whether this is fedretain."""
        return self.engine is not None

    def command(self, python: Path, given: Path, out: Path) -> list[str]:
        """What starts it."""
        command = [str(python), "-m", self.module, str(given), str(out)]
        return [*command, self.engine] if self.engine is not None else command


RUNNERS = {
    runner.name: runner
    for runner in (
        *(Runner(f"fedretain-{engine}", "benchmarks.ours", engine=engine) for engine in ENGINES),
        Runner("plain-pytorch", "benchmarks.peers.plain"),
        Runner("plain-2-processes", "benchmarks.peers.plain_processes"),
        Runner("flower-ray", "benchmarks.peers.flower", "flower"),
        Runner("pfl-research-2-processes", "benchmarks.peers.pfl_research", "pfl-research"),
        Runner("fluke", "benchmarks.peers.fluke", "fluke"),
        Runner("fedlab", "benchmarks.peers.fedlab", "fedlab"),
    )
}
REFERENCE = "plain-pytorch"

"""What a round costs as the population grows or becomes uneven: ``python -m benchmarks.growth [--clients N ...]``."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import fedretain
from fedretain.randomness import stream

COHORT = 100
ENGINES: tuple[tuple[str, dict[str, Any], int], ...] = (
    ("vectorised", {"name": "vectorised"}, 60),
    ("workers/vectorised", {"name": "workers", "workers": 2, "inner": "vectorised"}, 60),
    ("loop", {"name": "loop"}, 4),
)
"""Their names, settings, and rounds to be timed."""


def between_rounds(given: dict[str, Any], owners: np.ndarray, width: int) -> tuple[float, float]:
    """Seconds to the end of the first round, and from there from one end to the next (median).

    Random inputs of ``width`` numbers, example i held by client ``owners[i]``.
    """
    rng = stream(0, "growth", len(owners), width)
    inputs = rng.normal(size=(len(owners), width)).astype(np.float32)
    labels = rng.integers(0, 10, len(owners))
    labels[:10] = np.arange(10)
    data = fedretain.from_arrays(inputs, labels, inputs[:10], labels[:10], columns={"owner": (owners, owners[:10])})
    common = {
        "participation": COHORT,
        "partition": {"kind": "by_column", "column": "owner", "validation": 0.0},
        "evaluate": {"every": 0},
        "forgetting": {"every": 0},
        "device": "cpu",
    }
    started = time.perf_counter()
    ends: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        fedretain.run(
            {**common, **given}, out=out, data=data, watch=lambda experiment, row: ends.append(time.perf_counter())
        )
    return ends[0] - started, float(np.median(np.diff(ends)))


def uneven_owners(clients: int, examples: int) -> np.ndarray:
    """Owners of unevenly divided examples: sizes are log-normal, the largest some twenty times the smallest."""
    sizes = np.clip(stream(0, "uneven", clients).lognormal(0.0, 0.7, clients), 0.25, 5.0)
    ends = np.round(np.cumsum(sizes) / sizes.sum() * examples).astype(np.int64)
    return np.repeat(np.arange(clients), np.diff(ends, prepend=0))


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="*", default=[1_000, 1_000_000])
    arguments = parser.parse_args()
    print(f"{COHORT} clients a round, five examples each, engine vectorised")
    for clients in arguments.clients:
        given = {"rounds": 40, "model": {"name": "mlp", "hidden": [16]}, "local": {"batch_size": 5}}
        first, later = between_rounds({**given, "engine": "vectorised"}, np.repeat(np.arange(clients), 5), 8)
        print(
            f"  {clients:9,} clients: first round after {first:5.1f} s, then {1000 * later:.1f} ms a round", flush=True
        )
    even, uneven = np.repeat(np.arange(1000), 20), uneven_owners(1000, 20_000)
    sizes = np.bincount(uneven)
    print(f"W3-tiny-many with clients of {sizes.min()} to {sizes.max()} examples in place of 20")
    for label, owners in (("equal", even), ("uneven", uneven)):
        for name, engine, rounds in ENGINES:
            local = {"epochs": 5, "batch_size": 10}
            given = {"rounds": rounds, "model": {"name": "mlp", "hidden": [64]}, "local": local, "engine": engine}
            _, later = between_rounds(given, owners, 64)
            print(f"  {label:6} {name:18} {1000 * later:7.1f} ms a round", flush=True)


if __name__ == "__main__":
    main()

"""Federated learning that measures what a model forgets and stops it from forgetting."""

from fedretain.importing import uncollected

with uncollected():
    from fedretain.catalogue import available
    from fedretain.compare import Comparison, compare
    from fedretain.config import Experiment
    from fedretain.data import Dataset, from_arrays, load_dataset
    from fedretain.doctor import doctor
    from fedretain.errors import FedretainError
    from fedretain.experiment import run
    from fedretain.methods import Batch, Method, Own, Received, Task, chain
    from fedretain.runs.run import Run
    from fedretain.runs.trackers import RunFacts, Tracker
    from fedretain.runs.trackers.tracking import track
    from fedretain.shares import partition
    from fedretain.version import __version__

__all__ = [
    "Batch",
    "Comparison",
    "Dataset",
    "Experiment",
    "FedretainError",
    "Method",
    "Own",
    "Received",
    "Run",
    "RunFacts",
    "Task",
    "Tracker",
    "__version__",
    "available",
    "chain",
    "compare",
    "doctor",
    "from_arrays",
    "load_dataset",
    "partition",
    "run",
    "track",
]

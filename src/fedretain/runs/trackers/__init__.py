"""Trackers: where a run's metrics go besides ``metrics.jsonl``. Their libraries are imported when one is made."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from fedretain.runs.trackers.mlflow import MLflow
from fedretain.runs.trackers.protocol import RunFacts, Tracker
from fedretain.runs.trackers.tensorboard import TensorBoard
from fedretain.runs.trackers.wandb import WeightsAndBiases

__all__ = ["TRACKERS", "MLflow", "RunFacts", "TensorBoard", "Tracker", "WeightsAndBiases"]

TRACKERS: Mapping[str, Callable[..., Tracker]] = MappingProxyType(
    {
        "tensorboard": TensorBoard,
        "mlflow": MLflow,
        "wandb": WeightsAndBiases,
    }
)
"""What the experiment key ``track`` may name."""

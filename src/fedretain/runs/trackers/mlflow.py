"""MLflow: a database in the run directory, or the server that MLFLOW_TRACKING_URI names."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from fedretain.errors import ConfigError, MissingExtraError
from fedretain.runs.trackers.protocol import RunFacts, without_password

ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
"""Unless the user says otherwise: nothing to MLflow's makers, no chatter, no minutes of waiting for a lost server."""

LONGEST_VALUE = 500
"""Characters of a parameter; older servers refuse more."""

ALWAYS_THERE = "seconds"
"""In the metrics of every round; a round is sent in one request, so that its steps are the rounds that a server has."""


@dataclass
class MLflow:
    """A run in an MLflow experiment: metrics by round, settings as parameters."""

    uri: str | None = None
    experiment: str | None = None
    _client: Any = field(init=False, repr=False, default=None)
    _run: str = field(init=False, repr=False, default="")

    def __post_init__(self) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        try:
            import alembic  # noqa: F401
            import mlflow.tracking  # noqa: F401
            import sqlalchemy  # noqa: F401
        except ImportError as error:
            raise MissingExtraError(error.name or "mlflow", "track", "track: mlflow") from error
        self.uri = self.uri or os.environ.get("MLFLOW_TRACKING_URI")
        plain_folder = self.uri is not None and urlsplit(self.uri).scheme in ("", "file")
        if plain_folder and self.uri != "databricks" and "MLFLOW_ALLOW_FILE_STORE" not in os.environ:
            raise ConfigError(
                f"track.uri: MLflow no longer writes to plain folders (given: {self.uri!r}); "
                "use sqlite:///PATH/mlflow.db or the address of a server, or leave it out"
            )

    def open(self, facts: RunFacts) -> int:
        """Find this run on the server by the id in the run directory, or create it."""
        from mlflow.tracking import MlflowClient

        address = self.uri or f"sqlite:///{facts.home.absolute()}/mlflow.db"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # MLflow's own deprecations
            self._client = MlflowClient(address)
        key = f"mlflow {without_password(self.uri)}" if self.uri else "mlflow"  # an id for each server
        known = facts.recall(key)
        if known is None:
            self._run = self._client.create_run(self._experiment_id(facts), run_name=facts.name).info.run_id
            facts.remember(key, self._run)
        else:
            self._run = known
            self._client.update_run(self._run, status="RUNNING", name=facts.name)
        self._describe(facts)
        return max((point.step for point in self._client.get_metric_history(self._run, ALWAYS_THERE)), default=0)

    def log(self, round: int, numbers: Mapping[str, float], clients: Mapping[str, list[float]]) -> None:
        """All numbers in one request; MLflow has no histograms."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self._run, metrics=[Metric(key, value, now, round) for key, value in numbers.items()])

    def close(self, rounds: int, summary: Mapping[str, float] | None) -> None:
        """The summary stands at the last round; what is there already is not sent twice."""
        if summary is not None:
            there = self._client.get_run(self._run).data.metrics
            self.log(rounds, {key: value for key, value in summary.items() if there.get(key) != value}, {})
        self._client.set_terminated(self._run, "FINISHED" if summary is not None else "KILLED")

    def _experiment_id(self, facts: RunFacts) -> Any:
        name = self.experiment or facts.group or facts.name
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return found.experiment_id
        place = None if self.uri else (facts.home.absolute() / "mlflow-artifacts").as_uri()
        return self._client.create_experiment(name, artifact_location=place)

    def _describe(self, facts: RunFacts) -> None:
        """Settings that a resume may change become tags, for a parameter can never be changed."""
        from mlflow.entities import Param, RunTag

        from fedretain.config import deciding

        texts = {key: str(value)[:LONGEST_VALUE] for key, value in facts.config.items()}
        there = self._client.get_run(self._run).data.params
        fixed = [key for key in deciding(facts.config) if key not in there]
        self._client.log_batch(
            self._run,
            params=[Param(key, texts[key]) for key in fixed],
            tags=[RunTag(key, text) for key, text in texts.items() if key not in deciding(facts.config)],
        )

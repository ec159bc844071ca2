"""The keys of an experiment file: one immutable ``Experiment`` with every default written out."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

import pydantic
import yaml
from pydantic import Field

from fedretain.components import complete, find, parameters, refuse_bool
from fedretain.data.partition import PARTITIONS
from fedretain.errors import ConfigError, unknown
from fedretain.losses import LOSSES
from fedretain.methods import METHODS, Method, chain
from fedretain.methods.chain import parts
from fedretain.models import MODELS
from fedretain.models import SUPPLIED as MODEL_SUPPLIED
from fedretain.optimizers import SGD, Adam, LocalOptimizer, ServerOptimizer, ServerRule
from fedretain.runs.trackers import TRACKERS

PARTITION_SUPPLIED = ("labels", "values", "seed")
LOSS_SUPPLIED = ("logits", "labels", "class_counts")


class Section(pydantic.BaseModel):
    """A part of the experiment file: frozen, and no unknown keys."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())
    _no_bools = pydantic.field_validator("*", mode="before")(classmethod(refuse_bool))


class Component(pydantic.BaseModel):
    """A named part with parameters of its own, all of them written out."""

    model_config = pydantic.ConfigDict(extra="allow", frozen=True, protected_namespaces=())

    name: str

    @property
    def parameters(self) -> dict[str, Any]:
        """Everything but the name."""
        return dict(self.model_extra or {})


class DataSettings(Section):
    """Which examples, and how they are scaled."""

    name: str = "digits"
    root: str | None = None
    path: str | None = None
    normalise: Literal["mean_std", "per_pixel", "unit"] = "mean_std"
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    image: str | None = None
    label: str | None = None
    size: Annotated[int, Field(gt=0)] | None = None
    include_val: bool = False


class LocalSettings(Section):
    """What a client does in a round."""

    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: Annotated[float, Field(gt=0)] = 0.1
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    nesterov: bool = False
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    epochs: Annotated[float, Field(gt=0)] | None = None
    steps: Annotated[int, Field(ge=1)] | None = None
    batch_size: Annotated[int, Field(ge=1)] = 32
    drop_last: bool = False
    lr_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    augment: Literal["none", "crop_flip"] = "none"

    @pydantic.model_validator(mode="before")
    @classmethod
    def _one_epoch_by_default(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and given.get("epochs") is None and given.get("steps") is None:
            return {**given, "epochs": 1.0}
        return given

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.epochs is not None and self.steps is not None:
            raise ValueError("give either epochs or steps, not both")
        if self.optimizer != "sgd" and (self.momentum or self.nesterov):
            raise ValueError(f"momentum and nesterov belong to sgd, not to {self.optimizer}")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0")
        return self

    def build_optimizer(self) -> LocalOptimizer:
        """The optimiser as pure functions."""
        if self.optimizer == "sgd":
            return SGD(self.momentum, self.nesterov, self.weight_decay)
        return Adam(weight_decay=self.weight_decay, decoupled=self.optimizer == "adamw")

    def lr_of_round(self, round: int) -> float:
        """η · decay^(t − 1)."""
        return self.lr * self.lr_decay ** (round - 1)


class ServerSettings(Section):
    """How the server moves the global model."""

    lr: Annotated[float, Field(gt=0)] = 1.0
    optimizer: ServerRule = "sgd"
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    tau: Annotated[float, Field(gt=0)] = 1e-3
    weights: Literal["examples", "uniform"] | None = None

    def build_optimizer(self) -> ServerOptimizer:
        """The server optimiser as pure functions."""
        return ServerOptimizer(self.optimizer, self.lr, self.momentum, self.beta1, self.beta2, self.tau)


class EvaluateSettings(Section):
    """When the global model meets the test set; the last round always does. 0 means only then."""

    every: Annotated[int, Field(ge=0)] = 1
    batch_size: Annotated[int, Field(ge=1)] = 500
    personalised: bool = False
    targets: tuple[Annotated[float, Field(gt=0, le=1)], ...] = (0.5, 0.9)
    reference: Annotated[float, Field(gt=0, le=1)] | None = None

    @pydantic.field_validator("targets")
    @classmethod
    def _ascending(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if list(value) != sorted(set(value)):
            raise ValueError("must be in ascending order, each once")
        return value


class ForgettingSettings(Section):
    """When forgetting is measured (0: never), on whose data, and what beside the client × client matrix."""

    every: Annotated[int, Field(ge=0)] = 10
    clients: Literal["cohort", "all"] = "cohort"
    examples: bool = True
    measures: tuple[Literal["classes", "drift", "loss_increase", "fisher"], ...] = ()

    @pydantic.field_validator("measures")
    @classmethod
    def _each_once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if repeated := [name for name in value if value.count(name) > 1]:
            raise ValueError(f"{repeated[0]} stands there twice; name each measure once")
        return value


class CheckpointSettings(Section):
    """Save every so many rounds; null saves so that it costs about 1 % of the time."""

    every: Annotated[int, Field(ge=1)] | None = None


class EngineSettings(Section):
    """What runs the clients, and how much memory the states of stateful methods may take before they go to disk."""

    name: Literal["auto", "loop", "workers", "vectorised", "graphed"] = "auto"
    workers: Annotated[int, Field(ge=1)] | None = None
    inner: Literal["loop", "native", "vectorised"] = "loop"
    stack: bool = True
    state_memory: Annotated[int, Field(ge=0)] = 2**30
    state_precision: Literal["full", "half"] = "full"

    @pydantic.field_validator("state_memory", mode="before")
    @classmethod
    def _bytes(cls, given: Any) -> Any:
        """Bytes, or a text such as 512MB or 2 GiB."""
        if not isinstance(given, str):
            return given
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)B?\s*", given)
        if not found:
            raise ValueError("must be a number of bytes, or a text such as 512MB or 2GiB")
        number, unit, binary = found.groups()
        power = ["", "K", "M", "G", "T"].index(unit.upper())
        return int(float(number) * (1024 if binary else 1000) ** power)


class PartitionSettings(pydantic.BaseModel):
    """Who holds what. The keys beside these are the parameters of the partition function."""

    model_config = pydantic.ConfigDict(extra="allow", frozen=True, allow_inf_nan=False, protected_namespaces=())

    kind: str = "dirichlet"
    column: str | None = None
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.1
    seed: Annotated[int, Field(ge=0)] | None = None

    @property
    def parameters(self) -> dict[str, Any]:
        """The keyword arguments of the partition function."""
        return dict(self.model_extra or {})


class Experiment(Section):
    """Everything that decides a run's numbers."""

    name: Annotated[str, Field(max_length=60)] = "experiment"
    seed: Annotated[int, Field(ge=0)] = 0
    rounds: Annotated[int, Field(ge=0)] = 10
    participation: int | float = 1.0
    training: Literal["federated", "centralised"] = "federated"
    data: DataSettings = DataSettings()
    partition: PartitionSettings = Field(default={}, validate_default=True)
    model: Component = Field(default="mlp", validate_default=True)
    loss: Component = Field(default="ce", validate_default=True)
    method: tuple[Component, ...] = Field(default="fedavg", validate_default=True)
    local: LocalSettings = Field(default={}, validate_default=True)
    server: ServerSettings = ServerSettings()
    evaluate: EvaluateSettings = EvaluateSettings()
    forgetting: ForgettingSettings = ForgettingSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    engine: EngineSettings = EngineSettings()
    track: tuple[Component, ...] = ()
    device: str = "auto"
    precision: Literal["float32", "float64", "bfloat16"] = "float32"

    @pydantic.field_validator("participation")
    @classmethod
    def _somebody(cls, value: int | float) -> int | float:
        if (isinstance(value, int) and value >= 1) or (isinstance(value, float) and 0 < value <= 1):
            return value
        raise ValueError("must be a number of clients (an integer of at least 1) or a fraction in (0, 1]")

    @pydantic.field_validator("name")
    @classmethod
    def _names_a_folder(cls, value: str) -> str:
        if not re.fullmatch(r"\w[\w ._+=,()-]*", value):
            raise ValueError("must begin with a letter or digit; then letters, digits, spaces and ._+=,()- are allowed")
        return value

    @pydantic.field_validator("device")
    @classmethod
    def _spelt_right(cls, value: str) -> str:
        if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", value):
            raise ValueError("must be auto, cpu, cuda, cuda:N or mps")
        return value

    @pydantic.field_validator("data", "engine", mode="before")
    @classmethod
    def _by_name(cls, given: Any) -> Any:
        return {"name": given} if isinstance(given, str) else given

    @pydantic.field_validator("partition", mode="before")
    @classmethod
    def _whole_partition(cls, given: Any) -> Any:
        given = _as_mapping("partition", given, "kind")
        frame = {k: v for k, v in given.items() if k in PartitionSettings.model_fields}
        kind = frame.setdefault("kind", "dirichlet")
        function = find("partition", PARTITIONS, kind)
        chosen = {k: v for k, v in given.items() if k not in frame}
        if frame.get("column") is not None and kind in PARTITIONS and kind != "by_column":
            raise ConfigError(f"partition.column: only the kind by_column splits by a column (given kind: {kind!r})")
        valid = [parameter.name for parameter in parameters(function, PARTITION_SUPPLIED)]
        if stray := [k for k in chosen if k not in valid]:
            names = [f"partition.{name}" for name in (*valid, *PartitionSettings.model_fields)]
            raise ConfigError(unknown("key", f"partition.{stray[0]}", names))
        if kind == "dirichlet":
            chosen = {"clients": 10, "alpha": 0.1, **chosen}
        if kind == "by_column" and not frame.get("column"):
            raise ConfigError("partition.column: missing; name the column whose values are the clients")
        return {**frame, **complete("partition", function, chosen, PARTITION_SUPPLIED)}

    @pydantic.field_validator("model", mode="before")
    @classmethod
    def _whole_model(cls, given: Any) -> Any:
        return _whole_component("model", MODELS, given, MODEL_SUPPLIED)

    @pydantic.field_validator("loss", mode="before")
    @classmethod
    def _whole_loss(cls, given: Any) -> Any:
        return _whole_component("loss", LOSSES, given, LOSS_SUPPLIED)

    @pydantic.field_validator("method", mode="before")
    @classmethod
    def _whole_method(cls, given: Any) -> Any:
        members = parts(given) if isinstance(given, Method) else given if isinstance(given, list | tuple) else [given]
        return tuple(_whole_component("method", METHODS, described(member)) for member in members)

    @pydantic.field_validator("track", mode="before")
    @classmethod
    def _whole_trackers(cls, given: Any) -> Any:
        members = given if isinstance(given, list | tuple) else [given]
        trackers = {}
        for member in members:
            chosen = _as_mapping("track", member)
            name = chosen.pop("name", None)
            if not isinstance(name, str):
                raise ConfigError(f"track.name: must be text (given: {name!r}); valid: {', '.join(sorted(TRACKERS))}")
            if name in trackers:
                raise ConfigError(f"track: {name!r} stands there twice; name each tracker once")
            trackers[name] = {"name": name, **complete("track", find("tracker", TRACKERS, name), chosen)}
        return tuple(trackers.values())

    def build_method(self) -> Method:
        """The chain of methods, checked against each other and against the local settings."""
        members = [find("method", METHODS, member.name)(**member.parameters) for member in self.method]
        for named, built in zip(self.method, members, strict=True):
            if not isinstance(built, Method):
                raise ConfigError(f"method: {named.name!r} makes no fedretain.Method but a {type(built).__name__}")
        method = chain(*members)
        for member in parts(method):
            member.check(self.local)
        return method

    def cohort_size(self, clients: int) -> int:
        """How many clients take part in a round."""
        if isinstance(self.participation, int):
            if self.participation > clients:
                raise ConfigError(
                    f"participation: {self.participation} of only {clients} clients; use {clients} or fewer"
                )
            return self.participation
        size = int(self.participation * clients + 0.5)
        if size < 1:
            raise ConfigError(
                f"participation: {self.participation} of {clients} clients selects nobody; "
                f"use at least {1 / clients:.2g} or a number of clients"
            )
        return size

    def as_dict(self) -> dict[str, Any]:
        """Plain values only, every default written out; ``make_experiment`` reads it back to an equal experiment."""
        plain: dict[str, Any] = json.loads(self.model_dump_json())
        plain["method"] = plain["method"][0] if len(plain["method"]) == 1 else plain["method"]
        return plain

    def as_yaml(self) -> str:
        """The text of ``config.yaml``."""
        return yaml.safe_dump(self.as_dict(), sort_keys=False, allow_unicode=True)

    def deciding(self) -> dict[str, Any]:
        """The flattened keys that decide the numbers of each round."""
        return deciding(self.as_dict())

    @property
    def key(self) -> str:
        """A short hash of everything that decides the numbers of each round."""
        return hashlib.sha256(json.dumps(self.deciding(), sort_keys=True).encode()).hexdigest()[:8]


NOT_DECIDING = (
    *("name", "rounds", "data.root", "checkpoint.every", "engine.state_memory", "track"),
    *("engine.workers", "engine.stack"),
    *("evaluate.targets", "evaluate.reference"),
)
"""Keys that change nothing in the numbers of a round: labels, lengths, places and savings."""


def deciding(config: Mapping[str, Any]) -> dict[str, Any]:
    """The flattened keys that decide the numbers of each round."""
    return {k: v for k, v in flatten(config).items() if k not in NOT_DECIDING}


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _as_mapping(key: str, given: Any, name_key: str = "name") -> dict[str, Any]:
    if isinstance(given, Component | PartitionSettings):
        given = given.model_dump()
    if isinstance(given, str):
        return {name_key: given}
    if isinstance(given, Mapping):
        return dict(given)
    raise ConfigError(f"{key}: must be a name, or a mapping with the key {name_key!r} (given: {given!r})")


def _whole_component(key: str, table: Mapping[str, Any], given: Any, skip: Sequence[str] = ()) -> dict[str, Any]:
    given = _as_mapping(key, given)
    name = given.pop("name", Experiment.model_fields[key].default)
    if not isinstance(name, str):
        raise ConfigError(f"{key}.name: must be text (given: {name!r}); valid: {', '.join(sorted(table))}")
    return {"name": name, **complete(key, find(key, table, name), given, skip)}


def described(member: Any) -> Any:
    """A Method object as the mapping that makes it again."""
    if not isinstance(member, Method):
        return member
    cls = type(member)
    names = {known: name for name, known in METHODS.items()}
    return {"name": names.get(cls, f"{cls.__module__}:{cls.__qualname__}"), **vars(member)}

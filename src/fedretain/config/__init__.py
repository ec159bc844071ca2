"""The experiment file: one YAML or dict becomes one validated, immutable ``Experiment``."""

from fedretain.config.reading import Variant, expand_variants, make_experiment, read_experiment
from fedretain.config.settings import (
    LOSS_SUPPLIED,
    PARTITION_SUPPLIED,
    EvaluateSettings,
    Experiment,
    LocalSettings,
    PartitionSettings,
    deciding,
    flatten,
)

__all__ = [
    "LOSS_SUPPLIED",
    "PARTITION_SUPPLIED",
    "EvaluateSettings",
    "Experiment",
    "LocalSettings",
    "PartitionSettings",
    "Variant",
    "deciding",
    "expand_variants",
    "flatten",
    "make_experiment",
    "read_experiment",
]

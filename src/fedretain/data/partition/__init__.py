"""Who holds which examples: partitions of a labelled dataset over the clients of a federation.

Every partition is a pure function of the labels (or of a column), its parameters and a seed. It returns one
array of example indices per client: int64, ascending, and no example in two clients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from fedretain.data.partition.checks import Parts
from fedretain.data.partition.even import iid, shards, tiny
from fedretain.data.partition.label_mix import dirichlet, dirichlet_by_class
from fedretain.data.partition.label_sets import classes_per_client, label_clusters
from fedretain.data.partition.natural import by_column
from fedretain.data.partition.validation import split_validation

PARTITIONS: Mapping[str, Callable[..., Parts]] = MappingProxyType(
    {
        "dirichlet": dirichlet,
        "dirichlet_by_class": dirichlet_by_class,
        "label_clusters": label_clusters,
        "classes_per_client": classes_per_client,
        "tiny": tiny,
        "shards": shards,
        "iid": iid,
        "by_column": by_column,
    }
)
"""The partitions by their name in an experiment file; ``by_column`` takes a column in place of the labels."""

__all__ = [
    "PARTITIONS",
    "Parts",
    "by_column",
    "classes_per_client",
    "dirichlet",
    "dirichlet_by_class",
    "iid",
    "label_clusters",
    "shards",
    "split_validation",
    "tiny",
]

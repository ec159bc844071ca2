"""Federated methods: one short file per paper; ``chain`` composes them."""

from collections.abc import Mapping
from types import MappingProxyType

from fedretain.methods.chain import chain
from fedretain.methods.fedavg import FedAvg
from fedretain.methods.method import Aggregate, Batch, Method, Own, Received, Task

METHODS: Mapping[str, type[Method]] = MappingProxyType({"fedavg": FedAvg})

__all__ = ["METHODS", "Aggregate", "Batch", "FedAvg", "Method", "Own", "Received", "Task", "chain"]

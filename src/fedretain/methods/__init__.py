"""Federated methods: one short file per paper; ``chain`` composes them."""

from collections.abc import Mapping
from types import MappingProxyType

from fedretain.methods.chain import chain
from fedretain.methods.fedavg import FedAvg
from fedretain.methods.fedcurv import FedCurv
from fedretain.methods.fednova import FedNova
from fedretain.methods.fedprox import FedProx
from fedretain.methods.fedreg import FedReg
from fedretain.methods.fedsgd import FedSGD
from fedretain.methods.fedwavg import FedWAvg
from fedretain.methods.method import Aggregate, Batch, Method, Own, Received, Task
from fedretain.methods.scaffold import Scaffold

METHODS: Mapping[str, type[Method]] = MappingProxyType(
    {
        "fedavg": FedAvg,
        "fedsgd": FedSGD,
        "fedprox": FedProx,
        "scaffold": Scaffold,
        "fednova": FedNova,
        "fedcurv": FedCurv,
        "fedreg": FedReg,
        "fedwavg": FedWAvg,
    }
)

__all__ = [
    "METHODS",
    "Aggregate",
    "Batch",
    "FedAvg",
    "FedCurv",
    "FedNova",
    "FedProx",
    "FedReg",
    "FedSGD",
    "FedWAvg",
    "Method",
    "Own",
    "Received",
    "Scaffold",
    "Task",
    "chain",
]

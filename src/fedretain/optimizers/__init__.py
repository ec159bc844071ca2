"""Local and server optimisers, as pure functions."""

from fedretain.optimizers.local import SGD, Adam, LocalOptimizer
from fedretain.optimizers.server import ServerOptimizer, ServerRule

__all__ = ["SGD", "Adam", "LocalOptimizer", "ServerOptimizer", "ServerRule"]

"""FedProx: a proximal term against drift."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedretain.methods.method import Method, NonNegative, Own, Received
from fedretain.tensors import Tensors, squared_distance


@dataclass(frozen=True)
class FedProx(Method):
    """Keep the local model near the received one: adds (μ/2)·‖w_k − w‖² to the loss (Li et al. 2020)."""

    mu: NonNegative

    def penalty(self, params: Tensors, received: Received, own: Own) -> Tensor:
        """(μ/2)·‖w_k − w‖² (Eq. 2)."""
        return self.mu / 2 * squared_distance(params, received.params)

"""SCAFFOLD: control variates against client drift."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fedretain.errors import ConfigError
from fedretain.methods.method import Aggregate, Method, Own, Received, Task
from fedretain.tensors import Tensors, add_scaled, subtract, zeros_like

if TYPE_CHECKING:
    from fedretain.config import LocalSettings


@dataclass(frozen=True)
class Scaffold(Method):
    """Correct each local step by what the other clients' gradients are known to be (Karimireddy et al. 2020).

    Models are averaged by examples as everywhere; ``server.weights: uniform`` is the paper's plain mean.
    """

    option: Literal["I", "II"] = "II"

    def check(self, local: LocalSettings) -> None:
        """Option II reads the mean gradient off the distance travelled, which only plain SGD allows."""
        if self.option == "II" and (local.optimizer != "sgd" or local.momentum):
            used = f"sgd with momentum {local.momentum}" if local.optimizer == "sgd" else local.optimizer
            raise ConfigError(
                "method: scaffold's option II computes c_k from (w − y)/(τ·η), which holds only for plain SGD, not for "
                f"{used}; use option: I, or local.optimizer: sgd without momentum"
            )

    def init_client(self, params: Tensors, own: Own) -> Tensors:
        """c_k = 0."""
        return zeros_like(params)

    def init_server(self, params: Tensors) -> Tensors:
        """c = 0."""
        return zeros_like(params)

    def broadcast(self, server: Tensors) -> Tensors:
        """Participants receive c beside the model: twice FedAvg's traffic."""
        return server

    def direction(self, gradient: Tensors, params: Tensors, received: Received, own: Own) -> Tensors:
        """g − c_k + c (Alg. 1, line 10)."""
        return {n: g - own.state[n] + received.server[n] for n, g in gradient.items()}

    def finish(self, params: Tensors, received: Received, own: Own, task: Task) -> tuple[Tensors, Tensors]:
        """c_k⁺ (Alg. 1, line 12), and c_k⁺ − c_k for the server."""
        if self.option == "I":
            _, new = task.gradient(received.params, own.data, training=False)
        else:
            # The number of steps is an integer tensor: times a Python float it would be rounded to float32.
            new = {
                n: own.state[n] - received.server[n] + (received.params[n] - y) / (own.steps.to(y.dtype) * task.lr)
                for n, y in params.items()
            }
        return new, subtract(new, own.state)

    def update_server(self, server: Tensors, aggregate: Aggregate) -> Tensors:
        """c ← c + (1/K)·Σ_{S_t} (c_k⁺ − c_k), K the whole population (Alg. 1, line 17)."""
        return add_scaled(server, 1 / aggregate.population, aggregate.total)

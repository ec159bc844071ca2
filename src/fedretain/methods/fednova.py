"""FedNova: clients that take more steps do not pull harder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from fedretain.errors import ConfigError
from fedretain.methods.fedprox import FedProx
from fedretain.methods.method import Aggregate, Method, NonNegative, Own, Received, Task
from fedretain.tensors import Tensors, scale

if TYPE_CHECKING:
    from fedretain.config import LocalSettings


@dataclass(frozen=True)
class FedNova(Method):
    """Average normalised changes, w ← w − τ_eff·Σ_k p_k (w − w_k)/‖a_k‖₁ (Wang et al. 2020).

    ‖a_k‖₁ is the total weight that the local optimiser gave to the client's gradients; ``proximal`` is the μ of a
    proximal term in the local objective (a chain with FedProx sets it).
    """

    proximal: NonNegative = 0.0

    def check(self, local: LocalSettings) -> None:
        """‖a‖₁ must be known."""
        if local.optimizer != "sgd" or local.nesterov or (local.momentum and self.proximal):
            used = (
                local.optimizer
                if local.optimizer != "sgd"
                else ("Nesterov momentum" if local.nesterov else "momentum together with a proximal term")
            )
            raise ConfigError(
                f"method: fednova divides by ‖a‖₁ of the local optimiser, which is not known for {used}; "
                "use sgd, sgd with momentum, or sgd with a proximal term"
            )
        if local.lr * self.proximal > 1:
            raise ConfigError(
                "method: fednova with a proximal term needs η·μ ≤ 1, or the weights (1 − ημ)^j of its gradients change "
                f"sign (local.lr {local.lr:g} times μ {self.proximal:g} is {local.lr * self.proximal:g}); lower either"
            )

    def beside(self, others: Sequence[Method]) -> Method:
        """Take over FedProx's μ; anything else that changes the local steps makes ‖a‖₁ unknown."""
        mu = 0.0
        for other in others:
            if isinstance(other, FedProx):
                mu = other.mu
            elif other.uses("penalty") or other.uses("step"):
                raise ConfigError(
                    f"method: fednova and {other.name} cannot be chained: ‖a‖₁ is not known for the local steps of "
                    f"{other.name}"
                )
        if self.proximal not in (0.0, mu):
            raise ConfigError(
                f"method: fednova.proximal is {self.proximal:g}, but the proximal term beside it has μ = {mu:g}; "
                "remove proximal and chain fednova with fedprox, which sets it"
            )
        return replace(self, proximal=mu)

    def upload(self, delta: Tensors, received: Received, own: Own, task: Task) -> Tensors:
        """(w_k − w)/‖a_k‖₁."""
        return scale(1 / self._norm(received, own, task), delta)

    def finish(self, params: Tensors, received: Received, own: Own, task: Task) -> tuple[Tensors, Tensors]:
        """‖a_k‖₁ goes along."""
        return own.state, {"norm": self._norm(received, own, task)}

    def combine(self, aggregate: Aggregate, received: Received) -> Tensors:
        """τ_eff·Σ_k p_k d_k with τ_eff = Σ_k p_k ‖a_k‖₁."""
        return scale(aggregate.mean["norm"], aggregate.delta)

    def _norm(self, received: Received, own: Own, task: Task) -> Tensor:
        """‖a_k‖₁ = τ; with momentum ρ (τ − ρ(1 − ρ^τ)/(1 − ρ))/(1 − ρ); with a proximal term Σ_{j<τ} (1 − ημ)^j."""
        steps, momentum = own.steps.to(next(iter(received.params.values())).dtype), task.local.momentum
        if momentum:
            return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
        if not self.proximal:
            return steps
        shrink = task.lr * self.proximal
        return (1 - (1 - shrink) ** steps) / shrink

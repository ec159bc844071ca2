"""Server optimisers on the averaged model change Δ (Reddi et al. 2020, Algorithm 2); plain SGD with η = 1 is FedAvg."""

from __future__ import annotations

from typing import Literal, NamedTuple

from fedretain.tensors import Tensors, add_scaled, zeros_like

ServerRule = Literal["sgd", "momentum", "adam", "yogi", "adagrad"]


class ServerOptimizer(NamedTuple):
    """w ← w + η·(a function of the history of Δ).

    sgd: Δ. momentum: m ← ρ·m + Δ, then m (FedAvgM, Hsu et al. 2019). adam, yogi, adagrad: m ← β₁·m + (1−β₁)·Δ,
    v as the rule says, then m / (√v + τ), without bias correction; v starts at τ².
    """

    rule: ServerRule = "sgd"
    lr: float = 1.0
    momentum: float = 0.9
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def init(self, params: Tensors) -> Tensors:
        """The state before the first round."""
        if self.rule == "sgd":
            return {}
        first = {f"m/{n}": z for n, z in zeros_like(params).items()}
        if self.rule == "momentum":
            return first
        return first | {f"v/{n}": z + self.tau**2 for n, z in zeros_like(params).items()}

    def update(self, params: Tensors, delta: Tensors, state: Tensors) -> tuple[Tensors, Tensors]:
        """Apply one averaged change."""
        if self.rule == "sgd":
            return add_scaled(params, self.lr, delta), state
        new_params, new_state = {}, {}
        for n, p in params.items():
            d = delta[n]
            if self.rule == "momentum":
                change = new_state[f"m/{n}"] = self.momentum * state[f"m/{n}"] + d
            else:
                m = self.beta1 * state[f"m/{n}"] + (1 - self.beta1) * d
                v, squared = state[f"v/{n}"], d.square()
                if self.rule == "adam":
                    v = self.beta2 * v + (1 - self.beta2) * squared
                elif self.rule == "yogi":
                    v = v - (1 - self.beta2) * squared * (v - squared).sign()
                else:
                    v = v + squared
                new_state[f"m/{n}"], new_state[f"v/{n}"] = m, v
                change = m / (v.sqrt() + self.tau)
            new_params[n] = p + self.lr * change
        return new_params, new_state

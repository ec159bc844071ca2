"""Local optimisers as pure functions: a state goes in with the gradient, new parameters and state come out.

The state starts fresh every round. Each update is the one of ``torch.optim`` under the same name.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedretain.tensors import Tensors, add_scaled, zeros_like


class LocalOptimizer(Protocol):
    """What a local optimiser must offer."""

    def init(self, params: Tensors) -> Tensors:
        """The state before the first step."""

    def update(
        self, params: Tensors, gradient: Tensors, state: Tensors, lr: float | Tensor, step: int | Tensor
    ) -> tuple[Tensors, Tensors]:
        """New parameters and state; ``step`` counts from 0 within the round. Engines that trace give tensors."""


class SGD(NamedTuple):
    """w ← w − η·v with v ← ρ·v + g + λ·w (Nesterov: w ← w − η·(g + λ·w + ρ·v))."""

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def init(self, params: Tensors) -> Tensors:
        """Zero velocity when there is momentum, else nothing."""
        return zeros_like(params) if self.momentum else {}

    def update(
        self, params: Tensors, gradient: Tensors, state: Tensors, lr: float | Tensor, step: int | Tensor
    ) -> tuple[Tensors, Tensors]:
        """One step of (momentum) SGD."""
        if self.weight_decay:
            gradient = add_scaled(gradient, self.weight_decay, params)
        if self.momentum:
            state = {n: self.momentum * state[n] + g for n, g in gradient.items()}
            gradient = add_scaled(gradient, self.momentum, state) if self.nesterov else state
        return add_scaled(params, -lr, gradient), state


class Adam(NamedTuple):
    """Adam (Kingma & Ba 2015); ``decoupled`` makes it AdamW (Loshchilov & Hutter 2019)."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False

    def init(self, params: Tensors) -> Tensors:
        """Zero first and second moments."""
        return {f"{kind}/{n}": torch.zeros_like(p) for kind in ("m", "v") for n, p in params.items()}

    def update(
        self, params: Tensors, gradient: Tensors, state: Tensors, lr: float | Tensor, step: int | Tensor
    ) -> tuple[Tensors, Tensors]:
        """One bias-corrected step."""
        if isinstance(step, Tensor):
            step = step.double()  # 1 − 0.999 in single precision has an error of 3e-5
        correction1 = 1 - self.beta1 ** (step + 1)
        correction2 = 1 - self.beta2 ** (step + 1)
        new_params, new_state = {}, {}
        for name, p in params.items():
            g = gradient[name]
            if self.weight_decay:
                if self.decoupled:
                    p = p * (1 - lr * self.weight_decay)
                else:
                    g = g + self.weight_decay * p
            m = self.beta1 * state[f"m/{name}"] + (1 - self.beta1) * g
            v = self.beta2 * state[f"v/{name}"] + (1 - self.beta2) * g.square()
            new_params[name] = p - lr / correction1 * m / ((v / correction2).sqrt() + self.epsilon)
            new_state[f"m/{name}"], new_state[f"v/{name}"] = m, v
        return new_params, {name: new_state[name] for name in state}

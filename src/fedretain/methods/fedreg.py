"""FedReg: pseudo data, made from the received model, stand in for what the other clients taught it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.func import grad

from fedretain.errors import ConfigError
from fedretain.methods.method import Batch, Method, NonNegative, Own, Received, Task
from fedretain.tensors import Tensors, add, add_scaled, inners, scale, subtract

if TYPE_CHECKING:
    from fedretain.config import LocalSettings


@dataclass(frozen=True)
class FedReg(Method):
    """Regularise local training by generated pseudo and perturbed data (fedreg-paper, Alg. D.1).

    gamma: slowness of the parameters that the batch's gradient is taken at. eta_s, eta_p: size of the sign-gradient
    steps that make pseudo and perturbed data, in input units (eta_p: 0.01·eta_s unless given). modified_gradient: MG,
    §3.3, against gradient inversion. The two weights scale the corrections w_s and w_p; 1 is the paper's.
    """

    gamma: Annotated[float, Field(ge=0, le=1)]
    eta_s: NonNegative
    eta_p: NonNegative | None = None
    ascent_steps: Annotated[int, Field(ge=1)] = 10
    modified_gradient: bool = False
    pseudo_weight: NonNegative = 1.0
    perturbed_weight: NonNegative = 1.0

    @property
    def averaging(self) -> Literal["uniform"]:
        """The server takes the plain mean over the participants."""
        return "uniform"

    def check(self, local: LocalSettings) -> None:
        """FedReg's step is its own plain SGD."""
        for setting, given in (("momentum", local.momentum), ("weight_decay", local.weight_decay)):
            if given:
                raise ConfigError(
                    f"method: fedreg takes its own plain SGD steps; local.{setting} would have no effect: remove it"
                )
        if local.optimizer != "sgd":
            raise ConfigError(
                f"method: fedreg takes its own plain SGD steps; use local.optimizer: sgd, not {local.optimizer}"
            )

    def prepare(self, received: Received, own: Own, task: Task) -> Tensors:
        """Pseudo data (x_s, y_s) with soft labels of the received model; perturbed data x_p keep the true labels.

        x ← x + η·sign(∇_x L(x, y)), E times, without clamping to the pixel range (§3.1); both kinds side by side.
        """
        x, y = own.data.inputs, own.data.labels
        labels = torch.cat([y, y])
        ones = x.new_ones((len(x), *(1 for _ in x.shape[1:])))
        eta = torch.cat([ones * self.eta_s, ones * (0.01 * self.eta_s if self.eta_p is None else self.eta_p)])

        def loss(inputs: Tensor) -> Tensor:
            return task.losses(task.logits(received.params, inputs), labels).sum()

        inputs = torch.cat([x, x])
        for _ in range(self.ascent_steps):
            inputs = inputs + eta * grad(loss)(inputs).sign()
        x_s, x_p = inputs[: len(x)].clone(), inputs[len(x) :].clone()
        return {"x_s": x_s, "y_s": task.logits(received.params, x_s).softmax(-1), "x_p": x_p}

    def step(
        self, params: Tensors, batch: Batch, index: int, received: Received, own: Own, task: Task
    ) -> tuple[Tensors, Tensor]:
        """Descend at the slow parameters, then take back what hurts pseudo and perturbed data (Eq. 10, 11).

        ⟨θ − w_s·g_s − w, g_p⟩ is taken in two parts, so that all sums come from one pass over the parameters.
        """
        pseudo = task.part(Batch(own.prepared["x_s"], own.prepared["y_s"], own.data.weights), index)
        perturbed = task.part(Batch(own.prepared["x_p"], own.data.labels, own.data.weights), index)
        w = received.params
        slow = add(scale(self.gamma, params), scale(1 - self.gamma, w))
        loss, g = task.gradient(slow, batch)
        if self.modified_gradient:
            uniform = torch.full_like(pseudo.labels, 1 / pseudo.labels.shape[-1])
            _, semantic = task.gradient(slow, pseudo._replace(labels=uniform), training=False)
            g = add_scaled(g, -_ratio(*inners((g, semantic), (semantic, semantic))), semantic)
        params = add_scaled(params, -task.lr, g)

        middle = scale(0.5, add(params, w))
        _, g_s = task.gradient(middle, pseudo, training=False)
        _, g_p = task.gradient(middle, perturbed, training=False)
        moved = subtract(params, w)
        pairs = ((moved, g_s), (g_s, g_s), (moved, g_p), (g_s, g_p), (g_p, g_p))
        with_s, s_squared, with_p, s_with_p, p_squared = inners(*pairs)
        w_s = self.pseudo_weight * _ratio(with_s, s_squared).clamp(min=0)
        w_p = self.perturbed_weight * _ratio(with_p - w_s * s_with_p, p_squared).clamp(min=0)
        return add_scaled(add_scaled(params, -w_s, g_s), -w_p, g_p), loss


def _ratio(product: Tensor, squared: Tensor) -> Tensor:
    """⟨a, b⟩/‖b‖², and 0 where b is 0 (a model whose outputs are still constant has no gradient)."""
    safe = torch.where(squared > 0, squared, torch.ones_like(squared))
    return torch.where(squared > 0, product / safe, torch.zeros_like(squared))

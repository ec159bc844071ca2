"""The empirical Fisher information of a model on some examples."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import grad, vmap

from fedretain.losses import cross_entropy
from fedretain.methods.method import Batch, Task
from fedretain.tensors import Tensors, zeros_like

CHUNK = 32
"""Examples whose gradients are held at once."""


def fisher_diagonal(task: Task, params: Tensors, data: Batch) -> Tensors:
    """F = (1/n)·Σ_i (∂/∂θ log p_θ(y_i | x_i))², example by example, not of the batch's mean.

    Plain softmax, evaluation mode: running statistics neither change nor mix examples.
    """

    def loss(params: Tensors, inputs: Tensor, label: Tensor, weight: Tensor) -> Tensor:
        logits = task.logits(params, inputs.unsqueeze(0))
        return weight * cross_entropy(logits, label.unsqueeze(0), torch.ones_like(logits[0])).sum()

    weights = torch.ones(len(data.inputs), device=data.inputs.device) if data.weights is None else data.weights
    weights = weights.to(data.inputs.dtype)
    total = zeros_like(params)
    for at in range(0, len(weights), CHUNK):
        chunk = slice(at, at + CHUNK)
        gradients = vmap(grad(loss), in_dims=(None, 0, 0, 0))(
            params, data.inputs[chunk], data.labels[chunk], weights[chunk]
        )
        total = {name: value + gradients[name].square().sum(0) for name, value in total.items()}
    return {name: value / weights.sum() for name, value in total.items()}

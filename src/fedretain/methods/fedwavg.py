"""FedWAvg: clients whose knowledge the average forgets weigh more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fedretain.errors import ConfigError
from fedretain.methods.method import Method, Own, Received, Task
from fedretain.tensors import Tensors


@dataclass(frozen=True)
class FedWAvg(Method):
    """Weigh clients by the examples that the global model made them forget (fedwavg-paper, Alg. 1)."""

    alpha: Annotated[float, Field(ge=0, lt=1)]
    period: Annotated[int, Field(ge=1)] = 1
    freeze_classifier: bool = False

    def init_server(self, params: Tensors) -> Tensors:
        """Nothing to keep; a frozen classifier must exist."""
        if self.freeze_classifier and not any(self.freezes(name) for name in params):
            raise ConfigError("method: fedwavg's freeze_classifier needs a model whose last layer is called classifier")
        return {}

    def freezes(self, name: str) -> bool:
        """The classifier, when asked for (§6)."""
        return self.freeze_classifier and name.startswith("classifier.")

    def init_client(self, params: Tensors, own: Own) -> Tensors:
        """F_k = 1, and no local model yet that could have been right."""
        device = own.data.labels.device
        return {
            "count": torch.ones((), dtype=torch.int32, device=device),
            "known": torch.zeros((), dtype=torch.bool, device=device),
            "correct": torch.zeros(len(own.data.labels), dtype=torch.bool, device=device),
        }

    def prepare(self, received: Received, own: Own, task: Task) -> Tensors:
        """F_k: examples that the last local model had right and the received model has wrong (line 11)."""
        if received.round % self.period:
            return {"count": own.state["count"]}
        forgotten = own.state["correct"] & ~_correct(task, received.params, own)
        counted = forgotten.sum().to(own.state["count"].dtype)
        return {"count": torch.where(own.state["known"], counted, own.state["count"])}

    def finish(self, params: Tensors, received: Received, own: Own, task: Task) -> tuple[Tensors, Tensors]:
        """Keep which examples the local model has right; only the count leaves the client."""
        state = {
            "count": own.prepared["count"],
            "known": torch.ones_like(own.state["known"]),
            "correct": _correct(task, params, own),
        }
        return state, {"count": own.prepared["count"]}

    def weigh(self, weights: Tensor, extras: Tensors) -> Tensor:
        """p_k W_k / Σ p W with W = (1 − α) + α·N·F/ΣF (lines 13 to 15); nothing forgotten means W = 1."""
        count = extras["count"].to(weights.dtype)
        total = count.sum()
        share = torch.where(total > 0, len(count) * count / torch.where(total > 0, total, 1), torch.ones_like(count))
        new = weights * ((1 - self.alpha) + self.alpha * share)
        return new / new.sum()


def _correct(task: Task, params: Tensors, own: Own) -> Tensor:
    right = task.logits(params, own.data.inputs).argmax(-1) == own.data.labels
    return right if own.data.weights is None else right & (own.data.weights > 0)

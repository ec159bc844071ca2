"""FedCurv: elastic weight consolidation across clients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedretain.methods.fisher import fisher_diagonal
from fedretain.methods.method import Aggregate, Method, NonNegative, Own, Received, Task
from fedretain.tensors import Tensors, add, subtract, under_prefix, with_prefix, zeros_like


@dataclass(frozen=True)
class FedCurv(Method):
    """Hold on to the parameters that matter to the other clients (Shoham et al. 2019).

    Adds λ·Σ_{j≠k} (θ − θ_j)ᵀ diag(F_j) (θ − θ_j), F_j the Fisher diagonal of client j at its last local model θ_j. The
    server keeps Σ_j F_j and Σ_j F_j θ_j; the client takes its own share off.
    """

    lam: NonNegative

    def init_client(self, params: Tensors, own: Own) -> Tensors:
        """F_k = F_k θ_k = 0 until the client has taken part."""
        return _pair(zeros_like(params), zeros_like(params))

    def init_server(self, params: Tensors) -> Tensors:
        """Both sums are 0."""
        return _pair(zeros_like(params), zeros_like(params))

    def broadcast(self, server: Tensors) -> Tensors:
        """Participants receive both sums."""
        return server

    def penalty(self, params: Tensors, received: Received, own: Own) -> Tensor:
        """λ·(θᵀ diag(ΣF) θ − 2 θᵀ ΣFθ_j) over j ≠ k: the penalty up to a constant that has no gradient."""
        others = subtract(received.server, own.state)
        fisher, weighted = under_prefix("fisher", others), under_prefix("weighted", others)
        terms = [(fisher[n] * p.square() - 2 * weighted[n] * p).sum() for n, p in params.items()]
        return self.lam * torch.stack(terms).sum()

    def finish(self, params: Tensors, received: Received, own: Own, task: Task) -> tuple[Tensors, Tensors]:
        """F_k and F_k θ_k at the new local model; what changed goes to the server."""
        fisher = fisher_diagonal(task, params, own.data)
        new = _pair(fisher, {n: f * params[n] for n, f in fisher.items()})
        return new, subtract(new, own.state)

    def update_server(self, server: Tensors, aggregate: Aggregate) -> Tensors:
        """The sums over each client's latest upload."""
        return add(server, aggregate.total)


def _pair(fisher: Tensors, weighted: Tensors) -> Tensors:
    return with_prefix("fisher", fisher) | with_prefix("weighted", weighted)

"""Federated averaging: the method whose every hook is the default."""

from __future__ import annotations

from dataclasses import dataclass

from fedretain.methods.method import Method


@dataclass(frozen=True)
class FedAvg(Method):
    """Average the locally trained models, w ← Σ_k p_k w_k (McMahan et al. 2017)."""

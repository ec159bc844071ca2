"""The softmax family of local objectives: logits plus a function of the client's class counts.

Each loss takes logits [B, C], labels (class numbers [B], or soft labels [B, C] that sum to one) and the class
counts [C] of the client's *training* split, and returns one loss per example. All but the one with a floor are
``−f_y + log Σ_c v_c exp f_c``; they differ in the weights v_c that a class gets in the contrast term. They are
training losses only: evaluation always uses the plain softmax.
"""

from __future__ import annotations

import math
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from fedretain.errors import DataError


def cross_entropy(logits: Tensor, labels: Tensor, class_counts: Tensor) -> Tensor:
    """Plain cross-entropy: −f_y + log Σ_c exp f_c."""
    return contrast(logits) - score_of_label(logits, labels)


def floored_cross_entropy(
    logits: Tensor, labels: Tensor, class_counts: Tensor, *, floor: Annotated[float, Field(gt=0, lt=1)] = 1e-12
) -> Tensor:
    """Cross-entropy with a floor: −log(p_y + floor), p the softmax. FedReg's authors train with it.

    An example that the model is as sure to have wrong as that pulls no more: its gradient falls with p_y ÷ floor.
    Without it a client whose loss has jumped can run away.
    """
    log_p = logits - contrast(logits).unsqueeze(-1)
    return -score_of_label(torch.logaddexp(log_p, torch.full_like(log_p, math.log(floor))), labels)


def truncated_softmax(logits: Tensor, labels: Tensor, class_counts: Tensor) -> Tensor:
    """TCE: only the client's own classes stand in the denominator, −f_y + log Σ_{c: β_c>0} exp f_c (tce-paper §3)."""
    return contrast(logits, present_classes(class_counts)) - score_of_label(logits, labels)


def weighted_softmax(logits: Tensor, labels: Tensor, class_counts: Tensor) -> Tensor:
    """WSM: each class weighs as much as the client holds of it, −f_y + log Σ_c β_c exp f_c (wsm-paper Eq. 4)."""
    present = present_classes(class_counts)
    counts = class_counts.to(logits.dtype)
    proportions = counts / counts.sum(-1, keepdim=True)
    return contrast(logits + torch.where(present, proportions, 1).log(), present) - score_of_label(logits, labels)


def score_of_label(logits: Tensor, labels: Tensor) -> Tensor:
    """f_y, or Σ_c y_c f_c for soft labels."""
    if labels.is_floating_point():
        return (labels * logits).sum(-1)
    return logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def contrast(logits: Tensor, present: Tensor | None = None) -> Tensor:
    """log Σ_{c present} exp f_c.

    An absent class is replaced by −∞ *before* the sum, so its gradient is exactly zero whatever its logit is; weights
    are added to the logits as logarithms that are finite for every class, so no 0·∞ can make a NaN.
    """
    return torch.logsumexp(logits if present is None else logits.masked_fill(~present, -math.inf), dim=-1)


def present_classes(class_counts: Tensor) -> Tensor:
    """Which classes the client holds; a client that holds none has no such loss.

    The check needs the numbers: it is left out under ``vmap`` and tracing, and on accelerators, where it would wait for
    the device at every step (a federation never hands out all-zero counts).
    """
    present = class_counts > 0
    known = (
        class_counts.device.type == "cpu"
        and not torch._C._functorch.is_functorch_wrapped_tensor(class_counts)
        and not is_in_torch_dispatch_mode()
    )
    if known and not bool(present.any(-1).all()):
        raise DataError("all class counts are zero: a client without training data has no class proportions")
    return present

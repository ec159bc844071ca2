"""Relatives of WSM: cross-entropy on logits that are scaled or shifted by the client's class counts."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fedretain.losses.softmax import contrast, present_classes, score_of_label


def restricted_softmax(
    logits: Tensor, labels: Tensor, class_counts: Tensor, *, alpha: Annotated[float, Field(ge=0, le=1)] = 0.5
) -> Tensor:
    """FedRS: cross-entropy on α_c·f_c, α_c = 1 for the client's classes and α for absent ones (Li & Zhan 2021)."""
    present = present_classes(class_counts)
    scaled = torch.where(present, logits, alpha * logits)
    return contrast(scaled) - score_of_label(scaled, labels)


def calibrated_softmax(
    logits: Tensor, labels: Tensor, class_counts: Tensor, *, tau: Annotated[float, Field(ge=0)] = 1.0
) -> Tensor:
    """FedLC: cross-entropy on f_c − τ·n_c^(−1/4); absent classes drop out, as in TCE (Zhang et al. 2022)."""
    present = present_classes(class_counts)
    counts = torch.where(present, class_counts, 1).to(logits.dtype)
    shifted = logits - torch.where(present, tau * counts ** (-0.25), 0)
    return contrast(shifted, present) - score_of_label(shifted, labels)


def balanced_softmax(logits: Tensor, labels: Tensor, class_counts: Tensor) -> Tensor:
    """Balanced softmax: cross-entropy on f_c + log n_c, which is WSM up to a constant per class (Ren et al. 2020)."""
    present = present_classes(class_counts)
    shifted = logits + torch.where(present, class_counts, 1).to(logits.dtype).log()
    return contrast(shifted, present) - score_of_label(shifted, labels)

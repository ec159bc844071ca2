"""Local objectives: functions ``(logits, labels, class_counts) -> per-example loss``.

Keyword-only arguments of a loss are its hyper-parameters in the experiment file.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import Tensor

from fedretain.losses.calibrated import balanced_softmax, calibrated_softmax, restricted_softmax
from fedretain.losses.softmax import cross_entropy, floored_cross_entropy, truncated_softmax, weighted_softmax

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]

LOSSES: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {
        "ce": cross_entropy,
        "tce": truncated_softmax,
        "wsm": weighted_softmax,
        "fedrs": restricted_softmax,
        "fedlc": calibrated_softmax,
        "balanced": balanced_softmax,
        "ce_floor": floored_cross_entropy,
    }
)

__all__ = [
    "LOSSES",
    "Loss",
    "balanced_softmax",
    "calibrated_softmax",
    "cross_entropy",
    "floored_cross_entropy",
    "restricted_softmax",
    "truncated_softmax",
    "weighted_softmax",
]

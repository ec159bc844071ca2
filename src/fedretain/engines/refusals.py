"""What a stack of clients stops for, and which of them is to blame."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedretain.engines.engine import batch_norm_advice
from fedretain.engines.stack import Stack
from fedretain.errors import TrainingError
from fedretain.tensors import Tensors


def refuse_single_examples(clients: Stack, round: int) -> None:
    """Batch norm over maps of one pixel has no variance of one example; padding must not hide that."""
    alone = np.asarray((clients.plan.lengths == 1).any(0))
    if not alone.any():
        return
    member = clients.members[int(np.argmax(alone))]
    error = ValueError("Expected more than 1 value per channel when training")
    raise TrainingError(
        f"local training failed: {error}{batch_norm_advice(error)}",
        round=round,
        client=member.client,
        which=member.which,
    )


def refuse_divergence(history: Tensor, params: Tensors, clients: Stack, round: int) -> None:
    """Stop at the first loss or parameter that is no number, before it reaches the server.

    ``history`` are the losses [steps, clients], ``params`` the local models or their changes [clients, …].
    """
    sums = torch.stack([history.sum(0), *(value.flatten(1).sum(1) for value in params.values())])
    if bool(sums.isfinite().all()):
        return
    finite = torch.stack(
        [history.isfinite().all(0), *(value.flatten(1).isfinite().all(1) for value in params.values())]
    ).all(0)
    if bool(finite.all()):
        return
    client = int(torch.nonzero(~finite)[0])
    bad = torch.nonzero(~history[:, client].isfinite()).flatten().tolist()
    what = (
        f"the training loss became {history[bad[0], client].item()} at local step {bad[0] + 1}"
        if bad
        else "the local parameters overflowed in the last step"
    )
    member = clients.members[client]
    lr = member.world.local.lr_of_round(round)
    raise TrainingError(
        f"training diverged: {what}; lower local.lr (it is {lr:g}) or look for broken inputs",
        round=round,
        client=member.client,
        which=member.which,
    )

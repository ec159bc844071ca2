"""Norms written out in simple operations give what PyTorch's own give, gradients included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from fedretain.engines.norms import Padding, with_functional_norms

CLIENTS, BATCH, CHANNELS = 3, 5, 4


def norm_of(kind: str, *, affine: bool = True) -> nn.Module:
    """A norm in float64 whose factors and offsets are not the initial 1 and 0."""
    norm: nn.Module = nn.GroupNorm(2, CHANNELS, affine=affine)
    if kind == "batch":
        norm = nn.BatchNorm2d(CHANNELS, affine=affine, track_running_stats=False)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
    return norm.double()


def explicit(norm: nn.Module, weights: Tensor | None = None) -> nn.Module:
    """The same norm, written out."""
    padding = Padding()
    padding.explicit, padding.weights = True, weights
    return with_functional_norms(norm, padding)


def random(*shape: int) -> Tensor:
    """Values whose mean is far from 0."""
    return 3 + torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def both(norm: nn.Module, maps: Tensor, factor: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Σ factor·norm(maps), its gradients with respect to the maps and the norm's parameters."""
    params = {name: p.detach() for name, p in norm.named_parameters()}
    buffers = {name: b.clone() for name, b in norm.named_buffers()}

    def objective(maps: Tensor, params: dict[str, Tensor]) -> Tensor:
        total: Tensor = (functional_call(norm, {**params, **buffers}, (maps,)) * factor).sum()
        return total

    (of_maps, of_params), value = grad_and_value(objective, argnums=(0, 1))(maps, params)
    return value, of_maps, of_params


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("kind", ["batch", "group"])
def test_values_and_gradients(kind: str, affine: bool) -> None:
    """Float64, so that the two ways to add up agree to 12 digits."""
    maps, factor = random(BATCH, CHANNELS, 6, 6), random(BATCH, CHANNELS, 6, 6)
    norm = norm_of(kind, affine=affine)
    expected = both(norm, maps, factor)
    torch.testing.assert_close(both(explicit(norm), maps, factor), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["batch", "group"])
def test_many_clients(kind: str) -> None:
    """Under ``vmap``, recorded or not, every client is normalised by its own statistics."""
    maps, factor = random(CLIENTS, BATCH, CHANNELS, 6, 6), random(CLIENTS, BATCH, CHANNELS, 6, 6)
    norm = norm_of(kind)
    one_by_one = [both(norm, *each) for each in zip(maps, factor, strict=True)]
    written = explicit(norm)
    together = vmap(lambda maps, factor: both(written, maps, factor))
    with torch.no_grad():
        recorded = make_fx(together)(maps, factor)
    for value, of_maps, of_params in (together(maps, factor), recorded(maps, factor)):
        for client, expected in enumerate(one_by_one):
            found = (value[client], of_maps[client], {name: p[client] for name, p in of_params.items()})
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_padding_is_left_out() -> None:
    """Two of five examples are padding: statistics and gradients are those of the other three."""
    maps, factor = random(BATCH, CHANNELS, 6, 6), random(BATCH, CHANNELS, 6, 6)
    real = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    norm, kept = norm_of("batch"), real > 0
    expected = both(norm, maps[kept], factor[kept])
    found = both(explicit(norm, real), maps, factor * real.reshape(-1, 1, 1, 1))
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1][kept], expected[1])
    torch.testing.assert_close(found[1][~kept], torch.zeros_like(found[1][~kept]))
    torch.testing.assert_close(found[2], expected[2])


def test_the_gradient_of_a_batch_norm_takes_two_passes() -> None:
    """One over gradient and maps for the sums, one for the result: no sum is taken of what depends on another sum.

    Recorded, every sum over all examples in the backward pass reads the given gradient ``factor``, maps or their
    statistics, and none of them a tensor of the maps' size that itself came from such a sum.
    """
    maps, factor = random(BATCH, CHANNELS, 6, 6), random(BATCH, CHANNELS, 6, 6)
    norm = explicit(norm_of("batch"))
    with torch.no_grad():
        graph = make_fx(lambda maps, factor: both(norm, maps, factor)[1:])(maps, factor).graph
    depth: dict[torch.fx.Node, int] = {}
    for node in graph.nodes:
        given = max((depth[argument] for argument in node.all_input_nodes), default=0)
        sums = node.target in (torch.ops.aten.sum.dim_IntList, torch.ops.aten.var_mean.correction)
        depth[node] = given + int(sums and node.all_input_nodes[0].meta["val"].numel() == maps.numel())
    (output,) = (node for node in graph.nodes if node.op == "output")
    # statistics (1), then the sums of the backward pass (2)
    assert depth[output] == 2

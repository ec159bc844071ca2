from __future__ import annotations

import pytest
import torch
from torch import nn

from fedretain.errors import ConfigError
from fedretain.models.densenet121 import DenseLayer, DenseNet121

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_parameter_count_of_the_paper(norm: str) -> None:
    """3×224×224, 1000 classes: the well-known 7,978,856; group norm has as many parameters as batch norm.

    Stem 49·3·64 + 128 = 9,536. A dense layer on c channels: 2c + 128c + 256 + 9·128·32 = 130c + 37,120.
    Block 1: c = 64, 96, …: Σc = 864, 6 layers: 335,040; transition 2·256 + 256·128 = 33,280.
    Block 2: Σc = 3,648, 12 layers: 919,680; transition 2·512 + 512·256 = 132,096.
    Block 3: Σc = 14,976, 24 layers: 2,837,760; transition 2·1,024 + 1,024·512 = 526,336.
    Block 4: Σc = 12,032, 16 layers: 2,158,080; norm 2·1,024 = 2,048; fc 1,024·1,000 + 1,000 = 1,025,000.
    """
    with torch.device("meta"):
        model = DenseNet121((3, 224, 224), 1000, norm=norm)  # type: ignore[arg-type]
    assert sum(p.numel() for p in model.parameters()) == 7_978_856


def test_121_weight_layers() -> None:
    """Stem, 2 · (6 + 12 + 24 + 16) = 116 in dense layers, 3 transitions, 1 classifier."""
    with torch.device("meta"):
        model = DenseNet121((3, 224, 224), 10)
    assert sum(isinstance(m, nn.Conv2d | nn.Linear) for m in model.modules()) == 121


@pytest.mark.parametrize(("side", "last"), [(64, 2), (63, 7), (32, 4)])
def test_stem_follows_the_image_size(side: int, last: int) -> None:
    """64 pixels: 32 (stride 2), 16 (pool), 8, 4, 2 after the transitions; below 64 the transitions alone:

    63, 31, 15, 7 and 32, 16, 8, 4. The last norm sees 32 · growth = 64 channels.
    """
    model = DenseNet121((1, side, side), 10, growth=2).eval()
    shapes = []
    model.norm.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(output.shape)))
    model(torch.zeros(1, 1, side, side))
    assert shapes == [(1, 64, last, last)]


def test_a_dense_layer_keeps_its_input_and_appends() -> None:
    layer = DenseLayer(6, 2, norm="batch", groups=1)
    maps = torch.randn(2, 6, 4, 4, generator=torch.Generator().manual_seed(0))
    output = layer(maps)
    assert output.shape == (2, 8, 4, 4)
    assert torch.equal(output[:, :6], maps)


def test_no_batch_statistics_with_group_norm() -> None:
    model = DenseNet121((3, 32, 32), 10, norm="group", growth=4, groups=4)
    assert list(model.buffers()) == []
    assert {m.num_groups for m in model.modules() if isinstance(m, nn.GroupNorm)} == {4}


def test_groups_must_divide_growth() -> None:
    with pytest.raises(ConfigError, match="groups = 8 is not allowed with growth = 12"):
        DenseNet121((3, 32, 32), 10, norm="group", growth=12, groups=8)

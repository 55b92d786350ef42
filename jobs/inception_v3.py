"""Inception-V3 as an ordinary PyTorch module: the worked example of ``raypipe graph`` and ``raypipe place``.

Source: Szegedy et al. 2016, "Rethinking the Inception Architecture for Computer Vision", Table 1 and Figures 5 to 7,
without the auxiliary classifier. Channel counts of the mixed blocks are those of the authors' released model.
"""

import torch
from torch import Tensor, nn


class Convolution(nn.Sequential):
    """Convolution without bias, batch norm, ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel, stride: int = 1, padding=0) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False),
            nn.BatchNorm2d(outputs, eps=0.001),
            nn.ReLU(),
        )


class Branches(nn.Module):
    """Branches over one input, their results joined along the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def pooled(inputs: int, outputs: int) -> nn.Module:
    """Average pooling, then a 1x1 convolution."""
    return nn.Sequential(nn.AvgPool2d(3, 1, 1), Convolution(inputs, outputs, 1))


def mixed_35(inputs: int, pool: int) -> nn.Module:
    """Figure 5: two 3x3 convolutions in place of a 5x5, on a grid of 35 x 35."""
    return Branches(
        Convolution(inputs, 64, 1),
        nn.Sequential(Convolution(inputs, 48, 1), Convolution(48, 64, 5, padding=2)),
        nn.Sequential(Convolution(inputs, 64, 1), Convolution(64, 96, 3, padding=1), Convolution(96, 96, 3, padding=1)),
        pooled(inputs, pool),
    )


def reduce_to_17() -> nn.Module:
    """Figure 10: strided convolutions beside a strided pooling."""
    return Branches(
        Convolution(288, 384, 3, 2),
        nn.Sequential(Convolution(288, 64, 1), Convolution(64, 96, 3, padding=1), Convolution(96, 96, 3, 2)),
        nn.MaxPool2d(3, 2),
    )


def mixed_17(width: int) -> nn.Module:
    """Figure 6: 7x7 convolutions as 1x7 and 7x1, on a grid of 17 x 17."""
    row, column = ((1, 7), (0, 3)), ((7, 1), (3, 0))

    def chain(*steps) -> nn.Module:
        layers, inputs = [], 768
        for outputs, (kernel, padding) in steps:
            layers.append(Convolution(inputs, outputs, kernel, padding=padding))
            inputs = outputs
        return nn.Sequential(*layers)

    one = (1, 0)
    return Branches(
        Convolution(768, 192, 1),
        chain((width, one), (width, row), (192, column)),
        chain((width, one), (width, column), (width, row), (width, column), (192, row)),
        pooled(768, 192),
    )


def reduce_to_8() -> nn.Module:
    """As ``reduce_to_17``, from 17 x 17 to 8 x 8."""
    return Branches(
        nn.Sequential(Convolution(768, 192, 1), Convolution(192, 320, 3, 2)),
        nn.Sequential(
            Convolution(768, 192, 1),
            Convolution(192, 192, (1, 7), padding=(0, 3)),
            Convolution(192, 192, (7, 1), padding=(3, 0)),
            Convolution(192, 192, 3, 2),
        ),
        nn.MaxPool2d(3, 2),
    )


def mixed_8(inputs: int) -> nn.Module:
    """Figure 7: filter banks that fan out into 1x3 and 3x1, on a grid of 8 x 8."""

    def fan(inputs: int) -> nn.Module:
        return Branches(
            Convolution(inputs, 384, (1, 3), padding=(0, 1)), Convolution(inputs, 384, (3, 1), padding=(1, 0))
        )

    return Branches(
        Convolution(inputs, 320, 1),
        nn.Sequential(Convolution(inputs, 384, 1), fan(384)),
        nn.Sequential(Convolution(inputs, 448, 1), Convolution(448, 384, 3, padding=1), fan(384)),
        pooled(inputs, 192),
    )


class InceptionV3(nn.Module):
    """Images of 3 x 299 x 299 (75 x 75 at least) to scores of ``classes``."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            Convolution(3, 32, 3, 2), Convolution(32, 32, 3), Convolution(32, 64, 3, padding=1), nn.MaxPool2d(3, 2),
            Convolution(64, 80, 1), Convolution(80, 192, 3), nn.MaxPool2d(3, 2),
        )  # fmt: skip
        self.mixed = nn.Sequential(
            mixed_35(192, 32), mixed_35(256, 64), mixed_35(288, 64), reduce_to_17(),
            mixed_17(128), mixed_17(160), mixed_17(160), mixed_17(192), reduce_to_8(), mixed_8(1280), mixed_8(2048),
        )  # fmt: skip
        self.head = nn.Linear(2048, classes)

    def forward(self, image: Tensor) -> Tensor:
        features = self.mixed(self.stem(image))
        return self.head(features.mean((2, 3)))


def build(classes: int = 1000) -> nn.Module:
    """What ``model: {import: "jobs.inception_v3:build"}`` calls."""
    return InceptionV3(classes)

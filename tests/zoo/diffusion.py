"""A small U-Net that predicts noise under a condition, with outputs of the classes that libraries use for them."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, TEXT, STEPS = 8, 6, 10


@dataclass
class PlainOutput:
    sample: Tensor
    middle: Tensor | None = None


@dataclass(frozen=True)
class FrozenOutput:
    sample: Tensor
    middle: Tensor | None = None


class NamedOutput(NamedTuple):
    sample: Tensor
    middle: Tensor | None = None


@dataclass
class OrderedOutput(OrderedDict[str, Any]):
    """A dataclass and an ordered dict at the same time, as diffusers' outputs are."""

    sample: Tensor
    middle: Tensor | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


OUTPUTS = {"plain": PlainOutput, "frozen": FrozenOutput, "named": NamedOutput, "ordered": OrderedOutput}


def time_embedding(timestep: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Sines and cosines of the timestep, ``[samples, width]``."""
    rates = torch.exp(-math.log(100.0) * torch.arange(width // 2, dtype=dtype) / (width // 2))
    angles = timestep[:, None].to(dtype) * rates
    return torch.cat([angles.sin(), angles.cos()], -1)


class Residual(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(2, inside), nn.Conv2d(inside, outside, 3, padding=1)
        self.time, self.skip = nn.Linear(WIDTH, outside), nn.Conv2d(inside, outside, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return self.conv(F.silu(self.norm(x))) + self.time(F.silu(time))[:, :, None, None] + self.skip(x)


class CrossAttention(nn.Module):
    """Pixels attend to the text; returns a structure of its own, and looks at values if ``branches``."""

    def __init__(self, kind: str, branches: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attend = nn.MultiheadAttention(WIDTH, 2, kdim=TEXT, vdim=TEXT, batch_first=True)
        self.kind, self.branches = kind, branches

    def forward(self, x: Tensor, text: Tensor) -> Any:
        pixels = x.flatten(2).transpose(1, 2)
        result = self.attend(self.norm(pixels), text, text, need_weights=False)[0]
        if self.branches and not bool(result.isfinite().all()):
            result = torch.zeros_like(result)
        return OUTPUTS[self.kind](sample=(pixels + result).transpose(1, 2).unflatten(2, x.shape[2:]))


class UNet(nn.Module):
    """Down, across the text, up again with a skip.

    Args:
        kind: class of the output.
        branches: the part in the middle looks at values, so that it runs as it is.
    """

    def __init__(self, kind: str = "ordered", branches: bool = False) -> None:
        super().__init__()
        self.enter, self.down = nn.Conv2d(3, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, WIDTH, 3, 2, 1)
        self.time = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.first, self.last = Residual(WIDTH, WIDTH), Residual(2 * WIDTH, WIDTH)
        self.across = CrossAttention(kind, branches)
        self.up, self.leave = nn.ConvTranspose2d(WIDTH, WIDTH, 2, 2), nn.Conv2d(WIDTH, 3, 3, padding=1)
        self.kind = kind

    def forward(self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor) -> Any:
        time = self.time(time_embedding(timestep, WIDTH, sample.dtype))
        x = self.enter(sample)
        y = self.first(self.down(x), time)
        y = self.across(y, encoder_hidden_states).sample
        return OUTPUTS[self.kind](self.leave(self.last(torch.cat([x, self.up(y)], 1), time)), y)


def noise_prediction(model: Any, batch: Mapping[str, Tensor], drawn: bool = False) -> Tensor:
    """Squared error of the predicted noise, one loss a sample; the noise is the data's, or ``drawn`` anew."""
    clean = batch["clean"]
    noise = torch.randn_like(clean) if drawn else batch["noise"]
    kept = torch.cos(0.5 * math.pi * (batch["timestep"] + 1) / (STEPS + 1)).to(clean.dtype)[:, None, None, None]
    noisy = kept * clean + (1 - kept**2).sqrt() * noise
    result = model(noisy, batch["timestep"], encoder_hidden_states=batch["text"]).sample
    return (result - noise).square().mean((1, 2, 3))


def pictures(samples: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(2)
    return {
        "clean": torch.randn(samples, 3, 8, 8, generator=draw, dtype=torch.float64),
        "noise": torch.randn(samples, 3, 8, 8, generator=draw, dtype=torch.float64),
        "timestep": torch.randint(STEPS, (samples,), generator=draw),
        "text": torch.randn(samples, 5, TEXT, generator=draw, dtype=torch.float64),
    }

"""What people write beside plain layers: hooks, derivatives in a forward, checkpoints, draws of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

WIDTH, CLASSES, TOKENS = 16, 5, 40


class Body(nn.Module):
    """Features to logits, by two linear layers; the classes below differ in one thing each."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.inner, self.head = nn.Linear(12, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        return self.head(self.inner(self.read(features)).tanh().mean(1))


def doubled(module: nn.Module, given: Any, made: Any) -> Any:
    """A full backward hook."""
    return tuple(g if g is None else 2 * g for g in given)


class ForwardHooks(Body):
    def __init__(self) -> None:
        super().__init__()
        self.read.register_forward_hook(lambda module, given, found: 2 * found)
        self.inner.register_forward_pre_hook(lambda module, given: (given[0] + 1,))


class BackwardHook(Body):
    def __init__(self) -> None:
        super().__init__()
        self.inner.register_full_backward_hook(doubled)


class Halving(nn.Module):
    """A loop of as many turns as values say."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        turns = 0
        while float(x.detach().norm()) > 0.5 and turns < 5:
            x, turns = self.turn(x).tanh() * 0.5, turns + 1
        return x


class HooksAsItIs(Body):
    """All kinds of hooks on a module that runs as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Halving()
        self.inner.register_forward_hook(lambda module, given, found: 2 * found)
        self.inner.register_forward_pre_hook(lambda module, given: (given[0] + 1,))
        self.inner.register_full_backward_hook(doubled)


class TensorHook(Body):
    def forward(self, features: Tensor) -> Tensor:
        x = self.read(features)
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        return self.head(self.inner(x).tanh().mean(1))


class ParameterHook(Body):
    def __init__(self) -> None:
        super().__init__()
        self.inner.weight.register_hook(lambda gradient: 3 * gradient)


class Checkpoints(Body):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, features: Tensor) -> Tensor:
        return self.head(checkpoint(self.inner, self.read(features), use_reentrant=self.use_reentrant).tanh().mean(1))


class Mapped(nn.Module):
    """torch.func.vmap over a tensor of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.head = nn.Linear(12, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.weights = nn.Parameter(torch.randn(3, WIDTH, WIDTH) * 0.1)

    def forward(self, features: Tensor) -> Tensor:
        x = self.read(features)
        return self.head(torch.func.vmap(lambda weight: x @ weight)(self.weights).mean((0, 2)))


class Forces(nn.Module):
    """The derivative of an energy by the inputs, as force fields have it."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.energy, self.head = nn.Linear(12, WIDTH), nn.Linear(WIDTH, 1), nn.Linear(12, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        with torch.enable_grad():
            x = features.detach().requires_grad_()
            energy = self.energy(self.read(x).tanh()).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return self.head(force.mean(1))


class Routed(nn.Module):
    """Experts as people write them: each computes the tokens that chose it, so sizes depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.route = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        shape, x = x.shape, x.flatten(0, 1)
        weights, chosen = self.route(x).softmax(-1).topk(2, -1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            result.index_add_(0, token, expert(x[token]) * weights[token, place, None])
        return (x + result).reshape(shape)


class MaskedExperts(Body):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Routed()


class Chosen(Body):
    """The same in the model's own forward: only some places are computed."""

    def forward(self, features: Tensor) -> Tensor:
        x = self.read(features)
        chosen = x[..., 0] > 0
        result = torch.zeros_like(x)
        result[chosen] = self.inner(x[chosen])
        return self.head(result.mean(1))


class Keywords(Body):
    def forward(self, **rows: Tensor) -> Tensor:
        return super().forward(rows["features"])


class DrawnBuffer(nn.Module):
    """A buffer that torch, numpy or both draw: each process must have the same."""

    def __init__(self, branches: bool = False) -> None:
        super().__init__()
        self.branches = branches
        self.register_buffer("waves", torch.randn(12, WIDTH) + torch.from_numpy(np.random.randn(12, WIDTH)))
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        x = (features @ self.waves.to(features.dtype)).sin()
        if self.branches and not bool((x > 2).any()):
            x = x + 1
        return self.head(self.inner(x).mean(1))


class DrawnByNumpy(Body):
    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.head.weight.copy_(torch.from_numpy(np.random.randn(CLASSES, WIDTH)))


class Lazy(Body):
    def __init__(self) -> None:
        super().__init__()
        self.read = nn.LazyLinear(WIDTH)


class CountsAsItIs(Body):
    """It runs as it is, and counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, features: Tensor) -> Tensor:
        if bool((features > -1e9).all()):
            self.calls += 1
        return super().forward(features) * self.calls


@dataclass
class Found:
    logits: Tensor
    more: dict[str, Any]
    number: int


class Structured(Body):
    """A dataclass with a nested dict, whole numbers, and results without a gradient."""

    def forward(self, features: Tensor) -> Found:
        x = self.read(features)
        top, places = x.topk(3, -1)
        logits = self.head(self.inner(x).tanh().mean(1)) + (x.gather(-1, places) * top).mean((1, 2))[:, None]
        return Found(logits, {"inner": [x, {"places": places}]}, 3)


class Spectrum(nn.Module):
    """Complex numbers, also as a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.head = nn.Linear(12, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex128))

    def forward(self, features: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.read(features), dim=-1) * self.filter
        return self.head(torch.fft.irfft(spectrum, n=WIDTH, dim=-1).mean(1))


class Projected(nn.Module):
    """An LSTM in both directions whose outputs are projected."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(12, WIDTH, 2, batch_first=True, bidirectional=True, proj_size=6)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        result, (last, _) = self.recurrent(features)
        return self.head(result[:, -1]) + last.sum(0).mean(-1, keepdim=True)


class Packed(nn.Module):
    """A recurrent layer over packed sequences."""

    def __init__(self, kind: str = "GRU") -> None:
        super().__init__()
        make: Callable[..., nn.Module] = getattr(nn, kind)
        self.embed, self.recurrent = nn.Embedding(TOKENS, WIDTH), make(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, input_ids: Tensor) -> Tensor:
        lengths = (input_ids > 5).sum(1).clamp(min=1)
        rows = pack_padded_sequence(self.embed(input_ids), lengths.cpu(), batch_first=True, enforce_sorted=False)
        result, _ = pad_packed_sequence(self.recurrent(rows)[0], batch_first=True, total_length=input_ids.shape[1])
        return self.head(result.mean(1))


class WritesInPlace(Body):
    """Writes to its input, through views, and by masks."""

    def forward(self, features: Tensor) -> Tensor:
        features.mul_(2)[:, 0] = 0
        x = self.read(features).clone()
        x.view(len(x), -1)[:, ::2] *= 2
        x.transpose(1, 2)[:, 0] += 1
        x[x < 0] = 0.1
        return self.head(self.inner(x).mean(1))


class ImageTokens(nn.Module):
    """Puts the features of an image where its tokens are, as LLaVA does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.see, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(6, WIDTH), nn.Linear(WIDTH, TOKENS)

    def forward(self, input_ids: Tensor, patches: Tensor) -> Tensor:
        features = self.see(patches).flatten(0, 1)
        places = (input_ids == TOKENS - 1).unsqueeze(-1)
        return self.head(self.embed(input_ids).masked_scatter(places, features))

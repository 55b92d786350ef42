"""The key under which a compiled stage is stored: a digest of all that its graphs follow from.

That is the stage's modules with their settings, code and parameters, what they are given, the pieces wanted, the
sources of raypipe that make the graphs, torch's version, Inductor's settings, and the host's processor and compiler.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

import raypipe
from raypipe.models.task import Task
from raypipe.runtime.compiled.inductor.cache import VARIABLE
from raypipe.runtime.compiled.needs import StageNeeds
from raypipe.runtime.setup.setup import Setup
from raypipe.runtime.stage.stage import StageModule

SOURCES = (
    "capture",
    "models",
    "tensor",
    "runtime/backward",
    "runtime/compiled",
    "runtime/executor",
    "runtime/setup",
    "runtime/stage",
)
"""Rooms of raypipe whose code ends up in the graphs, or reads them."""

SETTINGS = "TORCHINDUCTOR_"
"""How environment variables begin that change what Inductor makes; where its cache lies is no such change."""


def stage_key(setup: Setup, stage: int, module: StageModule, needs: StageNeeds) -> str:
    """Return the key of one stage."""
    digest = hashlib.sha256()
    model = json.dumps(setup.job.model.model_dump(mode="json"), sort_keys=True)
    for one in (*_host(), _sources(), model, str(setup.job.train.dtype), str(setup.cut[stage]), *_modules(module)):
        digest.update(one.encode() + b"\0")
    for example in (*needs.examples, *needs.validation):
        loss = _described(example.loss)
        said = (example.samples, example.arrived, sorted(example.inputs.items()), example.segment, example.autocast)
        digest.update(repr((said, loss, example.lengths, example.training)).encode() + b"\0")
    needed = needs.needed
    wanted = (needed.joint, needed.split, needed.recomputes, needed.keeps, needs.budget)
    digest.update(repr((wanted, module.segments, module.takes_gradient, module.gives_gradient)).encode())
    return digest.hexdigest()


def _host() -> Iterator[str]:
    yield from (torch.__version__, sys.version, platform.machine(), torch.backends.cpu.get_cpu_capability())
    yield from (os.environ.get("CXX", ""), str(torch.are_deterministic_algorithms_enabled()))
    yield from (f"{name}={set_to}" for name, set_to in sorted(os.environ.items())
                if name.startswith(SETTINGS) and name != VARIABLE)  # fmt: skip


@cache
def _sources() -> str:
    root = Path(raypipe.__file__).parent
    digest = hashlib.sha256()
    for room in SOURCES:
        for file in sorted((root / room).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _described(value: Any) -> str:
    """Describe a loss by its kind and its settings, alike in every process: no addresses, no order of a set."""
    match value:
        case None | bool() | int() | float() | str() | bytes():
            return repr(value)
        case Mapping():
            return repr(sorted((_described(name), _described(one)) for name, one in value.items()))
        case set() | frozenset():
            return repr(sorted(map(_described, value)))
        case list() | tuple():
            return repr([_described(one) for one in value])
        case Task():
            return f"{type(value).__module__}.{type(value).__qualname__} {_described(vars(value))}"
    return repr(value)


def _modules(module: nn.Module) -> Iterator[str]:
    """Describe modules: what they are, their settings, the code of captured ones, their tensors."""
    for path, one in module.named_modules():
        settings = {name: v for name, v in vars(one).items() if isinstance(v, bool | int | float | str | None)}
        yield f"{path} {type(one).__module__}.{type(one).__qualname__} {sorted(settings.items())}"
        if isinstance(one, fx.GraphModule):
            yield str(one.code)
    for path, parameter in module.named_parameters():
        yield f"{path} {tuple(parameter.shape)} {parameter.stride()} {parameter.dtype} {parameter.requires_grad}"
    for path, buffer in module.named_buffers():
        yield f"{path} {tuple(buffer.shape)} {buffer.stride()} {buffer.dtype}"

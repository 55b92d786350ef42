"""Modules that run as they are and draw random numbers: the generator is seeded before each call.

The draws inside such a module are not operations of the graph, so they cannot be keyed by sample. They follow from
(seed, step, first sample of the micro-batch, place): the same on every device, in every schedule, after every resume
and in a recomputed forward, but other ones for another size of micro-batch. In evaluation the module runs in evaluation
mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from raypipe.models.keyed_random import current_keys, fold64, in_training


class SeededModule(nn.Module):
    """Calls ``part`` with random numbers of place ``site``."""

    def __init__(self, part: nn.Module, site: int) -> None:
        super().__init__()
        self._part = (part,)  # not registered: the graph holds it under its own path
        self.site = site

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        (part,) = self._part
        keys = current_keys()
        if not in_training():
            with _evaluating(part):
                return part(*args, **kwargs)
        devices = {p.device for p in part.parameters() if p.device.type == "cuda"}
        with torch.random.fork_rng(devices=[d.index or 0 for d in devices]):
            if keys is not None:
                torch.manual_seed(fold64(keys.samples[0] if keys.samples else keys.shared, self.site) >> 1)
            return part(*args, **kwargs)


@contextmanager
def _evaluating(part: nn.Module) -> Iterator[None]:
    modes = [(inner, inner.training) for inner in part.modules()]
    part.eval()
    try:
        yield
    finally:
        for inner, training in modes:
            inner.training = training

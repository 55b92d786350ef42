"""The whole model, eager and unmodified, on the whole mini-batch; its dropout draws from the same keys.

Random operations are counted in the order in which eager PyTorch runs them. Attention with dropout is written out here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypipe.data import known_fields, open_data
from raypipe.job import JobSpec
from raypipe.models import LayeredModel, build_model, random_keys
from raypipe.models.keyed_random import KeyedDropout
from tests.runtime.runs.one_device import Outcome

Loss = Callable[[Any, dict[str, Tensor]], Tensor]
"""The loss that a whole model has of some rows."""


@contextmanager
def keyed(seed: int, step: int, rows: int) -> Iterator[None]:
    """Dropout in this block draws by key; the n-th place that drops is site n."""
    sites = iter(range(1_000_000))
    plain, attention = F.dropout, F.scaled_dot_product_attention

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return KeyedDropout(p, next(sites))(x) if training and p else x

    def attend(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        if not dropout_p:
            return attention(q, k, v, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
        groups = q.shape[1] // k.shape[1]
        k, v = (torch.stack([t] * groups, 2).flatten(1, 2) for t in (k, v))
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * (scale or 1 / math.sqrt(q.shape[-1]))
        if is_causal:
            attn_mask = torch.tril(torch.ones(scores.shape[-2:], dtype=torch.bool))
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(scores).masked_fill(~attn_mask, float("-inf"))
        weights = (scores if attn_mask is None else scores + attn_mask).softmax(-1)
        return torch.einsum("bhqk,bhkd->bhqd", dropout(weights, dropout_p), v)

    F.dropout, F.scaled_dot_product_attention = dropout, attend
    try:
        with random_keys(seed, step, range(rows), training=True):
            yield
    finally:
        F.dropout, F.scaled_dot_product_attention = plain, attention


def with_values(module: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """The module with these parameters, by the names it gives them itself; a tied one by any of its names."""
    with torch.no_grad():
        left = set(values)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if name in values:
                parameter.copy_(values[name])
                left.discard(name)
    assert not left, f"the module has no {left}"
    return module


def as_started(job: JobSpec, data: Path) -> tuple[nn.Module, Callable[[str, int], dict[str, Tensor]]]:
    """The whole module with the values that stages start with, and the rows of a split's mini-batch."""
    model = build_model(job, known_fields(data))
    start = model.build_stage(range(model.count), job.train.seed).named()
    dataset = open_data(data, model.task)

    def rows(split: str, step: int) -> dict[str, Tensor]:
        read = dataset.batch(split, job.train.seed, step, job.train.batch)
        return {name: t.double() if t.is_floating_point() else t for name, t in read.items()}

    return with_values(model.values.build(), {name: p.detach() for name, p in start.items()}), rows


def eager_training(
    job: JobSpec, data: Path, loss_of: Loss, microbatch: int | None = None
) -> tuple[list[float], nn.Module]:
    """Train the whole module; PyTorch's own clipping and optimizer. ``microbatch``: one backward for so many rows."""
    module, rows_of = as_started(job, data)
    train, wanted = job.train, [p for p in module.parameters() if p.requires_grad]
    kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[train.optimizer]
    optimizer = kind(wanted, lr=train.lr, weight_decay=train.weight_decay)
    size, losses = microbatch or train.batch, []
    for step in range(train.steps):
        rows, total = rows_of("train", step), 0.0
        optimizer.zero_grad()
        for first in range(0, train.batch, size):
            part = {name: t[first : first + size] for name, t in rows.items()}
            with keyed(train.seed, step, train.batch) if microbatch is None else nullcontext():
                loss = loss_of(module, part) * size / train.batch
            loss.backward()
            total += loss.item()
        if train.clip is not None:
            torch.nn.utils.clip_grad_norm_(wanted, train.clip)
        optimizer.step()
        losses.append(total)
    return losses, module


def assert_step_of(
    outcome: Outcome, model: LayeredModel, loss_of: Callable[[Any], Tensor], module: nn.Module | None = None
) -> nn.Module:
    """Loss and gradients of a step are those of the whole module with the values that it began with: float64, 1e-9."""
    values = {n: v.detach() + outcome.gradients[n] for stage in outcome.stages for n, v in stage.named.items()}
    module = with_values(model.values.build() if module is None else module, values)
    loss = loss_of(module)
    loss.backward()
    assert outcome.loss == pytest.approx(loss.item(), abs=1e-9, rel=0)
    names: dict[nn.Parameter, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    for p, own in names.items():
        result = [outcome.gradients[name] for name in own if name in outcome.gradients]
        assert result or p.grad is None, f"{own} has no gradient here"
        for gradient in result:
            torch.testing.assert_close(gradient, torch.zeros_like(p) if p.grad is None else p.grad, rtol=0, atol=1e-9,
                                       msg=lambda m, n=own: f"{n}: {m}")  # fmt: skip
    assert outcome.gradients.keys() <= {name for own in names.values() for name in own}
    return module

"""The reference: the same mini-batch SGD as a plain PyTorch loop in one process, without any of raypipe's runtime.

It shares with the runtime only the definition of the task (model layers, samples, dropout keys, learning rates);
forward, loss scaling, accumulation, clipping, optimizer and tying are written here with PyTorch's own functions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from raypipe.data import Corpus, prepare
from raypipe.job.spec import JobSpec
from raypipe.models import GptLayers, random_keys
from raypipe.runtime.update.optimizer import learning_rate

torch.set_num_threads(1)  # tiny models: more threads only wait for each other, beside the stage actors
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def plain_losses(job: JobSpec, data: Path, steps: int, corpus: Corpus | None = None) -> list[float]:
    """Mean token loss of each mini-batch, before its update; of other samples where ``corpus`` has them."""
    return _trained(job, data, steps, corpus)[0]


def losses_alone(job: JobSpec, directory: Path) -> list[float]:
    """Return ``plain_losses`` of all steps of a job, whose data is prepared in ``directory`` first."""
    prepare(job.data, job.model.sequence, directory)
    return plain_losses(job, directory, job.train.steps)


def plain_val_loss(job: JobSpec, data: Path, steps: int) -> float:
    """Mean token loss of the first validation batch after so many steps, without dropout."""
    _, model = _trained(job, data, steps)
    tokens, targets = Corpus.open(data).samples("val", job.train.seed, 0, 0, job.train.batch, job.train.batch)
    with torch.no_grad(), random_keys(job.train.seed, 0, range(job.train.batch), training=False):
        return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).item()


def _trained(job: JobSpec, data: Path, steps: int, corpus: Corpus | None = None) -> tuple[list[float], torch.nn.Module]:
    model = whole_gpt(job)
    kinds: dict[str, Any] = {
        "adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD,
        "adagrad": partial(torch.optim.Adagrad, eps=job.train.eps),
        "rmsprop": partial(torch.optim.RMSprop, alpha=job.train.alpha, momentum=job.train.momentum),
    }  # fmt: skip
    groups = [{"params": [p], "times": 1.0, "weight_decay": job.train.weight_decay} for p in model.parameters()]
    for (name, p), group in zip(model.named_parameters(), groups, strict=True):
        if p.dim() == 1 and job.train.decay == "matrices":
            group["weight_decay"] = 0.0
        for own in job.train.groups:
            if name in own.parameters:
                group["times"] = own.scale
                group["weight_decay"] = group["weight_decay"] if own.weight_decay is None else own.weight_decay
    optimizer = kinds[job.train.optimizer](groups, lr=job.train.lr)
    corpus = Corpus.open(data) if corpus is None else corpus
    losses = []
    for step in range(steps):
        loss = mean_loss(job, model, corpus, step, range(job.train.batch))
        optimizer.zero_grad()
        loss.backward()
        if job.train.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.train.clip)
        for group in optimizer.param_groups:
            group["lr"] = group["times"] * learning_rate(job.train, step)
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def two_buffered_losses(job: JobSpec, data: Path, steps: int) -> list[float]:
    """PipeDream-2BW's rule in one process: step t's gradient is taken at w(t-1) and updates w(t)."""
    model = whole_gpt(job)
    older = whole_gpt(job)  # w(t-1); w(0) for the first two steps
    optimizer = torch.optim.SGD(model.parameters(), lr=job.train.lr, momentum=job.train.momentum)
    corpus = Corpus.open(data)
    losses = []
    for step in range(steps):
        before = [p.detach().clone() for p in model.parameters()]
        loss = mean_loss(job, older, corpus, step, range(job.train.batch))
        older.zero_grad()
        loss.backward()
        if job.train.clip is not None:
            torch.nn.utils.clip_grad_norm_(older.parameters(), job.train.clip)
        for p, q in zip(model.parameters(), older.parameters(), strict=True):
            p.grad = q.grad.clone()
        optimizer.step()
        with torch.no_grad():
            for q, p in zip(older.parameters(), before, strict=True):
                q.copy_(p)
        losses.append(loss.item())
    return losses


def stashed_losses(job: JobSpec, data: Path, steps: int, cut: list[range]) -> list[float]:
    """PipeDream's weight stashing in one process: stage s sees micro-batch m with max(0, m - (D - s) + 1) updates.

    That is 1F1B without a flush: stage s has D - s micro-batches in flight, so its forward of m comes right after its
    own update by m - (D - s). The backward uses the weights that the forward saw; the update goes on the newest.
    """
    depth = len(cut)
    layers = list(whole_gpt(job))
    history = [[_weights(layers, part)] for part in cut]
    corpus = Corpus.open(data)
    size = job.parallel.microbatch
    per_step = job.train.batch // size
    losses = []
    for step in range(steps):
        total = 0.0
        for index in range(per_step):
            m = step * per_step + index
            rows = range(index * size, (index + 1) * size)
            used = [
                {name: value.clone().requires_grad_() for name, value in versions[max(0, m - (depth - s) + 1)].items()}
                for s, versions in enumerate(history)
            ]
            tokens, targets = corpus.samples("train", job.train.seed, step, rows.start, size, job.train.batch)
            x = tokens
            with random_keys(job.train.seed, step, rows, training=True):
                for part, weights in zip(cut, used, strict=True):
                    for i in part:
                        own = {k.split(":", 1)[1]: v for k, v in weights.items() if k.startswith(f"{i}:")}
                        x = torch.func.functional_call(layers[i], own, (x,))
            loss = torch.nn.functional.cross_entropy(x.flatten(0, 1), targets.flatten())
            loss.backward()
            total += loss.item() / per_step
            for versions, weights in zip(history, used, strict=True):
                newest = versions[-1]
                versions.append({k: newest[k] - job.train.lr * weights[k].grad for k in newest})
        losses.append(total)
    return losses


def whole_gpt(job: JobSpec, dtype: torch.dtype | None = None) -> torch.nn.Sequential:
    """The layers of the built-in GPT with their start values, tied as the job says."""
    plan = GptLayers(job.model, dtype or DTYPES[job.train.dtype])
    layers = [plan.build(i, job.train.seed) for i in range(plan.count)]
    if job.model.tie_embeddings:
        layers[-1].project.weight = layers[0].token.weight
    return torch.nn.Sequential(*layers)


def microbatch_losses(
    job: JobSpec, data: Path, model: torch.nn.Module, update: Callable[[], None], autocast: bool = False
) -> tuple[list[float], float]:
    """Losses, then that of the first validation batch; a backward for each micro-batch, ``update`` for each step."""
    corpus, size = Corpus.open(data), job.parallel.microbatch

    def summed(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = model(tokens)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")

    losses = []
    for step in range(job.train.steps):
        tokens, targets = corpus.batch("train", job.train.seed, step, job.train.batch)
        total = 0.0
        for first in range(0, job.train.batch, size):
            rows = slice(first, first + size)
            keys = random_keys(job.train.seed, step, range(first, first + size), training=True)
            with keys, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = summed(tokens[rows], targets[rows])
            (loss / targets.numel()).backward()
            total += loss.item() / targets.numel()
        update()
        losses.append(total)
    tokens, targets = corpus.batch("val", job.train.seed, 0, job.train.batch)
    model.eval()
    with torch.no_grad():
        return losses, summed(tokens, targets).item() / targets.numel()


def adamw_update(job: JobSpec, model: torch.nn.Module) -> Callable[[], None]:
    """Clip, step and forget the gradients."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=job.train.lr, weight_decay=job.train.weight_decay)

    def update() -> None:
        if job.train.clip is not None:
            torch.nn.utils.clip_grad_norm_(trained, job.train.clip)
        optimizer.step()
        optimizer.zero_grad()

    return update


def whole_batch_losses(
    job: JobSpec, model: torch.nn.Module, loss_of: Callable[[Any, int], torch.Tensor]
) -> list[float]:
    """Losses of AdamW on whole mini-batches, ``loss_of(split, step)``, then the first held-out one's."""
    update, losses = adamw_update(job, model), []
    for step in range(job.train.steps):
        loss = loss_of("train", step)
        loss.backward()
        update()
        losses.append(loss.item())
    with torch.no_grad():
        return [*losses, loss_of("val", 0).item()]


def mean_loss(job: JobSpec, model: torch.nn.Module, corpus: Corpus, step: int, rows: range) -> torch.Tensor:
    tokens, targets = corpus.samples("train", job.train.seed, step, rows.start, len(rows), job.train.batch)
    with random_keys(job.train.seed, step, rows, training=True):
        return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def _weights(layers: list[torch.nn.Module], part: range) -> dict[str, torch.Tensor]:
    return {f"{i}:{name}": p.detach().clone() for i in part for name, p in layers[i].named_parameters()}

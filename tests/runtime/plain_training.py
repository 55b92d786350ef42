"""The reference: the same mini-batch SGD as a plain PyTorch loop in one process, without any of raypipe's runtime.

It shares with the runtime only the definition of the task (model layers, samples, dropout keys); forward, loss
scaling, accumulation, clipping, optimizer and tying are written here with PyTorch's own functions.
"""

from __future__ import annotations

from pathlib import Path

import torch

from raypipe.data import Corpus
from raypipe.job.spec import JobSpec
from raypipe.models import build_layers, random_keys

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def plain_losses(job: JobSpec, data: Path, steps: int) -> list[float]:
    """Mean token loss of each mini-batch, before its update."""
    plan = build_layers(job.model)
    layers = [plan.build(i, job.train.seed, DTYPES[job.train.dtype]) for i in range(plan.count)]
    model = torch.nn.Sequential(*layers)
    if job.model.tie_embeddings:
        layers[-1].project.weight = layers[0].token.weight
    kinds = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
    optimizer = kinds[job.train.optimizer](model.parameters(), lr=job.train.lr, weight_decay=job.train.weight_decay)
    corpus = Corpus.open(data)
    losses = []
    for step in range(steps):
        tokens, targets = corpus.batch("train", job.train.seed, step, job.train.batch)
        with random_keys(job.train.seed, step, range(job.train.batch), training=True):
            logits = model(tokens)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        if job.train.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.train.clip)
        optimizer.step()
        losses.append(loss.item())
    return losses

"""A real checkpoint, written by raypipe's own writer, and manifests of it with something changed."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from raypipe.checkpoint import (
    LOSS,
    Checkpoint,
    buffer_key,
    commit,
    open_checkpoint,
    step_directory,
    write_shard,
)
from raypipe.checkpoint.write import NAME, save_manifest
from tests.bench.safety.files import changed
from tests.bench.safety.trial import expect

STEP = 50
RANKS, LAYERS = 2, 4


def tensors_of(rank: int, step: int = STEP) -> dict[str, Tensor]:
    """What a rank of a run after ``step`` steps writes: parameters, Adam's moments, a buffer."""
    random = torch.Generator().manual_seed(1000 * step + rank)
    result: dict[str, Tensor] = {}
    for layer in range(rank * LAYERS // RANKS, (rank + 1) * LAYERS // RANKS):
        for name, shape in (("norm.weight", (8,)), ("mlp.weight", (8, 8)), ("mlp.bias", (8,))):
            result[f"param/{layer}.{name}"] = torch.randn(shape, generator=random, dtype=torch.float64)
            for state in ("exp_avg", "exp_avg_sq"):
                result[f"optim/{layer}.{name}/{state}"] = torch.randn(shape, generator=random, dtype=torch.float64)
            result[f"optim/{layer}.{name}/step"] = torch.tensor(float(step))
    if rank == 0:
        result[buffer_key("norm.running_mean")] = torch.randn(8, generator=random, dtype=torch.bfloat16)
    return result


def write(root: Path, step: int = STEP) -> Path:
    """Write a checkpoint below ``root``; return its folder."""
    folder = step_directory(root, step)
    shards = [write_shard(folder, f"rank-{rank:05d}", tensors_of(rank, step)) for rank in range(RANKS)]
    return commit(folder, step, shards, {"job": "real", LOSS: 0.1 + 0.2, "steps_s": [1.5, 2.25]})


def holds_what_was_written(found: Checkpoint, step: int = STEP) -> bool:
    """Whether a checkpoint holds every tensor of ``write``, bit for bit, and nothing else."""
    wanted = {key: value for rank in range(RANKS) for key, value in tensors_of(rank, step).items()}
    if found.step != step or set(found.keys) != set(wanted):
        return False
    read = found.read(found.keys)
    return all(read[k].dtype == v.dtype and torch.equal(read[k], v) for k, v in wanted.items())


@cache
def right_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of the checkpoint there, without its digest."""
    body = json.loads((folder / NAME).read_text())
    body.pop("sha256")
    return dict(body)


def manifests(folder: Path) -> st.SearchStrategy[Any]:
    """Manifests with something changed."""
    one = ("step", "files", "keys", "meta", "version", "format")
    places = [*((key,) for key in one), ("files", 0, "bytes"), ("meta", LOSS)]
    return changed(right_manifest(folder), places)


def try_manifest(folder: Path, scratch: Path, body: Any) -> None:
    """Open a copy of the checkpoint whose manifest is ``body`` with the digest that belongs to it."""
    shutil.rmtree(scratch, ignore_errors=True)
    copy = scratch / folder.name
    shutil.copytree(folder, copy)
    (copy / NAME).unlink()
    if isinstance(body, dict):
        try:
            save_manifest(copy, {k: v for k, v in body.items() if k != "sha256"})
        except ValueError:  # NaN, which JSON does not have, and strings that UTF-8 does not
            (copy / NAME).write_text(json.dumps(body))
    else:
        (copy / NAME).write_text(json.dumps(body))
    result = open_checkpoint(copy)
    expect(type(result.step) is int and result.step == STEP, f"step {result.step} in {copy.name}")
    for key, file in result.files.items():
        with safe_open(copy / file, framework="pt") as shard:
            known = key in shard.keys()  # noqa: SIM118, no mapping
        expect(known, f"{key} is not in {file}")
    result.read(result.keys)

"""Small jobs, also as files, for runs by the command; and text to train on."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import Any

from raypipe.job.spec import JobSpec, job_from

PIPELINE = {"schedule": "1f1b", "stages": 2, "microbatch": 2}
TINY_GPT = {"type": "gpt", "layers": 2, "hidden": 8, "heads": 2, "sequence": 8}


def minimal_job(
    model: dict[str, Any], data: dict[str, Any] | Path | str = "stdlib", parallel: dict[str, Any] | str | None = None,
    **train: Any,
) -> JobSpec:  # fmt: skip
    """A job of one step of four samples where ``train`` says no more.

    ``data``: a section, a file of arrays, or text.
    """
    if not isinstance(data, dict):
        data = {"type": "arrays" if Path(data).suffix in (".npz", ".safetensors") else "bytes", "path": str(data)}
    sections = {} if parallel is None else {"parallel": parallel}
    return job_from(
        {"name": "small", "model": model, "data": data, "train": {"steps": 1, "batch": 4, **train}, **sections}
    )


def write_job(
    path: Path, text: Path, parallel: dict[str, Any] | str = PIPELINE, *, layers: int = 2, hidden: int = 32,
    kind: str = "bytes", **train: Any,
) -> Path:  # fmt: skip
    """Write a job of a GPT with dropout and tied embeddings on a folder of text; return its path."""
    model = {
        "type": "gpt", "layers": layers, "hidden": hidden, "heads": 2, "sequence": 16, "vocabulary": 256,
        "dropout": 0.1, "tie_embeddings": True,
    }  # fmt: skip
    train = {"batch": 8, "lr": 0.01, "seed": 0, **train}
    job = {"name": "small", "model": model, "data": {"type": kind, "path": str(text)}, "train": train}
    path.write_text(json.dumps({**job, "parallel": parallel}), encoding="utf-8")  # JSON is YAML
    return path


def write_text(folder: Path) -> Path:
    """Write a little text to train on: some of this Python's own modules."""
    folder.mkdir(parents=True, exist_ok=True)
    for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:24]:
        (folder / source.name).write_bytes(source.read_bytes())
    return folder

"""A job file to begin with, for a model's directory and a file of data: ``raypipe init``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from raypipe.data.documents.sources import find_source
from raypipe.data.given_files import find_files, kind_of
from raypipe.errors import SpecError
from raypipe.files import read_json

LONGEST = 1024
"""Tokens of a sample, where the model takes more."""
ARRAYS = (".npz", ".safetensors")


def new_job(model: Path, data: str, column: str = "text") -> str:
    """Return the text of a job file that trains the model in a directory on data.

    What the files say is taken from them: whether there are weights, their precision, the longest sequence, the
    tokenizer, and the kind of data. The rest are usual values, each with a word about it.

    Args:
        model: a directory as ``save_pretrained`` writes it, or with its ``config.json`` alone.
        data: a file, a folder or a glob, as ``data.path`` takes it.
        column: the column of records that holds a document.

    Raises:
        SpecError: the directory holds no configuration, or there are no files of data, or they hold no such column.
    """
    config = _config(model)
    trained = any(model.glob("*.safetensors")) or any(model.glob("*.bin"))
    text: dict[str, Any] = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    says = str(config.get("dtype") or config.get("torch_dtype"))
    lines = [
        f"name: {json.dumps(_name(model))}",
        "",
        "model:",
        f"  hf: {json.dumps(str(model))}",
        *([] if trained else ["  init: random  # the directory holds no weights"]),
        *_data(model, data, column, text),
        "",
        "train:",
        "  steps: 1000",
        "  batch: 32  # samples a step, over all devices",
        "  optimizer: adamw",
        "  lr: 0.00002  # usual for fine-tuning" if trained else "  lr: 0.0003  # usual for random weights",
        "  lr_schedule: cosine",
        "  warmup_steps: 50",
        "  clip: 1.0  # largest norm of all gradients together",
        f"  dtype: {'bfloat16' if '16' in says else 'float32'}  # bfloat16 computes in it, over float32 parameters",
        "  eval_every: 100",
        "  checkpoint_every: 100",
        "",
        "parallel: auto  # schedule, stages, copies and micro-batches: measured and chosen at the start",
    ]
    return "\n".join(lines) + "\n"


def _config(model: Path) -> dict[str, Any]:
    file = model / "config.json"
    if not file.is_file():
        fix = "give a directory that save_pretrained wrote, or one with the model's config.json"
        raise SpecError(str(model), "holds no config.json", fix)
    config = read_json(file)
    if not isinstance(config, dict):
        raise SpecError(str(file), "is no JSON object", "give the model's own config.json")
    return config


def _name(model: Path) -> str:
    name = "".join(c if c.isalnum() or c in "-_." else "-" for c in model.resolve().name)
    return name.strip("-_.") or "model"


def _data(model: Path, data: str, column: str, text: dict[str, Any]) -> list[str]:
    files = find_files(data)
    if not files:
        raise SpecError(data, "names no files", "give a file, a folder or a glob of data")
    where = f"  path: {json.dumps(data)}"
    if files[0].path.suffix.lower() in ARRAYS:
        return ["", "data:", "  type: arrays  # an array for each argument of the model, and labels", where]
    longest = next((n for key in ("max_position_embeddings", "n_positions") if isinstance(n := text.get(key), int)), 0)
    limit = f"; the model takes up to {longest}" if longest else ""
    lines = [
        f"  sequence: {min(longest or LONGEST, LONGEST)}  # tokens of a sample{limit}",
        "",
        "data:",
        "  type: documents  # packed into samples of that length, streamed",
        where,
    ]
    find_source(data, column, "--column")
    if kind_of(files[0].path).format in ("parquet", "arrow", "jsonl"):
        lines.append(f"  column: {json.dumps(column)}  # that holds a document")
    if (model / "tokenizer.json").is_file():
        lines.append(f"  tokenizer: {json.dumps(str(model))}")
    else:
        lines.append("  tokenizer: null  # the directory has no tokenizer.json: each byte is a token")
    lines.append("  held_out: null  # documents to validate on; null: every 32nd of path, or a lone one's end")
    return lines

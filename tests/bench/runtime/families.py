"""A job of a few lines for every family of models, on two stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.capture.models import FAMILIES, GROUPED

TEXT = {"type": "bytes", "path": str(Path(__file__).parents[3] / "docs")}
ROWS = 64


def arrays(folder: Path) -> dict[str, dict[str, str]]:
    """Images and rows of numbers, with labels, in files."""
    draw = np.random.default_rng(0)
    image = draw.normal(size=(ROWS, 3, 16, 16)).astype(np.float32)
    labels = draw.integers(0, 2, ROWS)
    result = {
        "vit": {"pixel_values": image, "labels": labels},
        "cnn": {"image": image, "labels": draw.integers(0, 10, ROWS)},
        "mlp": {"input": draw.normal(size=(ROWS, 12)).astype(np.float32), "labels": labels},
    }
    for name, columns in result.items():
        np.savez(folder / f"{name}.npz", **columns)  # type: ignore[arg-type]
    return {name: {"type": "arrays", "path": str(folder / f"{name}.npz")} for name in result}


def jobs(folder: Path, steps: int) -> dict[str, dict[str, Any]]:
    """A job file for each family, as plain data."""
    files = arrays(folder)
    families = {name: {**config, "vocab_size": 257} for name, config in FAMILIES.items() if name != "vit"}
    models: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
        **{name: ({"hf": name, "config": config, "sequence": 16}, TEXT) for name, config in families.items()},
        "mixtral": ({"hf": "mixtral", "sequence": 16, "loss": "model", "config": {
            **GROUPED, "vocab_size": 257, "num_local_experts": 4, "output_router_logits": True}}, TEXT),
        "vit": ({"hf": "vit", "config": FAMILIES["vit"]}, files["vit"]),
        "resnet": ({"hf": "resnet", "config": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1],
                                               "layer_type": "basic"}}, files["vit"]),
        "cnn": ({"import": "tests.capture.models:ResNet", "loss": "model"}, files["cnn"]),
        "mlp": ({"import": "tests.capture.models:mlp"}, files["mlp"]),
    }  # fmt: skip
    train = {"steps": steps, "batch": 8, "eval_batches": 1}
    parallel = {"schedule": "1f1b", "stages": 2, "microbatch": 2}
    return {
        name: {"name": name, "model": model, "data": data, "train": train, "parallel": parallel}
        for name, (model, data) in models.items()
    }

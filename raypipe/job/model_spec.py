"""Which model to train: the built-in GPT, any Hugging Face model, or what a function of the user's returns."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Discriminator, Field, JsonValue, Tag, field_validator

from raypipe.files import expanded
from raypipe.job.field_types import Positive, Share, Spec

TaskName = Literal["causal-lm", "masked-lm", "seq2seq", "classification", "regression"]


class GptSpec(Spec):
    """The built-in GPT, and its shape."""

    type: Literal["gpt"] = "gpt"
    """Family. ``gpt``: decoder-only transformer with pre-norm blocks and learned positions."""
    layers: Annotated[int, Field(ge=1)]
    """Transformer blocks, at most 4096; embedding and head come on top."""
    hidden: Positive
    """Width of the residual stream; a multiple of ``heads``."""
    heads: Positive
    """Attention heads."""
    sequence: Positive
    """Tokens a sample holds."""
    positions: Positive | None = None
    """Positions it has learned vectors for, at least ``sequence``; by default as many."""
    vocabulary: Positive = 256
    """Distinct tokens; byte data needs 256."""
    dropout: Share = 0.0
    """Share of values dropped after the embedding and on both residual branches; 0 <= p < 1."""
    activation: Literal["gelu", "gelu-tanh"] = "gelu"
    """Of the MLP: the exact GELU, or its approximation by tanh, with which GPT-2 was trained."""
    tie_embeddings: bool = True
    """Use the token embedding's matrix as the head's as well."""


class CapturedSpec(Spec):
    """A PyTorch model that is captured as it is and cut by its operations."""

    sequence: Positive | None = None
    """Tokens a sample of text holds; with ``data.type: arrays`` the arrays say it."""
    task: TaskName | None = None
    """What it is trained for; by default what its architecture, or else the data's labels, suggest."""
    loss: Literal["task", "model"] = "task"
    """``task``: computed from the model's output and the labels, a mean over the targets of the whole mini-batch.
    ``model``: what the model itself returns as its loss when it is given ``labels``, with whatever terms of its own
    (load balancing of experts); a mini-batch's is the mean of its micro-batches', as with gradient accumulation."""
    batch_norm: Literal["frozen"] | None = None
    """``frozen`` normalises with the running statistics the model starts with, and leaves them as they are. By default
    batch norm learns as in PyTorch with gradient accumulation: each micro-batch is normalised by its own statistics."""


class HfSpec(CapturedSpec):
    """A model of Hugging Face transformers."""

    hf: Annotated[str, Field(min_length=1)]
    """A model type such as ``gpt2``, built with random weights, or a local directory in Hugging Face's format."""
    config: dict[str, JsonValue] = Field(default_factory=dict)
    """Changes to the type's or directory's configuration, by its own keys."""

    @field_validator("hf")
    @classmethod
    def _absolute(cls, hf: str) -> str:
        """A directory means the same wherever the stage actors run."""
        path = expanded(Path(hf))
        return str(path.resolve()) if (path / "config.json").is_file() else hf


class ImportSpec(CapturedSpec):
    """A model that a function builds."""

    function: Annotated[str, Field(alias="import", pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
    """``package.module:build``; the function returns a ``torch.nn.Module``."""
    args: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of the function."""


def model_kind(model: object) -> str:
    """Which spec a model given as plain data, or as a spec, means."""
    if isinstance(model, BaseModel):
        return next(name for name, spec in MODEL_KINDS.items() if isinstance(model, spec))
    keys = set(model) if isinstance(model, Mapping) else set()
    return "hf" if "hf" in keys else "import" if "import" in keys else "gpt"


MODEL_KINDS: dict[str, type[Spec]] = {"gpt": GptSpec, "hf": HfSpec, "import": ImportSpec}
"""By the name that says in a job file which one it is."""

ModelSpec = Annotated[
    Annotated[GptSpec, Tag("gpt")] | Annotated[HfSpec, Tag("hf")] | Annotated[ImportSpec, Tag("import")],
    Discriminator(model_kind),
]
"""Any model."""

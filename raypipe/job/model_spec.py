"""The ``model`` section of a job file: the built-in GPT, a Hugging Face model, or a model that a function returns."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import FunctionType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, JsonValue, Tag, field_validator, model_validator

from raypipe.files import expanded, read_json
from raypipe.job.field_types import Positive, Share, Spec

TaskName = Literal[
    "causal-lm", "masked-lm", "seq2seq", "classification", "regression", "segmentation", "ctc", "contrastive"
]


LOSSES = r"^(task|model|reward|dpo|distillation|contrastive|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$"
"""What ``model.loss`` may be."""


class GptSpec(Spec):
    """The built-in GPT."""

    type: Literal["gpt"] = "gpt"
    """Model family. ``gpt`` is a decoder-only transformer with pre-norm blocks and learned positions."""
    layers: Annotated[int, Field(ge=1)]
    """Transformer blocks, at most 4096; embedding and head come on top."""
    hidden: Positive
    """Width of the residual stream; a multiple of ``heads``."""
    heads: Positive
    """Attention heads."""
    sequence: Positive
    """Tokens per sample."""
    positions: Positive | None = None
    """Number of learned position embeddings, at least ``sequence``; by default equal to it."""
    vocabulary: Positive = 256
    """Number of distinct tokens; byte data needs 256."""
    dropout: Share = 0.0
    """Share of values dropped after the embedding and on both residual branches; 0 <= p < 1."""
    activation: Literal["gelu", "gelu-tanh"] = "gelu"
    """Activation of the MLP: the exact GELU, or its tanh approximation, with which GPT-2 was trained."""
    tie_embeddings: bool = True
    """Share the matrix of the token embedding with the head."""


class CapturedSpec(Spec):
    """A PyTorch model that is captured without changes to its code and cut between its operations."""

    sequence: Positive | None = None
    """Tokens per text sample; with ``data.type: arrays``, the arrays define it."""
    task: TaskName | None = None
    """Training task; by default it follows from the model's architecture or else from the data's labels."""
    loss: Annotated[str, Field(pattern=LOSSES)] = "task"
    """``task``: the loss is computed from the model's output and the labels, as a mean over the targets of the whole
    mini-batch. ``model``: the model returns the loss when it is given ``labels``, including its own terms (such as load
    balancing of experts); the loss of a mini-batch is the mean over its micro-batches, as with gradient
    accumulation. ``reward``, ``dpo``, ``distillation``, ``contrastive``: these losses. Else a function of the
    model and the batch, as ``package.module:function``; in Python, the function itself. It returns the loss, or
    the loss and figures of the same shape by name, which validations report."""
    loss_args: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of the loss function."""
    loss_per: Literal["sample", "microbatch"] = "sample"
    """What a loss function returns: losses of each sample (or of each of its labels), whose mean over the whole
    mini-batch is the loss; or one loss of a micro-batch as a whole, whose mean over micro-batches is the loss."""
    batch_norm: Literal["frozen"] | None = None
    """``frozen``: batch norm uses the model's initial running statistics and does not change them. By default it works
    as in PyTorch with gradient accumulation: each micro-batch is normalised by its own statistics."""
    as_it_is: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Modules that run as they are, without being captured, by path or class: B computes their weight gradients, and
    they are not cut. For a module whose capture takes too long, such as one that loops over a sequence."""

    @field_validator("loss", mode="before")
    @classmethod
    def _by_name(cls, loss: Any) -> Any:
        """Name a function, so that other processes can import it."""
        if not isinstance(loss, FunctionType):
            return loss
        if loss.__module__ == "__main__" or "<" in loss.__qualname__ or "." in loss.__qualname__:
            raise ValueError(
                f"{loss.__qualname__} of {loss.__module__} can't be imported by other processes: "
                "define it at the top of a module that is not the script itself"
            )
        return f"{loss.__module__}:{loss.__qualname__}"


ADAPTERS = "adapter_config.json"
"""peft's file beside the adapters that it saves."""


class LoraSpec(Spec):
    """Low-rank adapters that train in place of the model; the keys are those of ``peft.LoraConfig``."""

    r: Positive = 8
    """Rank of each adapter."""
    lora_alpha: Annotated[float, Field(gt=0, le=1e6)] = 8.0
    """Scale of each adapter, times its rank (times the rank's square root with ``use_rslora``)."""
    lora_dropout: Share = 0.0
    """Share of an adapter's inputs that are dropped."""
    target_modules: list[str] | str | None = None
    """Names of layers that get an adapter, a pattern, or ``all-linear``; by default what peft chooses for the model's
    type."""
    modules_to_save: list[str] | None = None
    """Names of layers that train whole, such as a new head; by default those of classifiers."""
    use_rslora: bool = False
    """Divide by the square root of the rank, which suits high ranks."""


class HfSpec(CapturedSpec):
    """A model of Hugging Face transformers."""

    hf: Annotated[str, Field(min_length=1)]
    """A model type such as ``gpt2``, which is built with random weights, or a local directory in Hugging Face's
    format."""
    config: dict[str, JsonValue] = Field(default_factory=dict)
    """Changes to the configuration of the type or directory; the keys are those of its configuration."""
    init: Literal["saved", "random"] = "saved"
    """``saved``: a directory's weights are where training starts. ``random``: new ones, as for a model type; a
    directory needs only its ``config.json`` then, as it does to plan."""
    lora: LoraSpec | None = None
    """Adapters to train while the model itself is frozen; ``raypipe export`` writes them for peft."""
    adapters: str | None = None
    """A directory of peft with the adapters to start from. ``hf`` may be such a directory too: its base is then the
    model."""

    @model_validator(mode="before")
    @classmethod
    def _taken_apart(cls, given: Any) -> Any:
        """Take a directory of adapters apart into its base, its options, and itself."""
        if not isinstance(given, dict):
            return given
        folder, base = given.get("adapters"), given.get("hf")
        if folder is None and isinstance(base, str) and (expanded(Path(base)) / ADAPTERS).is_file():
            folder, base = base, None
        if not isinstance(folder, str):
            return given
        path = expanded(Path(folder)).resolve()
        try:
            says = dict(read_json(path / ADAPTERS))
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(f"{path / ADAPTERS} can't be read: {error}; save the adapters again") from None
        if base is None:
            named = str(says.get("base_model_name_or_path"))
            tried = (expanded(Path(named)), path / named)
            base = next((str(one) for one in tried if (one / "config.json").is_file()), None)
            if base is None:
                fix = "give it as model.hf, and this one as model.adapters"
                raise ValueError(f"the base of the adapters in {path}, {named}, is no directory here; {fix}")
        options = {key: says[key] for key in LoraSpec.model_fields if says.get(key) is not None}
        return {**given, "hf": base, "adapters": str(path), "lora": given.get("lora") or options}

    @model_validator(mode="after")
    def _no_random_base(self) -> HfSpec:
        if self.adapters is not None and self.init == "random":
            raise ValueError("adapters were trained beside a model's saved weights; leave init out")
        return self

    @field_validator("hf")
    @classmethod
    def _absolute(cls, hf: str) -> str:
        """Make the path of a directory absolute, since workers run in other working directories."""
        path = expanded(Path(hf))
        return str(path.resolve()) if (path / "config.json").is_file() else hf


class ImportSpec(CapturedSpec):
    """A model that a Python function builds."""

    function: Annotated[str, Field(alias="import", pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
    """The function, as ``package.module:function``; it returns a ``torch.nn.Module``."""
    args: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of the function."""


class GivenSpec(CapturedSpec):
    """The operations of a model instance, as ``PipelineTrainer`` writes them to the run directory."""

    given: Annotated[str, Field(min_length=1)]
    """The folder with the operations and the start values."""


def model_kind(model: object) -> str:
    """Return the key in ``MODEL_KINDS`` of a model that is given as plain data or as a spec."""
    if isinstance(model, BaseModel):
        return next(name for name, spec in MODEL_KINDS.items() if isinstance(model, spec))
    keys = set(model) if isinstance(model, Mapping) else set()
    return next((name for name in ("hf", "import", "given") if name in keys), "gpt")


MODEL_KINDS: dict[str, type[Spec]] = {"gpt": GptSpec, "hf": HfSpec, "import": ImportSpec, "given": GivenSpec}
"""Specs by the key that identifies them in a job file."""

ModelSpec = Annotated[
    Annotated[GptSpec, Tag("gpt")]
    | Annotated[HfSpec, Tag("hf")]
    | Annotated[ImportSpec, Tag("import")]
    | Annotated[GivenSpec, Tag("given")],
    Discriminator(model_kind),
]
"""Any model."""

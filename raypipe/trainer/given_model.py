"""The model that a script gives, as the ``model`` section of a job: constructed by the workers, or captured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raypipe.capture.meta import build_without_memory
from raypipe.data import declared_fields
from raypipe.errors import RequestError, SpecError
from raypipe.job import GivenSpec, HfSpec, JobSpec
from raypipe.models import DTYPES
from raypipe.models.given.root import dtype_of, kept_in_evaluation
from raypipe.models.given.write import ScriptLoss, predicts, write_config, write_given
from raypipe.trainer.datasets import accepted


def given_model(model: Any, model_init: Callable[[], Any] | None, seed: int) -> Any:
    """Return the model, or what ``model_init`` returns after transformers' ``set_seed``.

    Raises:
        SpecError: neither or both are given.
    """
    if model_init is None:
        if model is None:
            raise SpecError("model", "is missing", "give a model, or model_init")
        return model
    if model is not None:
        raise SpecError("model_init", "and model are both given", "give one of them")
    from transformers import set_seed

    set_seed(seed)  # as the Trainer does
    return model_init()


def model_section(
    model: Any, directory: Path, script: ScriptLoss | None = None, notify: Callable[[str], None] = print
) -> dict[str, Any]:
    """Return the ``model`` section of the job.

    A model of transformers that is shown to be what its configuration makes is written to the run's directory, for
    workers to construct; another instance is captured there once the data is known (``write_given``).

    Raises:
        SpecError: it is neither a model nor the name of one, or the script's loss is for a model given by name.
    """
    if not isinstance(model, nn.Module):
        if script is not None:
            fix = "give the model as an instance, or the loss as model={..., 'loss': 'package.module:function'}"
            raise SpecError(script.where, "is captured with a model, and this one is given by name", fix)
        if isinstance(model, str):
            return {"hf": model}
        if isinstance(model, Mapping):
            return dict(model)
        what = f"a {type(model).__name__} is no model"
        raise SpecError("model", what, 'give a torch.nn.Module, or {"import": "package.module:function"}')
    path = directory / "model"
    base = without_peft(model)
    if script is not None:
        why: str | None = f"{script.where} is the script's"
    else:
        why = "it has adapters" if base is not model else _differs(base, path)
    if why is None:
        base.save_pretrained(path)
        return {"hf": str(path)}
    if hasattr(base, "config"):
        notify(f"the model is captured as it is, and not constructed again on the workers: {why}")
    ends = "task" if script is None and predicts(base, path) else "model"
    return {"given": str(path), "loss": ends}


@contextmanager
def noisy_embeddings(model: Any, alpha: float | None) -> Iterator[None]:
    """Add NEFTune's noise to the input embeddings in training inside the block, in which the instance is captured.

    The noise is uniform, of magnitude ``alpha / sqrt(L d)`` for ``[samples, L, d]`` (Jain et al. 2023, "NEFTune: Noisy
    Embeddings Improve Instruction Finetuning", algorithm 1). transformers' hook computes that from a tensor's value.
    What is captured draws it by sample, as dropout.

    Raises:
        SpecError: the model is given by name, or has no input embeddings.
    """
    if not alpha:
        yield
        return
    if not hasattr(model, "get_input_embeddings"):
        why = "adds noise to get_input_embeddings() of an instance, which this model has not"
        raise SpecError("args.neftune_noise_alpha", why, "give a model of transformers as an instance, or leave it out")

    def add_noise(part: nn.Module, _: Any, output: Tensor) -> Tensor:
        if not part.training:
            return output
        return output + torch.zeros_like(output).uniform_(-1.0, 1.0) * (alpha / math.sqrt(math.prod(output.shape[1:])))

    hook = without_peft(model).get_input_embeddings().register_forward_hook(add_noise)
    try:
        yield
    finally:
        hook.remove()


def without_peft(model: Any) -> Any:
    """Return the model that a ``peft.PeftModel`` has put its adapters into; any other model itself.

    Raises:
        SpecError: its adapters are prompts, which its own forward adds.
    """
    if not hasattr(model, "peft_config"):
        return model
    for config in model.peft_config.values():
        if getattr(config, "is_prompt_learning", False):
            why = f"its adapters are prompts ({type(config).__name__}), which are no part of the model's layers"
            raise SpecError("model", why, "use LoRA or another adapter of layers")
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _differs(model: Any, path: Path) -> str | None:
    """Return why workers could not construct a model from its configuration; None if they can."""
    from raypipe.models.given.equal import difference
    from raypipe.models.sources.hugging_face import HuggingFace

    if not (hasattr(model, "save_pretrained") and hasattr(model, "config")):
        return "it has no configuration"
    write_config(model, path)
    try:
        source = HuggingFace(HfSpec(hf=str(path)))
        if source.kind is not type(model):
            return f"{type(model).__name__} is a class of the script"
        kind = dtype_of(model)
        fresh = build_without_memory(lambda: source.build().to(kind))
    except RequestError as error:
        return error.why
    return difference(model, fresh)


def columns_read(model: Any, section: Callable[[], Any]) -> frozenset[str] | None:
    """Return the columns of the data that the model reads; None if that is not known.

    Args:
        model: the model that was given.
        section: returns the job's ``model`` section; called for models given by name.
    """
    model = without_peft(model)
    if hasattr(model, "forward"):
        return accepted(model.forward)
    spec = section()
    if not isinstance(spec, HfSpec):
        return None
    from raypipe.models.sources.hugging_face import HuggingFace

    return accepted(HuggingFace(spec).kind.forward)


def capture_given(
    model: Any, job: JobSpec, script: ScriptLoss | None, resume: bool, notify: Callable[[str], None]
) -> None:
    """Capture the instance that a job's ``model`` section names; nothing is done for other models.

    Raises:
        SpecError: as ``write_given``.
    """
    if not isinstance(job.model, GivenSpec):
        return
    inner = without_peft(model)
    for path in kept_in_evaluation(inner):
        notify(f"model.{path} is in evaluation mode and stays in it; model.train() puts it in training mode")
    fields = declared_fields(job.data)
    assert fields is not None, "the trainer writes arrays"
    write_given(inner, job.model, fields, DTYPES[job.train.dtype], script, resume, notify)


def training_dtype(model: Any, asked: str, notify: Callable[[str], None]) -> str:
    """Return ``train.dtype`` for a model, that of its parameters, unless the arguments ask for bfloat16.

    Args:
        model: an instance, or a model's name.
        asked: ``bfloat16`` (``args.bf16``), or else ``float32``.
        notify: told that weights in bfloat16 are updated in float32.

    Raises:
        SpecError: the parameters are of several dtypes, or of one in which nothing trains.
    """
    if not isinstance(model, nn.Module):
        return asked
    found = dtype_of(model)
    word = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16-true"}.get(found)
    if word is None:
        name = str(found).removeprefix("torch.")
        raise SpecError(
            "model", f"its parameters are {name}, in which nothing trains here", "convert it: model.float()"
        )
    if asked == "bfloat16" and word != "bfloat16-true":
        if word == "float64":
            fix = "convert it: model.float(), or leave args.bf16 out"
            raise SpecError("args.bf16", "multiplies in bfloat16, and the model's parameters are float64", fix)
        return asked
    if word == "bfloat16-true":
        notify(
            "the model trains in bfloat16, as it is given; the optimizer has its weights in float32 beside, and the "
            "task's loss is computed in float32"
        )
    return word


def save_given(model: Any, directory: Path, out: Path | None) -> Path:
    """Write a captured instance, which has its trained values, as the Trainer does; return the directory.

    Raises:
        SpecError: ``out`` is not empty.
    """
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SpecError("output_dir", f"{out} is already there", "give a new directory")
    made = out or directory
    made.mkdir(parents=True, exist_ok=True)
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(made)
    else:
        from safetensors.torch import save_model

        save_model(model, str(made / "model.safetensors"))
    return made

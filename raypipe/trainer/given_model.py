"""The model that a script gives, as the ``model`` section of a job: constructed by the workers, or captured."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from raypipe.capture.meta import build_without_memory
from raypipe.data import declared_fields
from raypipe.errors import RequestError, SpecError
from raypipe.job import GivenSpec, HfSpec, JobSpec
from raypipe.models import DTYPES
from raypipe.models.given.check import check_function
from raypipe.models.given.read import ITEMS
from raypipe.models.given.write import (
    LossOf,
    ScriptLoss,
    accepts_items,
    dtype_of,
    kept_in_evaluation,
    loss_in,
    predicts,
    write_config,
    write_given,
)
from raypipe.models.task import IGNORED, cross_entropy
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
    from raypipe.models.given.check import difference
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
    result = dtype_of(model)
    word = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16-true"}.get(result)
    if word is None:
        name = str(result).removeprefix("torch.")
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


# ``compute_loss`` of a subclass and ``compute_loss_func``: the script's loss, captured together with the model.


GOES_ON = frozenset({"state", "control", "optimizer", "lr_scheduler", "callback_handler"})
"""Attributes of a trainer whose values follow from the step, which a loss that is captured once does not have."""


def trainers_loss(
    model: Any,
    inputs: dict[str, Any],
    function: Callable[..., Any] | None,
    return_outputs: bool,
    items: Any,
    smoothing: float = 0.0,
) -> Any:
    """Return the loss as ``transformers.Trainer.compute_loss`` does: the model's own, or the function's.

    With a ``smoothing`` and no function it is the cross-entropy of the logits, whatever the model computes from labels.

    Args:
        model: the model.
        inputs: a batch by name.
        function: ``compute_loss_func``.
        return_outputs: whether to return the model's outputs after the loss.
        items: number of labels in the mini-batch.
        smoothing: ``args.label_smoothing_factor``.
    """
    given = dict(inputs)
    labels = given.pop("labels", None) if function is not None or smoothing else None
    if items is not None and accepts_items(getattr(model, "module", model)):
        given[ITEMS] = items
    outputs = model(**given)
    if function is not None:
        loss = function(outputs, labels, num_items_in_batch=items)
    elif labels is not None:
        loss = _smoothed(model, outputs, labels, items, smoothing)
    else:
        loss = loss_in(outputs)
    return (loss, outputs) if return_outputs else loss


def smoothing_loss(smoothing: float) -> ScriptLoss:
    """Return the loss that the Trainer computes with ``label_smoothing_factor`` instead of the model's own."""

    def of(model: nn.Module, batch: dict[str, Tensor], items: Tensor) -> Any:
        return trainers_loss(model, batch, None, False, items, smoothing)

    return ScriptLoss("args.label_smoothing_factor", of)


def _smoothed(model: Any, outputs: Any, labels: Tensor, items: Any, smoothing: float) -> Tensor:
    """Return what ``transformers.LabelSmoother`` does, as one division, so that the runtime can divide instead."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
    inner = getattr(model, "module", model)
    if type(inner).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        logits, labels = logits[..., :-1, :], labels[..., 1:]
    total = cross_entropy(logits, labels, smoothing=smoothing)
    return total / (items if items is not None and accepts_items(inner) else labels.ne(IGNORED).sum())


def script_loss(trainer: Any, plain: type, function: Callable[..., Any] | None) -> ScriptLoss | None:
    """Return the loss that a script gives its trainer; None if it is the model's or the task's.

    Args:
        trainer: the trainer.
        plain: the class whose ``compute_loss`` is ``trainers_loss``.
        function: ``compute_loss_func``.
    """
    method = type(trainer).compute_loss
    if "compute_loss" in vars(trainer):
        return ScriptLoss("compute_loss", _method(trainer, vars(trainer)["compute_loss"], bound=True))
    if method is not plain.compute_loss:  # type: ignore[attr-defined]
        name = f"{type(trainer).__name__}.compute_loss"
        return ScriptLoss(name, _method(trainer, method, bound=False))
    if function is None:
        return None

    def of(model: nn.Module, batch: dict[str, Tensor], items: Tensor) -> Any:
        check_function(function, "compute_loss_func", {id(part) for part in model.modules()})
        return trainers_loss(model, batch, function, False, items)

    return ScriptLoss("compute_loss_func", of)


def _method(trainer: Any, method: Callable[..., Any], bound: bool) -> LossOf:
    def of(model: nn.Module, batch: dict[str, Tensor], items: Tensor) -> Any:
        where = f"{type(trainer).__name__}.compute_loss"
        check_function(method, where, {id(part) for part in model.modules()}, frozenset({"self", "__class__"}))
        first = () if bound else (_stand_in(trainer, model, where),)
        result = method(*first, model, dict(batch), **_counted(method, items))
        return result[0] if isinstance(result, tuple) else result

    return of


def _counted(function: Callable[..., Any], items: Any) -> dict[str, Any]:
    """Return the number of labels as an argument of a function, where it takes that."""
    takes = inspect.signature(function).parameters.values()
    return {ITEMS: items} if any(p.name == ITEMS or p.kind is p.VAR_KEYWORD for p in takes) else {}


def _stand_in(trainer: Any, model: nn.Module, where: str) -> Any:
    """Return what a method gets as ``self``: the trainer's attributes, but for those that change while it trains."""
    smoother = _smoother(float(trainer.arguments["label_smoothing_factor"] or 0.0))
    held = {**vars(trainer), "label_smoother": smoother, "model_accepts_loss_kwargs": accepts_items(model)}

    def get(self: Any, name: str) -> Any:
        if name in GOES_ON:
            why = f"reads self.{name}, which changes while training; the loss is captured once"
            raise SpecError(where, why, "leave it out, or pass what changes as a column of the data")
        if name == "model":
            return model
        if name in held:
            return held[name]
        try:
            return object.__getattribute__(self, name)
        except AttributeError:
            why = f"reads self.{name}, which a PipelineTrainer has not"
            raise SpecError(where, why, "compute the loss from the model and its inputs") from None

    def put(self: Any, name: str, value: Any) -> NoReturn:
        why = f"assigns to self.{name}, which no worker has"
        raise SpecError(where, why, "compute the loss from the model and its inputs alone")

    kind = type(f"{type(trainer).__name__}", (type(trainer),), {"__getattribute__": get, "__setattr__": put})
    return object.__new__(kind)


def _smoother(smoothing: float) -> Any:
    from transformers.trainer_pt_utils import LabelSmoother

    return LabelSmoother(epsilon=smoothing) if smoothing else None


def with_script_loss(made: Any, trainer: Any, script: ScriptLoss | None) -> Any:
    """Make a ``transformers.Trainer`` compute its loss as the script does, and return it."""
    if script is not None:

        @functools.wraps(type(made).compute_loss)
        def compute_loss(
            model: Any, inputs: Mapping[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            more = _counted(trainer.compute_loss, num_items_in_batch)
            return trainer.compute_loss(model, inputs, return_outputs=return_outputs, **more)

        made.compute_loss = compute_loss
    return made

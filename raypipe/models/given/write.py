"""Capture a model instance, and write its operations and values to a folder that workers read. Nothing is pickled."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import torch as safetensors
from torch import Tensor, nn

from raypipe.atomic_write import write_whole
from raypipe.capture.captured import Captured
from raypipe.errors import CaptureError, RaypipeError, SpecError
from raypipe.graph.captured_files import Notify, save, to_stderr
from raypipe.graph.document import to_document
from raypipe.job import GivenSpec, HfSpec
from raypipe.models.build import example_of, match_arguments, with_made
from raypipe.models.given.read import ABOUT, GRAPH, LOGITS, LOSS, SUM, WEIGHTS, read_captured, without_items
from raypipe.models.given.refused import check_instance
from raypipe.models.given.root import (
    ITEMS,
    LossOf,
    Root,
    as_trained,
    models_own,
    scalar,
    shifts_labels,
)
from raypipe.models.sources.hugging_face import HuggingFace
from raypipe.models.sources.packed_rows import apart, check_apart, is_packed
from raypipe.models.task import MASK, Field

CANNOT = "cannot be captured, and no worker could run it as it is"


class ScriptLoss(NamedTuple):
    """A loss that the script defines."""

    where: str
    """What errors call it."""
    of: LossOf


def predicts(model: nn.Module, folder: Path) -> bool:
    """Return whether a task of raypipe's has the loss that this model computes from its logits.

    So it is for an instance of a class of transformers whose own forward has not been replaced. Its configuration is
    written to the folder, from which the task follows.
    """
    from raypipe.models.given.equal import foreign_method

    config = getattr(model, "config", None)
    own = {"forward", "loss_function", "_loss_function"} & vars(model).keys()
    if own or not hasattr(config, "to_json_string") or foreign_method(type(model)) is not None:
        return False
    write_config(model, folder)
    try:
        source = HuggingFace(HfSpec(hf=str(folder)))
    except SpecError:
        return False
    return source.kind is type(model) and source.loss is None and not source.own_loss


def write_config(model: nn.Module, folder: Path) -> None:
    """Write the configuration of a model of transformers, with its class."""
    config: Any = model.config
    said = {**config.to_dict(), "architectures": [type(model).__name__]}
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(said, indent=1, default=str) + "\n"
    write_whole(folder / "config.json", text.encode())


def write_given(
    model: nn.Module,
    spec: GivenSpec,
    fields: Mapping[str, Field],
    dtype: torch.dtype,
    script: ScriptLoss | None,
    resume: bool = False,
    notify: Notify = to_stderr,
) -> None:
    """Capture an instance in its training state and write it to ``spec.given``.

    Args:
        model: the instance; it is unchanged afterwards.
        spec: the job's ``model`` section; with ``loss: task``, the folder holds the model's ``config.json``.
        fields: the data's arrays.
        dtype: the dtype in which it trains.
        script: a loss that the script defines; None for that of the task, or with ``loss: model`` the model's own.
        resume: the folder is a run's: check that it was the same model, and keep the start values there.
        notify: called with sentences about what the capture decides.

    Raises:
        SpecError: something of the model, or of the loss, cannot be carried to the workers; or the data does not fit.
    """
    if spec.loss not in ("task", "model"):
        fix = "give the function as compute_loss_func"
        raise SpecError("model.loss", "is for a model that workers construct, and this instance is captured", fix)
    if spec.as_it_is:
        raise SpecError("model.as_it_is", "this instance is captured whole", "leave it out")
    check_instance(model)
    folder = Path(spec.given)
    packed = is_packed(fields) and any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__)
    captured, about = _captured(model, spec, apart(fields) if packed else fields, dtype, script, notify)
    if packed:
        check_apart(captured)
    if resume and (folder / ABOUT).exists():
        before, said = read_captured(folder)
        if said != about or _text(before) != _text(captured):
            raise SpecError("model", "is another one than the run began with", "resume with the model that was trained")
        return
    folder.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    values = {name: value.contiguous() for name, value in captured.values.items()}
    try:
        safetensors.save_file(_weights(model, captured, dtype), folder / WEIGHTS)
        write_whole(folder / ABOUT, (json.dumps(about, indent=1) + "\n").encode())
    except OSError as error:
        failed.append(str(error.strerror))
    save(GRAPH, captured.graph, captured.calls, safetensors.save(values), folder, failed.append)
    if failed:
        raise SpecError("args.output_dir", f"{folder} can't be written: {failed[0]}", "give another directory")


def _captured(
    model: nn.Module,
    spec: GivenSpec,
    fields: Mapping[str, Field],
    dtype: torch.dtype,
    script: ScriptLoss | None,
    notify: Notify,
) -> tuple[Captured, dict[str, Any]]:
    from raypipe.capture.capture import capture  # torch.export and SymPy

    about: dict[str, Any] = {
        "ends": LOGITS,
        "padding": _padding(model),
        "shifted": False,
        "class": type(model).__name__,
    }
    frozen = spec.batch_norm == "frozen"
    where = "model" if script is None else script.where
    try:
        if script is None and spec.loss == "task":
            task = HuggingFace(HfSpec(hf=spec.given, task=spec.task)).task(fields, 0.15)
            fields = {**fields, **with_made(task, fields)}
            names = list(match_arguments(model, fields, task))
            example = {name: example_of(fields[name], dtype) for name in names}
            with as_trained(model, dtype, frozen):
                root = Root(model, names, lambda model, given: model(**given))
                return capture(root, example, outputs=("logits",), whole=True, notify=notify), about
        names = _names(model, fields, script)
        loss = models_own if script is None else script.of

        def end(model: nn.Module, given: dict[str, Any]) -> dict[str, Tensor]:
            items = given.pop(ITEMS)
            return {LOSS: scalar(loss(model, given, items), where)}

        example = {name: example_of(fields[name], dtype) for name in names}
        example[ITEMS] = torch.tensor(2)
        with as_trained(model, dtype, frozen):
            found = capture(Root(model, [*names, ITEMS], end), example, whole=True, notify=notify)
    except CaptureError as error:
        where = where if error.where == where else f"{where}, {error.where}".removesuffix(", ")
        raise SpecError(where, f"{CANNOT}: {error.why}", error.fix) from error
    except RaypipeError:
        raise
    found, summed = without_items(found, where)
    if summed:
        about |= {"ends": SUM, "shifted": shifts_labels(model)}
    else:
        about["ends"] = LOSS
    return found, about


def _names(model: nn.Module, fields: Mapping[str, Field], script: ScriptLoss | None) -> list[str]:
    """Return the fields that the model, or the script's loss, gets, as the Trainer passes them on."""
    parameters = inspect.signature(model.forward).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if script is not None:  # attention_mask is added to rows without one
        return [name for name in fields if name != MASK or anything or name in parameters]
    names = [name for name in fields if anything or name in parameters]
    for name, p in parameters.items():
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and name not in fields:
            why = f"there is no column for the model's argument {name}; there are {', '.join(sorted(fields))}"
            raise SpecError("train_dataset", why, f"name a column {name}")
    if "labels" in fields and "labels" not in names:
        fix = "add an argument labels and return the loss, or give compute_loss_func"
        raise SpecError("model", "its forward takes no labels, so it computes no loss", fix)
    return names


def _padding(model: nn.Module) -> int:
    found = getattr(getattr(model, "config", None), "pad_token_id", None)
    return found if isinstance(found, int) and found >= 0 else 0


def _weights(model: nn.Module, captured: Captured, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the values of the parameters that operations read, each in memory of its own."""
    named = dict(model.named_parameters(remove_duplicate=False))
    made = {}
    for name in captured.graph.parameters:
        value = named[name].detach()
        kind = dtype if value.is_floating_point() else value.dtype
        value = value.to("cpu", kind).contiguous()
        alone = value.untyped_storage().nbytes() == value.numel() * value.element_size()
        made[name] = value if alone else value.clone()
    return made


def _text(captured: Captured) -> str:
    return json.dumps(to_document(captured.graph, captured.calls), sort_keys=True)

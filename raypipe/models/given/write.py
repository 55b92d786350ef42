"""Capture a model instance where it stands, and write its operations and values to a folder that workers read.

It is traced without its values, with a loss of the script at its end, and unharmed. Nothing is pickled.
"""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import torch as safetensors
from torch import Tensor, nn

from raypipe.capture.captured import Captured, Notify, save, to_stderr
from raypipe.capture.meta import stand_ins
from raypipe.compat.torch_private import _BatchNorm
from raypipe.errors import CaptureError, RaypipeError, SpecError
from raypipe.files import write_whole
from raypipe.job import GivenSpec, HfSpec
from raypipe.models.build import example_of, match_arguments, with_made
from raypipe.models.given.check import check_instance, check_state, foreign_method, state_of
from raypipe.models.given.read import ABOUT, GRAPH, ITEMS, LOGITS, LOSS, SUM, WEIGHTS, read_captured, without_items
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
    seen = apart(fields) if packed else fields
    for tries_left in reversed(range(TRIES)):
        try:
            captured, about = _captured(model, spec, seen, dtype, script, notify)
            break
        except DrawnError:  # another thread may have drawn meanwhile; a forward that draws does it again
            if not tries_left:
                raise
    if packed:
        check_apart(captured)
    if resume and (folder / ABOUT).exists():
        before, said = read_captured(folder)
        if said != about or before.graph != captured.graph:
            raise SpecError("model", "is another one than the run began with", "resume with the model that was trained")
        return
    folder.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    try:
        safetensors.save_file(_weights(model, captured, dtype), folder / WEIGHTS)
        write_whole(folder / ABOUT, (json.dumps(about, indent=1) + "\n").encode())
    except OSError as error:
        failed.append(str(error.strerror))
    save(GRAPH, captured, folder, failed.append)
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
                result = capture(root, example, outputs=("logits",), whole=True, notify=notify)
                root.check_draws()
                return result, about
        names = _names(model, fields, script)
        loss = models_own if script is None else script.of

        def end(model: nn.Module, given: dict[str, Any]) -> dict[str, Tensor]:
            items = given.pop(ITEMS)
            return {LOSS: scalar(loss(model, given, items), where)}

        example = {name: example_of(fields[name], dtype) for name in names}
        example[ITEMS] = torch.tensor(2)
        with as_trained(model, dtype, frozen):
            root = Root(model, [*names, ITEMS], end)
            result = capture(root, example, whole=True, notify=notify)
            root.check_draws()
    except CaptureError as error:
        where = where if error.where == where else f"{where}, {error.where}".removesuffix(", ")
        raise SpecError(where, f"{CANNOT}: {error.why}", error.fix) from error
    except RaypipeError:
        raise
    result, summed = without_items(result, where)
    if summed:
        about |= {"ends": SUM, "shifted": shifts_labels(model)}
    else:
        about["ends"] = LOSS
    return result, about


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
    result = getattr(getattr(model, "config", None), "pad_token_id", None)
    return result if isinstance(result, int) and result >= 0 else 0


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


# The instance as it is traced.


LossOf = Callable[[nn.Module, dict[str, Tensor], Tensor], Tensor]
"""The loss of a model on a batch by name; the last argument is ``ITEMS``, which it may leave unread."""


class Root(nn.Module):
    """Has a model's submodules, parameters and buffers under their own names, and calls it, or a loss of it.

    The model itself stays as it is, so that what the script has put on it is traced: a forward of its own, or functions
    that call parts of the model.

    Args:
        model: the instance.
        names: names of the forward's arguments.
        end: returns the outputs by name from the model and its arguments by name.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], end: Callable[[nn.Module, dict[str, Any]], Any]) -> None:
        super().__init__()
        for kind in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[kind] = vars(model)[kind]
        self.__dict__["training"] = model.training
        drew: list[bool] = []

        def forward(**given: Any) -> Any:
            before = _generators()
            result = end(model, given)
            drew.append(before != _generators())
            return result

        kinds = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        forward.__signature__ = inspect.Signature(kinds)  # type: ignore[attr-defined]
        self.forward = forward
        self.drawn: Callable[[], bool] = lambda: any(drew)  # torch.export puts attributes back that a forward changes

    def check_draws(self) -> None:
        """Raise :class:`DrawnError` if Python's or numpy's generator went on during a forward."""
        if self.drawn():
            why = "draws numbers from Python's or numpy's generator in its forward, which would always be the same ones"
            raise DrawnError("model", why, "draw them with torch")


def _generators() -> tuple[object, str]:
    return random.getstate(), repr(np.random.get_state())


class DrawnError(SpecError):
    """The generators of Python or of numpy went on while a forward ran.

    They are the process's: other threads, such as those of clients of a server, draw from them as well.
    """


TRIES = 4
"""Captures of a model before numbers that are drawn in all of them are taken for its forward's."""


@contextmanager
def as_trained(model: nn.Module, dtype: torch.dtype, frozen_norms: bool = False) -> Iterator[None]:
    """Put a model into the state in which it trains, with parameters on the meta device, inside the block.

    An instance in evaluation mode as a whole, as ``from_pretrained`` returns it, is put in training mode as the Trainer
    does it; else each module keeps its mode.

    Args:
        model: the instance; all is restored after the block.
        dtype: the dtype to convert floating-point parameters and buffers to.
        frozen_norms: put batch norms in evaluation mode.

    Raises:
        SpecError: the forward changes an attribute.
    """
    modes = [(part, part.training) for part in model.modules()]
    with ExitStack() as stack:
        stack.callback(_restore_modes, modes)
        if not model.training:
            model.train()
        if frozen_norms:
            for part in model.modules():
                if isinstance(part, _BatchNorm):
                    part.eval()
        for one in _caching(model):
            stack.callback(setattr, one, "use_cache", one.use_cache)
            one.use_cache = False  # it changes no value, and its keys and values are no outputs
        for part in model.modules():
            if getattr(part, "gradient_checkpointing", False) is True:
                stack.callback(setattr, part, "gradient_checkpointing", True)
                part.gradient_checkpointing = False  # type: ignore[assignment]

        def shaped(value: Tensor) -> Tensor:
            kind = dtype if value.is_floating_point() else value.dtype
            if isinstance(value, nn.Parameter):
                return nn.Parameter(torch.empty(value.shape, dtype=kind, device="meta"), value.requires_grad)
            return value.detach().to("cpu", kind, copy=True)

        stack.enter_context(stand_ins(model, shaped, buffers=True))
        state = state_of(model)
        yield
        check_state(state, model)


def _caching(model: nn.Module) -> list[Any]:
    """Return the configurations of a model of transformers that say whether it keeps keys and values."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        return []
    return [one for one in {id(c): c for c in (config, config.get_text_config())}.values() if hasattr(one, "use_cache")]


def _restore_modes(modes: Sequence[tuple[nn.Module, bool]]) -> None:
    for part, training in modes:
        part.training = training


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of all of a model's floating-point parameters.

    Raises:
        SpecError: there are several, or one in which nothing trains.
    """
    first: dict[torch.dtype, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() or parameter.is_complex():
            first.setdefault(parameter.dtype, name)
    if not first:
        raise SpecError("model", "has no parameters, so there is nothing to train", "give a model with parameters")
    if len(first) > 1:
        what = ", ".join(f"{name} is {str(kind).removeprefix('torch.')}" for kind, name in first.items())
        why = f"its parameters are of several dtypes: {what}"
        raise SpecError("model", why, "convert it, for example model.float()")
    (result,) = first
    return result


def kept_in_evaluation(model: nn.Module) -> list[str]:
    """Return the outermost modules that are in evaluation mode inside a model in training mode."""
    result: list[str] = []
    if model.training:
        for path, part in model.named_modules():
            if not part.training and not any(path.startswith(f"{outer}.") for outer in result):
                result.append(path)
    return result


def accepts_items(model: nn.Module) -> bool:
    """Return whether the Trainer passes ``ITEMS`` to a model's forward."""
    if hasattr(model, "accepts_loss_kwargs"):
        return bool(model.accepts_loss_kwargs)
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(model.forward).parameters.values())


def shifts_labels(model: nn.Module) -> bool:
    """Return whether the Trainer counts a model's labels without each row's first, as causal language models' are."""
    try:
        from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
    except ImportError:
        return False
    config = getattr(model, "config", None)
    kind = LOSS_MAPPING.get(getattr(model, "loss_type", None) or "")
    return kind is ForCausalLMLoss and not getattr(config, "is_encoder_decoder", False)


def models_own(model: nn.Module, batch: dict[str, Tensor], items: Tensor) -> Tensor:
    """Return the loss that a model computes itself (a ``LossOf``), as the Trainer reads it.

    Raises:
        SpecError: it returns none.
    """
    more = {ITEMS: items} if accepts_items(model) else {}
    return loss_in(model(**batch, **more))


def loss_in(outputs: Any) -> Tensor:
    """Return the loss among a model's outputs: by its name, or else the first.

    Raises:
        SpecError: there is none.
    """
    if isinstance(outputs, Tensor):
        result: Any = outputs
    elif isinstance(outputs, Mapping):
        if outputs.get("loss") is None:
            fix = 'return a dict with "loss" when the forward is given labels, or give compute_loss_func'
            raise SpecError("model", f"returns no loss, but {', '.join(map(str, outputs))}", fix)
        result = outputs["loss"]
    else:
        result = outputs[0]
    return scalar(result, "model")


def scalar(found: Any, where: str) -> Tensor:
    """Check that a loss is one number.

    Raises:
        SpecError: it is not.
    """
    if not isinstance(found, Tensor) or found.numel() != 1 or not found.is_floating_point():
        shape = f"a tensor of shape {list(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise SpecError(where, f"returns {shape} as the loss", "return a scalar")
    return found.reshape(()) if found.dim() else found

"""A model instance as workers have it: its operations and values, read from the folder that the driver has written."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from raypipe.capture.captured import Captured, load_kept
from raypipe.errors import SpecError
from raypipe.files import read_json
from raypipe.job import GivenSpec, HfSpec
from raypipe.models.captured import CapturedModel, Unmixed
from raypipe.models.losses import OwnLoss
from raypipe.models.sources.hugging_face import HuggingFace
from raypipe.models.task import IGNORED, Field, Inputs, Labels, Task

GRAPH, ABOUT, WEIGHTS = "operations", "given.json", "weights.safetensors"
"""Files of the folder; the operations are two files, as in the cache of captured models."""
LOGITS, LOSS, SUM = "logits", "loss", "sum"
"""What the graph ends with: what the task's loss is computed from, the loss itself, or a sum of losses of labels."""
ITEMS = "num_items_in_batch"
"""Argument with which the Trainer tells a loss how many labels its whole mini-batch has."""
AGAIN = "train again from the script, which writes it"


def given_model(
    spec: GivenSpec,
    fields: Mapping[str, Field] | None,
    mask: float,
    tensor: bool,
    unmixed: Unmixed | None,
    smoothing: float = 0.0,
) -> CapturedModel:
    """Return the layers of an instance.

    Args:
        spec: the job's ``model`` section.
        fields: the data's arrays.
        mask: share of tokens to mask, for a masked language model.
        tensor: tensor parallelism divides the model.
        unmixed: see ``CapturedModel``.
        smoothing: ``train.label_smoothing``.

    Raises:
        SpecError: the folder holds no instance, or the job asks for what an instance cannot.
    """
    if fields is None:
        raise SpecError(
            "data.type", "an instance was captured for arrays, and this is text", "use data: {type: arrays}"
        )
    if tensor:
        why = "divides layers by their classes, and an instance is captured as operations"
        fix = 'use pp and dp alone, or give {"import": "package.module:function"} for a function that builds it'
        raise SpecError("parallel.tensor", why, fix)
    folder = Path(spec.given)
    try:
        stamp = (folder / f"{GRAPH}.json").stat().st_mtime_ns
    except OSError:
        raise SpecError("model.given", f"{folder} holds no captured model", AGAIN) from None
    return _given(spec.model_dump_json(), stamp, tuple(sorted(fields.items())), mask, unmixed, smoothing)


@lru_cache(maxsize=4)
def _given(
    record: str,
    stamp: int,
    given: tuple[tuple[str, Field], ...],
    mask: float,
    unmixed: Unmixed | None,
    smoothing: float,
) -> CapturedModel:
    spec, fields = GivenSpec.model_validate_json(record), dict(given)
    folder = Path(spec.given)
    result, about = read_captured(folder)
    task = _task(folder, about, spec, fields, mask).smoothed(smoothing)
    if about["ends"] == LOGITS:
        rows = {name: torch.zeros(1, *field.shape, dtype=field.dtype) for name, field in fields.items()}
        fields |= {name: Field(tuple(t.shape[1:]), t.dtype) for name, t in task.complete(rows).items()}
    for name in result.graph.inputs:
        if name not in fields:
            raise SpecError("data", f"holds no {name}, which the model was captured with", f"add an array {name}")
    named = {name: (name, fields[name]) for name in result.graph.inputs}
    return CapturedModel(result, task, GivenValues(folder), named, _never, unmixed=unmixed)


def read_captured(folder: Path) -> tuple[Captured, dict[str, Any]]:
    """Read the operations, and what is said about them.

    Raises:
        SpecError: a file is missing or damaged.
    """
    notices: list[str] = []
    result = load_kept(GRAPH, folder, notices.append)
    try:
        about = dict(read_json(folder / ABOUT))
    except (OSError, ValueError) as error:
        notices.append(f"{ABOUT}: {error}")
        about = {}
    if result is None or about.get("ends") not in (LOGITS, LOSS, SUM):
        why = "; ".join(notices) or f"{folder} holds no captured model"
        raise SpecError("model.given", why, AGAIN)
    return result, about


def _task(folder: Path, about: Mapping[str, Any], spec: GivenSpec, fields: Mapping[str, Field], mask: float) -> Task:
    if about["ends"] == LOGITS:
        return HuggingFace(HfSpec(hf=str(folder), task=spec.task)).task(fields, mask)
    labels = Labels()
    labels.padding = int(about["padding"])
    task = SummedLoss(labels, fields, bool(about["shifted"])) if about["ends"] == SUM else OwnLoss(labels, fields)
    task.padding = labels.padding
    return task


def _never() -> NoReturn:
    raise SpecError("model.given", "an instance is captured whole, and nothing constructs it again", AGAIN)


class GivenValues:
    """Start values: those that the instance had (a ``StartValues``)."""

    notices = ()

    def __init__(self, folder: Path) -> None:
        self.path = folder / WEIGHTS

    def read(self, parameters: Collection[str], buffers: Collection[str], seed: int) -> Mapping[str, Tensor]:
        """Return the values of these parameters; buffers have theirs with the operations.

        Raises:
            SpecError: the file cannot be read.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.path, framework="pt") as content:
                return {name: content.get_tensor(name) for name in parameters}
        except (OSError, SafetensorError) as error:
            raise SpecError("model.given", f"{self.path} can't be read: {error}", AGAIN) from None


# Losses that the script divides by the number of labels of the whole mini-batch, which no micro-batch knows.
#
# Such a loss is ``sum / num_items_in_batch``. So its graph ends before that division, and the runtime, which knows the
# number, divides.
_DIVISION = "aten.div.Tensor"
_SAME = "aten.alias.default"
FIX = f"divide the sum of the losses by {ITEMS} at the end, or do without it"


def without_items(found: Captured, where: str) -> tuple[Captured, bool]:
    """Return the graph without the division by ``ITEMS`` at its end, and whether there was one.

    Raises:
        SpecError: the loss uses the number otherwise; ``where`` names it.
    """
    graph = found.graph
    sources = {key: source for key, source in graph.sources.items() if key != ITEMS}
    readers = [n for n, operation in enumerate(graph.operations) if ITEMS in operation.operands]
    if not readers:
        return replace(found, graph=replace(graph, sources=sources)), False
    (last,) = graph.outputs.values()
    operation = graph.operations[last]
    if readers != [last] or operation.target != _DIVISION or operation.operands[-1] != ITEMS:
        raise SpecError(where, f"uses {ITEMS} for more than a division of the whole loss", FIX)
    operations = list(graph.operations)
    operations[last] = replace(operation, target=_SAME, args=operation.args[:1], kwargs={})
    return replace(found, graph=replace(graph, operations=tuple(operations), sources=sources)), True


class SummedLoss(OwnLoss):
    """The data of another task, with a sum over labels that the model returns; the mean is over all labels.

    Args:
        of: the other task.
        fields: names of the data's fields.
        shifted: the first label of each row is no target.
    """

    unit = "as the script computes it"

    def __init__(self, of: Task, fields: Collection[str], shifted: bool) -> None:
        super().__init__(of, fields)
        self.shifted = shifted

    def loss(self, output: Tensor, inputs: Inputs) -> Tensor:
        """Return the sum."""
        return output

    def targets(self, inputs: Inputs) -> int:
        """Count the labels that are not ``IGNORED``, as the Trainer does."""
        labels = inputs[self.counted]
        return int((labels[..., 1:] if self.shifted else labels).ne(IGNORED).sum())

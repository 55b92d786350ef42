"""From a job to the layers of its model."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from raypipe.errors import SpecError, nearest
from raypipe.job import CapturedSpec, GptSpec, HfSpec, ImportSpec, JobSpec
from raypipe.models.captured import CapturedModel, Share
from raypipe.models.gpt_layers import GptLayers
from raypipe.models.hugging_face import HuggingFace
from raypipe.models.imported import Imported
from raypipe.models.layered import LayeredModel
from raypipe.models.source import ModelSource
from raypipe.models.task import Field, Task
from raypipe.partition.capture import capture
from raypipe.partition.empty import build_without_memory
from raypipe.partition.shard import shard
from raypipe.partition.tensor import Division

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.float32}
"""Of parameters, by ``train.dtype``; bfloat16 is autocast."""
Fields = Mapping[str, Field]


def build_model(job: JobSpec, fields: Fields | None, member: int | None = None) -> LayeredModel:
    """The layers of a job's model; ``fields`` are the raw inputs that the data's arrays give, None for text.

    With ``member``, that member's share of a model divided as the job says (``parallel.tensor``); else the whole one.
    A captured model is captured once in a process.

    Raises:
        SpecError: the model does not exist, does not fit its data, or does not divide.
        CaptureError: it cannot be captured.
    """
    division = None
    if member is not None and job.parallel.tensor > 1:
        division = Division(job.parallel.tensor, member, job.parallel.tensor_table)
    if isinstance(job.model, GptSpec):
        return GptLayers(job.model, DTYPES[job.train.dtype], division)
    kind = HfSpec if isinstance(job.model, HfSpec) else ImportSpec
    record = json.dumps(job.model.model_dump(mode="json"), sort_keys=True)
    # Members differ in nothing that is captured.
    common = division and replace(division, member=0)
    model = _captured(kind, record, job.data.mask, _frozen(fields), job.train.dtype, common)
    return model if division is None else model.share_of(division)


def _frozen(fields: Fields | None) -> tuple[tuple[str, Field], ...] | None:
    return None if fields is None else tuple(sorted(fields.items()))


@lru_cache(maxsize=4)
def _captured(
    kind: type[HfSpec] | type[ImportSpec], record: str, mask: float, given: tuple[tuple[str, Field], ...] | None,
    dtype: str, division: Division | None,
) -> CapturedModel:  # fmt: skip
    spec = kind.model_validate_json(record)
    arrays = None if given is None else dict(given)
    source: ModelSource = HuggingFace(spec) if isinstance(spec, HfSpec) else Imported(spec)
    task = source.task(arrays, mask)
    fields = dict(arrays) if arrays is not None else task.text_fields(_sequence(spec))
    fields |= _made(task, fields)
    build = _in_training(source.build, spec, DTYPES[dtype])
    skeleton = build_without_memory(build)
    arguments = _arguments(skeleton, fields, task)
    example = {name: _example(fields[field], DTYPES[dtype]) for name, field in arguments.items()}
    named = {name: (field, fields[field]) for name, field in arguments.items()}
    share = None
    if division is not None:
        # Made before the layers are divided: what is random is compared with the whole model's.
        undivided = _captured(kind, record, mask, given, dtype, None).graph
        config = getattr(skeleton, "config", None)
        share = Share(
            division,
            division.divide(skeleton, getattr(config, "model_type", ""), config, gather_logits=True),
            undivided,
        )
    found = capture(skeleton, example, outputs=source.outputs)
    if len(found.graph.outputs) > 1:
        names = list(found.graph.outputs)
        found = capture(skeleton, example, outputs=["logits" if "logits" in names else names[0]])
    return CapturedModel(found, shard(found.graph), task, source.values(build), named, share)


def _sequence(spec: CapturedSpec) -> int:
    assert spec.sequence is not None, "checked with the job"
    return spec.sequence


def _made(task: Task, fields: Fields) -> dict[str, Field]:
    """Fields with what the task adds to them."""
    rows = {name: torch.zeros(1, *field.shape, dtype=field.dtype) for name, field in fields.items()}
    return {name: Field(tuple(t.shape[1:]), t.dtype) for name, t in task.complete(rows).items()}


def _in_training(build: Callable[[], nn.Module], spec: CapturedSpec, dtype: torch.dtype) -> Callable[[], nn.Module]:
    def prepared() -> nn.Module:
        module = build().to(dtype).train()
        if spec.batch_norm == "frozen":
            for part in module.modules():
                if isinstance(part, _BatchNorm):
                    part.eval()
        return module

    return prepared


def _example(field: Field, dtype: torch.dtype) -> Tensor:
    """Two samples; only the shape and the dtype count."""
    kind = dtype if field.dtype.is_floating_point else field.dtype
    return torch.zeros(2, *field.shape, dtype=kind)


LABELS = frozenset({"labels", "shift_labels"})


def _arguments(module: nn.Module, fields: Fields, task: Task) -> dict[str, str]:
    """Which field each argument of the model's forward gets: that of its own name.

    A model of one argument gets the one field that there is beside the labels, whatever either is called.

    Raises:
        SpecError: an argument that must be given has no field, or the loss has no labels.
    """
    parameters = {
        name: p
        for name, p in inspect.signature(module.forward).parameters.items()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    inputs = [name for name in fields if name not in LABELS]
    matched = {name: name for name in parameters if name in inputs}
    required = [name for name, p in parameters.items() if p.default is p.empty]
    if not matched and len(inputs) == 1 and len(required) == 1:
        matched = {required[0]: inputs[0]}
    for name in required:
        if name not in matched:
            why = f"the model's argument {name} has no array; there are {', '.join(sorted(fields))}"
            raise SpecError("data", why, f"name an array {name}")
    if not matched:
        raise SpecError("data", f"none of {', '.join(sorted(inputs))} is an argument of the model",
                        nearest(inputs[0], parameters) if inputs else "give the model's inputs")  # fmt: skip
    for name in task.reads - set(fields):
        raise SpecError("data", f"holds no {name}, which the loss needs", nearest(name, fields))
    return matched

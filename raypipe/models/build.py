"""Build the model of a job as a list of layers."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raypipe.capture.captured import ROWS, Captured, captured_once
from raypipe.capture.meta import build_without_memory
from raypipe.compat.torch_private import _BatchNorm
from raypipe.errors import SpecError, nearest
from raypipe.graph.dims import evaluate_all
from raypipe.graph.fingerprint import MODEL_CODE, TENSOR_CODE, Identity, fingerprint
from raypipe.graph.operations import OperationGraph
from raypipe.graph.sequence_parallel import divide_sequence
from raypipe.job import CapturedSpec, GivenSpec, GptSpec, HfSpec, ImportSpec, JobSpec
from raypipe.job.parallel_spec import ParallelSpec, check_positions
from raypipe.models.captured import CapturedModel, Share, Unmixed
from raypipe.models.divided_head import DividedHead
from raypipe.models.given.read import given_model
from raypipe.models.gpt import GptLayers
from raypipe.models.layered import VOCABULARY, LayeredModel
from raypipe.models.loss_function import (
    capture_with_loss,
    check_function,
    end_with_loss,
    figures_of,
    loss_code,
    loss_function,
)
from raypipe.models.losses import LOSS, GivenLoss, LossFunction, OwnLoss
from raypipe.models.sources.hugging_face import HuggingFace
from raypipe.models.sources.imported import Imported
from raypipe.models.sources.packed_rows import apart, check_apart, is_packed
from raypipe.models.task import MASK, Field, Task, packed_fields
from raypipe.tensor import Division, divide_module
from raypipe.tensor.experts import KEY as EXPERTS_KEY
from raypipe.tensor.experts import ExpertsParallel

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.float32,
    "bfloat16-true": torch.bfloat16,
}
"""Dtype of parameters by ``train.dtype``; bfloat16 is autocast over float32 parameters."""
Fields = Mapping[str, Field]


def build_model(
    job: JobSpec,
    fields: Fields | None,
    tensor_rank: int | None = None,
    parallel: ParallelSpec | None = None,
    expert_rank: int = 0,
) -> LayeredModel:
    """Build the layers of a job's model.

    A model is captured once, and the result is cached for other processes and runs: see ``capture/captured.py``.

    Args:
        job: the job.
        fields: the raw inputs that the data's arrays provide; None for text.
        tensor_rank: build this tensor rank's share of the model (``parallel.tensor``), with the layers of the plan
            (``parallel.vocabulary``); None builds the whole model.
        parallel: the plan's section; None where there is no plan: the job's.
        expert_rank: which share of the experts to build (``parallel.experts``), where ``tensor_rank`` is not None.

    Raises:
        SpecError: the model does not exist, does not fit its data, or cannot be divided.
        CaptureError: the model cannot be captured.
    """
    model = _whole_loss(job, fields, tensor_rank, parallel, expert_rank)
    chunk = job.train.loss_chunk_tokens
    model = model if chunk is None else model.in_chunks(chunk)
    asked = job.parallel if parallel is None else parallel
    if tensor_rank is None or asked.auto or asked.vocabulary == "whole":  # a wish of the planner is no plan yet
        return model
    divided = DividedHead(model, asked.stages)
    if name := next((n for n in divided.linear.names if job.train.iterates_on(n, 2)), None):
        fix = f'add "{name}" to train.muon_excludes, so that AdamW updates it, or use whole'
        raise SpecError(VOCABULARY, f"split divides {name}, which Muon reads whole", fix)
    return divided


def _whole_loss(
    job: JobSpec, fields: Fields | None, tensor_rank: int | None, parallel: ParallelSpec | None, expert_rank: int
) -> LayeredModel:
    """See ``build_model``; the loss reads all logits at once."""
    if job.train.dtype not in DTYPES:
        raise SpecError("train.dtype", f"{job.train.dtype} is for planning alone", "train with bfloat16-true")
    if job.train.tokens_per_step is not None:
        assert job.train.microbatch_tokens != "auto", "a number is filled in with the job"
        fields = packed_fields(fields or {}, job.train.microbatch_tokens)
    division, parallel = None, job.parallel if parallel is None else parallel
    if tensor_rank is not None and (parallel.tensor > 1 or parallel.experts > 1):
        table = parallel.tensor_table if parallel.tensor > 1 else None
        copies = 0 if parallel.auto and "replicas" not in parallel.given else parallel.replicas
        division = Division(
            parallel.tensor,
            tensor_rank,
            table,
            parallel.experts,
            expert_rank,
            copies,
            parallel.expert_order,
            parallel.sequence_parallel and parallel.tensor > 1,
        )
    smoothing = job.train.label_smoothing
    if division is not None and division.experts > 1 and not isinstance(job.model, HfSpec | ImportSpec):
        why = "only the experts of models from model.hf and model.import can be divided"
        raise SpecError(EXPERTS_KEY, why, "use experts: 1")
    if isinstance(job.model, GptSpec):
        return GptLayers(job.model, DTYPES[job.train.dtype], division, smoothing)
    unmixed = parallel.placement if parallel.placement in ("branches", "encoder") else None
    if isinstance(job.model, GivenSpec):
        return given_model(job.model, fields, job.data.mask, division is not None, unmixed, smoothing)
    kind = HfSpec if isinstance(job.model, HfSpec) else ImportSpec
    record = json.dumps(job.model.model_dump(mode="json"), sort_keys=True)
    # The capture is the same for all ranks, so it is made for rank 0 only.
    common = division and replace(division, tensor_rank=0, expert_rank=0, expert_orders=())
    lines = job.data.type == "lines"
    model = _captured(kind, record, job.data.mask, _frozen(fields), job.train.dtype, common, lines, unmixed, smoothing)
    if division is None:
        return model
    for name, shard in model.shards.items():
        if shard.axis == "experts" and job.train.iterates_on(name, len(model.graph.sources[name].type.shape)):
            fix = f'add "{name}" to train.muon_excludes, so that AdamW updates it, or use experts: 1'
            raise SpecError(EXPERTS_KEY, f"{parallel.experts} divides {name}, which Muon reads whole", fix)
    return model.share_of(division)


def _frozen(fields: Fields | None) -> tuple[tuple[str, Field], ...] | None:
    return None if fields is None else tuple(sorted(fields.items()))


@lru_cache(maxsize=4)
def _captured(
    kind: type[HfSpec] | type[ImportSpec],
    record: str,
    mask: float,
    given: tuple[tuple[str, Field], ...] | None,
    dtype: str,
    division: Division | None,
    lines: bool = False,
    unmixed: Unmixed | None = None,
    smoothing: float = 0.0,
) -> CapturedModel:
    spec = kind.model_validate_json(record)
    arrays: Fields | None = None if given is None else dict(given)
    source: HuggingFace | Imported = HuggingFace(spec) if isinstance(spec, HfSpec) else Imported(spec)
    packed = isinstance(spec, HfSpec) and is_packed(arrays or {})
    if packed:
        arrays = apart(arrays or {})
    task = source.task(arrays, mask)
    function = source.loss if spec.loss == "task" else loss_function(spec)
    own = spec.loss == "model" or source.own_loss
    if function is not None and spec.loss != "task" and spec.loss_per == "sample":
        task = GivenLoss(task, arrays if arrays is not None else task.text_fields(_sequence(spec)))
    elif own or function is not None:
        task = OwnLoss(task, arrays if arrays is not None else ("labels",))
    task = task.smoothed(smoothing)
    fields = dict(arrays) if arrays is not None else task.text_fields(_sequence(spec))
    fields |= with_made(task, fields)
    if lines:
        if task.window(1) != 1:
            why = "a line is one sequence, and this model takes two"
            raise SpecError("data.type", why, "use arrays with input_ids and labels")
        fields[MASK] = Field((_sequence(spec),), torch.int64)
    whole = divided = _in_training(source.build, spec, DTYPES[dtype])
    share = None
    if division is not None:
        divided = _divided(whole, division)
        share = Share(division, divide_module(build_without_memory(whole), division), None)
    build = divided if function is None else _ending(divided, function, list(fields))

    def fresh() -> Captured:
        # torch.export and SymPy, which workers need not import
        from raypipe.capture.capture import capture

        skeleton = build_without_memory(build)
        if function is None:
            feed_as_dict(skeleton, [name for name in fields if name not in LABELS])
        arguments = match_arguments(skeleton, fields, task)
        example: dict[str, object] = {n: example_of(fields[field], DTYPES[dtype]) for n, field in arguments.items()}
        if function is not None:
            check_function(build_without_memory(whole), function, fields, task.of_microbatch)
            return capture_with_loss(divided, function, list(fields), example, _as_it_is(skeleton, spec.as_it_is))
        example |= source.constants
        outputs = (LOSS,) if own and source.outputs is not None else source.outputs
        rows = _first_rows(arrays, task, DTYPES[dtype])
        given = None if rows is None else {n: rows[field] for n, field in arguments.items()}
        as_it_is = _as_it_is(skeleton, spec.as_it_is)
        result = capture(skeleton, example, outputs=outputs, as_it_is=as_it_is, rows=given)
        wanted = LOSS if own else "logits"
        if len(result.graph.outputs) > 1:
            names = list(result.graph.outputs)
            output = wanted if wanted in names else names[0]
            result = capture(skeleton, example, outputs=[output], as_it_is=as_it_is, rows=given)
        if own:
            _check_loss(result.graph)
        return result

    # Where a model's files are says nothing of its operations: the configuration in them, in its identity, does.
    asked = spec.model_dump_json(exclude={"hf", "init", "adapters"})
    result = captured_once(_key(source.identity(whole), asked, fields, dtype, share, loss_code(spec)), fresh)
    if share is not None and share.division.size > 1 and any(one.random for one in result.graph.operations):
        # Copies that divide experts alone draw random numbers for the whole of every tensor.
        share = share._replace(whole=_captured(kind, record, mask, given, dtype, None, lines).graph)
    if packed and (division is None or division.experts == 1):
        check_apart(result)
    elif packed:  # what copies send each other are tokens, one by one: the undivided model is checked
        _captured(kind, record, mask, given, dtype, None, lines, unmixed, smoothing)
    named = {name: _field(name, fields) for name in result.graph.inputs}
    if division is not None and division.sequence:
        check_positions([field.shape[0] for _, field in named.values() if field.shape], division.size)
        result = replace(result, graph=divide_sequence(result.graph, division.size))
    if function is not None and isinstance(task, OwnLoss):
        task.figures = figures_of(*result.graph.outputs)
    if isinstance(task, GivenLoss):
        task.fit(_losses(result.graph, named, 2), _losses(result.graph, named, 3), fields)
    return CapturedModel(result, task, source.values(whole), named, build, share, unmixed, packed)


def _check_loss(graph: OperationGraph) -> None:
    ((name, number),) = graph.outputs.items()
    kind = graph.operations[number].type
    if kind is None or kind.shape or not kind.floating:
        what = "not a tensor" if kind is None else f"{kind.dtype} of shape {list(kind.shape)}"
        fix = 'return a scalar, or a dict with "loss"; or leave model.loss out'
        raise SpecError("model.loss", f'the model returns "{name}", {what}, instead of a scalar loss', fix)


def _losses(graph: OperationGraph, fields: Mapping[str, tuple[str, Field]], samples: int) -> tuple[int, ...]:
    """Return the shape of the loss that a function returns for so many samples."""
    ((name, number),) = graph.outputs.items()
    kind = graph.operations[number].type
    if kind is None or not kind.floating:
        raise SpecError("model.loss", f'the function returns "{name}", no tensor of floats', "return the losses")
    sizes = graph.sizes({name: (samples, *field.shape) for name, (_, field) in fields.items()})
    shape = tuple(int(size) for size in evaluate_all(kind.shape, sizes))
    return shape[:-1] if figures_of(name) else shape


def _ending(build: Callable[[], nn.Module], function: LossFunction, names: Sequence[str]) -> Callable[[], nn.Module]:
    return lambda: end_with_loss(build(), function, names)


def _divided(build: Callable[[], nn.Module], division: Division) -> Callable[[], nn.Module]:
    def divided() -> nn.Module:
        module = build()
        divide_module(module, division)
        return module

    return divided


def _key(identity: Identity, record: str, fields: Fields, dtype: str, share: Share | None, loss: Sequence[Path]) -> str:
    """Return the key under which the captured model is cached."""
    given = {name: [list(field.shape), str(field.dtype)] for name, field in fields.items()}
    asked = {"model": record, "is": identity.says, "fields": given, "dtype": dtype}
    code = [*identity.code, *loss, *sorted(MODEL_CODE.rglob("*.py"))]
    if share is not None:
        asked["divided"] = {name: repr(cut) for name, cut in share.shards.items()}
        own = share.division.table
        code += [*sorted(TENSOR_CODE.rglob("*.[py]*")), *([Path(own)] if own is not None else [])]
    return fingerprint(asked, code, identity.packages)


def _sequence(spec: CapturedSpec) -> int:
    assert spec.sequence is not None, "checked with the job"
    return spec.sequence


def with_made(task: Task, fields: Fields) -> dict[str, Field]:
    """Return the fields together with those that the task derives from them."""
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


def example_of(field: Field, dtype: torch.dtype) -> Tensor:
    """Make an example input of two samples; only its shape and dtype matter."""
    kind = dtype if field.dtype.is_floating_point else field.dtype
    return torch.zeros(2, *field.shape, dtype=kind)


def _as_it_is(module: nn.Module, asked: Sequence[str]) -> list[str]:
    """Return the paths of the modules that ``model.as_it_is`` names, without those inside others.

    With them are divided experts: how many tokens they get follows from values, which no graph can hold.
    """
    parts = dict(module.named_modules())
    kinds = {type(part).__name__ for part in parts.values()}
    for name in asked:
        if name not in parts and name not in kinds:
            why = f"the model has neither a module nor a class {name}"
            raise SpecError("model.as_it_is", why, nearest(name, [*kinds, *parts]))
    result = [
        path
        for path, part in parts.items()
        if path in asked or type(part).__name__ in asked or isinstance(part, ExpertsParallel)
    ]
    return [path for path in result if not any(path.startswith(f"{other}.") for other in result)]


def _first_rows(arrays: Fields | None, task: Task, dtype: torch.dtype) -> dict[str, Tensor] | None:
    """Return the data's first rows with what the task derives from them; None where there are not enough."""
    if not arrays or any(field.rows is None for field in arrays.values()):
        return None
    try:
        rows = {name: field.rows.read(ROWS) for name, field in arrays.items() if field.rows is not None}
    except OSError:  # the data is on another host
        return None
    if any(len(values) < ROWS for values in rows.values()):
        return None
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in task.complete(rows).items()}


def _field(argument: str, fields: Fields) -> tuple[str, Field]:
    """Return the field that ``match_arguments`` matched: of the same name, or the only one besides labels and mask."""
    name = argument if argument in fields else next(field for field in fields if field not in LABELS | {MASK})
    return name, fields[name]


LABELS = frozenset({"labels", "shift_labels"})


def match_arguments(module: nn.Module, fields: Fields, task: Task) -> dict[str, str]:
    """Match the arguments of the model's forward with fields of the same name.

    If none matches, and there is one required argument and one field besides the labels and the mask, these two match.

    Raises:
        SpecError: a required argument has no field, or the loss has no labels.
    """
    parameters = {
        name: p
        for name, p in inspect.signature(module.forward).parameters.items()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    own = isinstance(task, OwnLoss)
    if own and "labels" in fields and "labels" not in parameters:
        fix = "add an argument labels, or leave model.loss out"
        raise SpecError("model.loss", "the model's forward takes no labels", fix)
    inputs = [name for name in fields if own or name not in LABELS]
    matched = {name: name for name in parameters if name in inputs}
    required = [name for name, p in parameters.items() if p.default is p.empty]
    values = [name for name in inputs if name != MASK]
    if not matched and len(values) == 1 and len(required) == 1:
        matched = {required[0]: values[0]}
    for name in required:
        if name not in matched:
            why = f"there is no array for the model's argument {name}; there are {', '.join(sorted(fields))}"
            raise SpecError("data", why, f"name an array {name}")
    if not matched:
        fix = nearest(inputs[0], parameters) if inputs else "give the model's inputs"
        raise SpecError("data", f"none of {', '.join(sorted(inputs))} is an argument of the model", fix)
    for name in task.reads - set(fields):
        raise SpecError("data", f"holds no {name}, which the loss needs", nearest(name, fields))
    return matched


def feed_as_dict(module: nn.Module, names: Sequence[str]) -> None:
    """Make a forward that takes one mapping, or ``**kwargs`` alone, take keywords of these names instead.

    Any other forward is left alone.

    It is such a forward if its one required argument has no array of its name, and is annotated as a mapping or there
    are several arrays.
    """
    parameters = inspect.signature(module.forward).parameters.values()
    whole = module.forward
    if any(p.kind is p.VAR_KEYWORD for p in parameters) and all(
        p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters
    ):
        module.forward = _of(names, lambda rows: whole(**rows))
        return
    required = [
        p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if len(required) != 1 or any(p.name in names for p in parameters):
        return
    annotated = str(required[0].annotation).lower()
    if len(names) < 2 and not any(word in annotated for word in ("dict", "mapping")):
        return
    module.forward = _of(names, whole)


def _of(names: Sequence[str], call: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    def forward(**rows: Any) -> Any:
        return call(rows)

    kinds = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=Mapping) for name in names]
    forward.__signature__ = inspect.Signature(kinds)  # type: ignore[attr-defined]
    return forward

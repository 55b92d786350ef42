"""Capture an unmodified module as operations, without allocating its parameters."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile
from typing import Any, Literal

import torch
from torch import Tensor, nn

from raypipe.capture.captured import Captured, Notify, to_stderr
from raypipe.capture.encode import encode
from raypipe.capture.meta import tied_names
from raypipe.capture.opaque import WHOLE, CannotRunAloneError
from raypipe.capture.stage_module import compute, decoded, resolve
from raypipe.capture.torch_export import Blame, StoppedError, blame, export
from raypipe.compat.torch_private import FakeTensor
from raypipe.compat.torch_private import _pytree as pytree
from raypipe.errors import CaptureError, nearest
from raypipe.graph.dims import Dim, Sizes, evaluate, evaluate_all, symbols
from raypipe.graph.operation_costs import short_name
from raypipe.graph.operations import Operation, OperationGraph, Plain, needed, selected
from raypipe.graph.positions import CONSTANT, LONGEST, Dims, varying_dims
from raypipe.graph.shared_heads import sharing_heads

AS_A_WHOLE = (
    "the model runs as it is, as one stage: it cannot be captured, so it is not cut into several, and B computes all "
    "weight gradients"
)
NO_VALUE = "this buffer has no value, because it was computed from a parameter or from uninitialised memory"


def capture(
    module: nn.Module,
    inputs: Mapping[str, object],
    *,
    outputs: Sequence[str] | None = None,
    dynamic: Mapping[str, tuple[int, ...]] | None = None,
    as_it_is: Sequence[str] = (),
    rows: Mapping[str, Tensor] | None = None,
    whole: bool = False,
    notify: Notify = to_stderr,
) -> Captured:
    """Capture the forward of a module on example inputs, in its current mode (training or evaluation).

    The dtypes of the parameters are captured too, so a model must be captured in the precision that it runs in. A
    submodule whose forward cannot be captured becomes one opaque operation, unless the ``whole`` model is asked for.

    Args:
        module: the model. Its parameters may be meta tensors (``meta.build_without_memory``).
        inputs: the forward's arguments by name. Tensors need a batch of two or more; other values become constants.
        outputs: names of the results to keep; all by default. A result is named by its key in a mapping, its field in
            a structure, "0", "1", ... in a tuple, or "output" if it is the only one.
        dynamic: per input, the dimensions that may differ at run time; by default the first of each, and the second of
            integer inputs (tokens).
        as_it_is: paths of submodules that are opaque from the beginning.
        rows: ``ROWS`` rows of the data by the forward's arguments: if the model cannot be captured, the shapes of its
            results are found by running it on these, else on made-up inputs.
        whole: make no module opaque, because nobody can construct it again.
        notify: called with a sentence about each submodule that becomes opaque.

    Raises:
        CaptureError: the model cannot be captured; the error names the module, the file, the line and the reason.
    """
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    if dynamic is None:
        dynamic = {
            n: (0, 1) if t.dim() > 1 and not t.is_floating_point() else (0,) for n, t in tensors.items() if t.dim()
        }
    _check(module)
    ties = tied_names(module)
    classes = {path: f"{type(part).__module__}.{type(part).__qualname__}" for path, part in module.named_modules()}

    def traced(given: Mapping[str, object], listed: list[str] | None) -> tuple[Any, OperationGraph]:
        with told_if_slow(module, notify):
            made = export(module, given, dynamic, opaque, listed, rows)
        found = encode(made, ties, _wanted(made, outputs), classes)
        check_sizes(found)
        return made, found

    if tied := _shares(ties, as_it_is):
        raise CaptureError(", ".join(as_it_is), f"cannot run as it is: {tied}", "name the module that holds both")
    opaque: list[str] = list(as_it_is)
    said: dict[str, str] = {}
    stands_in = True
    first: CaptureError | None = None
    while True:
        listed: list[str] | None = [] if stands_in else None
        try:
            program, graph = traced(inputs, listed)
            if listed and _calls(traced(_one_sample_more(inputs), [])[1]) != _calls(graph):
                stands_in = False  # the model does something with how many samples there are
                continue
            break
        except CannotRunAloneError as error:
            path = error.path
            outer = _caller(module, path, ties) if path not in as_it_is else WHOLE
            if path == WHOLE or (outer == WHOLE and "forward" in vars(module)):
                if first is not None:
                    raise CaptureError(first.where, f"{first.why}; and as a whole it {error.why}", first.fix) from error
                raise
            why = f"{error.where}: {error.why}"
            because = why if first is None else f"{first.where}: {first.why}; {why}"
            if outer == WHOLE:
                opaque, said = [WHOLE], {WHOLE: f"{AS_A_WHOLE}: {because}"}
                continue
            # What calls it may be able to run alone.
            siblings = _siblings(module, outer)
            said[siblings[0]] = f"{_listed(siblings)} as it is, for it cannot be captured: {because}"
            opaque = _outside(opaque, siblings) + siblings
        except CaptureError:
            raise  # of an output that is not there
        except Exception as error:  # a model's own code may raise anything when it is traced
            found = error.blame if isinstance(error, StoppedError) else blame(module, error)
            if whole:
                raise found.error from error
            first = first or found.error
            siblings = _siblings(module, found.module)
            as_a_whole = not found.module or any(
                path == done or path.startswith(f"{done}.") for path in siblings for done in opaque
            )
            if not as_a_whole and (tied := _shares(ties, siblings)):
                why = f"{found.error.why}; {tied}"
                found = Blame(found.module, CaptureError(found.error.where, why, found.error.fix))
                as_a_whole = True
            if opaque == [WHOLE] or (as_a_whole and "forward" in vars(module)):
                # A forward that was put on the model, such as one that ends with a loss function, is not its class's.
                raise found.error from error
            if as_a_whole:
                opaque, said = [WHOLE], {WHOLE: f"{AS_A_WHOLE}: {found.error.where}: {found.error.why}"}
                continue
            why = f"{found.error.where}: {found.error.why}"
            said[siblings[0]] = f"{_listed(siblings)} as it is, for it cannot be captured: {why}"
            opaque = _outside(opaque, siblings) + siblings
    for path, words in said.items():
        if path in opaque:
            notify(words)
    values = {}
    stored = dict(module.named_buffers()) | {k: v for k, v in program.constants.items() if isinstance(v, Tensor)}
    for name, source in graph.sources.items():
        if source.kind in ("buffer", "constant"):
            values[name] = _real(name, stored)
    return replace_masks(Captured(graph, values), notify)


def _calls(graph: OperationGraph) -> list[Any]:
    return [(operation.args, operation.kwargs) for operation in graph.operations]


def _one_sample_more(inputs: Mapping[str, object]) -> dict[str, object]:
    return {
        name: torch.cat([value, value[:1]]) if isinstance(value, Tensor) and value.dim() else value
        for name, value in inputs.items()
    }


def _check(module: nn.Module) -> None:
    """Check what must hold before a module is traced.

    Raises:
        CaptureError: a buffer was computed from parameters, which have no values yet; a parameter has hooks; or a
            parametrization writes a buffer in every forward.
    """
    for path, part in module.named_modules():
        if "SpectralNorm" in type(part).__name__:
            why = "spectral_norm writes its estimate in every forward, so results would depend on the plan"
            raise CaptureError(f"module {path}", why, "use weight_norm or orthogonal, or normalise in the constructor")
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            why = "it has a hook on its gradient, which the stages' parameters would not have"
            raise CaptureError(name, why, "do what it does to the parameter in the forward, or to the loss")
    for name, buffer in module.named_buffers():
        if buffer.is_meta:
            raise CaptureError(name, NO_VALUE, "give the buffer its value in the constructor")


def _siblings(module: nn.Module, path: str) -> list[str]:
    """Return the modules of the same class as the one at ``path``, at the same place of every repeated block."""
    kind, place = type(module.get_submodule(path)), re.sub(r"\d+", "0", path)
    return [p for p, part in module.named_modules() if type(part) is kind and re.sub(r"\d+", "0", p) == place]


def _outside(opaque: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return those of ``opaque`` that are in none of the others."""
    return [done for done in opaque if not any(done == path or done.startswith(f"{path}.") for path in others)]


def _caller(module: nn.Module, path: str, ties: Sequence[tuple[str, ...]]) -> str:
    """Return the module around the one at ``path`` that may run as it is; "" is the model itself."""
    outer = path.rpartition(".")[0]
    while outer and isinstance(module.get_submodule(outer), nn.ModuleList | nn.ModuleDict):
        outer = outer.rpartition(".")[0]
    return "" if _shares(ties, _siblings(module, outer)) else outer


def _listed(paths: Sequence[str]) -> str:
    return f"module {paths[0]} runs" if len(paths) == 1 else f"each of {paths[0]} .. {paths[-1]} runs"


def _shares(ties: Sequence[tuple[str, ...]], paths: Sequence[str]) -> str:
    """Say which parameter one of these modules shares with others, because an opaque module holds its own; or ""."""
    for path in paths:
        for group in ties:
            inside = [name for name in group if name.startswith(f"{path}.")]
            if inside and len(inside) < len(group):
                other = next(name for name in group if name not in inside)
                return f"it shares {inside[0]} with {other}"
    return ""


def _real(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    value = tensors[name]
    if value.is_meta or isinstance(value, FakeTensor):
        raise CaptureError(name, NO_VALUE, "give the buffer its value in the constructor")
    return value.detach().clone()


def _wanted(program: Any, outputs: Sequence[str] | None) -> dict[str, int]:
    """Return the positions of the wanted outputs among the program's results."""
    names = _output_names(program)
    found = {name: position for position, name in enumerate(names) if name}
    if outputs is None:
        return found
    for name in outputs:
        if name not in found:
            raise CaptureError(f"output {name}", "the model does not return it", nearest(name, found))
    return {name: found[name] for name in outputs}


def _output_names(program: Any) -> list[str]:
    """Return a name for each result; "" for those that are not tensors."""
    spec = program.call_spec.out_spec
    specs = [s for s in program.graph_signature.output_specs if s.kind.name == "USER_OUTPUT"]
    positions = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    paths, _ = pytree.tree_flatten_with_path(positions)
    names = [
        "_".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path) for path, _ in paths
    ]
    is_tensor = [type(s.arg).__name__ == "TensorArgument" for s in specs]
    return [(name or "output") if good else "" for name, good in zip(names, is_tensor, strict=True)]


# Say which module a long capture is in.
#
# A loop over a sequence is traced turn by turn, and symbolic sizes make some models slow to trace.


FIRST_S = 60.0
"""Seconds until it is said for the first time; then after twice as long each time."""


@contextmanager
def told_if_slow(module: nn.Module, notify: Callable[[str], None], first_s: float = FIRST_S) -> Iterator[None]:
    """Call ``notify`` when the block has taken ``first_s`` seconds, and again after twice as long each time."""
    done, tracing, began = threading.Event(), threading.get_ident(), time.monotonic()
    paths = {id(part): path for path, part in module.named_modules() if path}

    def watch() -> None:
        wait = first_s
        while not done.wait(wait):
            where = _innermost(tracing, paths)
            inside = f"is in module {where} now: model.as_it_is runs it as it is, without" if where else "goes on"
            notify(f"the model is being captured, which has taken {time.monotonic() - began:.0f} s and {inside}")
            wait *= 2

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _innermost(thread: int, paths: dict[int, str]) -> str:
    """Return the path of the innermost module that a thread is calling; "" if there is none."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        found = paths.get(id(frame.f_locals.get("self")))
        if found is not None:
            return found
        frame = frame.f_back
    return ""


# Find operations whose results have sizes that follow from values, as ``x[mask]`` has.
#
# No stage could know such a size before it computes it. The smallest module that holds these operations and all that
# read their results runs as it is, so that nothing of such a size enters or leaves it.


FIX = "choose with torch.where or a mask instead, or move these lines to a module of their own: it runs as it is"


def check_sizes(graph: OperationGraph) -> None:
    """Check that all sizes follow from the sizes of the inputs.

    Raises:
        StoppedError: one does not.
    """
    known = graph.example.keys()
    unknown = {
        number
        for number, operation in enumerate(graph.operations)
        if operation.type is not None and any(symbols(size) - known for size in operation.type.shape)
    }
    if not unknown:
        return
    readers = [o for o in graph.operations if not unknown.isdisjoint(o.operands)]
    paths = [o.module.split(".") for o in [*(graph.operations[n] for n in unknown), *readers]]
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    path = ".".join(parts[0] for parts in shared)
    first = graph.operations[min(unknown)]
    where = ", ".join(part for part in (f"operation {first.name}", path and f"module {path}", first.source) if part)
    raise StoppedError(Blame(path, CaptureError(where, "its result's size depends on the values of a tensor", FIX)))


# Give attention no mask, or ``is_causal``, where its mask says no more than that; then fused kernels apply.
#
# Models of the transformers library build a mask tensor whenever they are traced, for no value may decide otherwise. On
# GPUs, ``scaled_dot_product_attention`` with a mask can't use FlashAttention, and every stage would make the mask
# again.
#
# A mask is replaced only where this is provably the same. It must be positional (``graph/positions.py``), and vary
# along queries and keys alone. Then its values at the captured lengths, which are computed and compared, decide those
# for any batch and for all shorter lengths; ``OperationGraph.at_most`` keeps longer ones away. An additive mask must be
# exactly 0 where it shows, and -inf or the dtype's lowest value where it hides: in a causal row that always shows its
# own position, both give a weight of exactly 0.
# Without one, kernels also read heads that queries share as they are (``graph/shared_heads.py``).


MASKS = 64
"""Masks of which it is remembered what they say."""
Kind = Literal["causal", "absent", "other"]


def replace_masks(captured: Captured, notify: Notify) -> Captured:
    """Return the model without the masks that are causal or show everything, and without what computed them.

    Args:
        captured: the model.
        notify: called with a sentence if a mask is too large to be computed here, and stays.
    """
    graph = captured.graph
    operations, varying = list(graph.operations), varying_dims(graph)
    kinds: dict[int, Kind] = {}
    at_most: dict[str, int] = dict(graph.at_most)
    for number, operation in enumerate(graph.operations):
        if (mask := operation.mask) is None:
            continue
        if mask not in kinds:
            kinds[mask] = _kind(captured, mask, varying[mask], notify)
        kind = graph.operations[mask].type
        lengths = (_length(graph, operation.args[0]), _length(graph, operation.args[1]))
        if kind is None or kinds[mask] == "other" or (kinds[mask] == "causal" and lengths != kind.shape[-2:]):
            continue
        operations[number] = sharing_heads(graph, operation.without_mask(kinds[mask] == "causal"))
        at_most |= {s: graph.example[s] for dim in kind.shape[-2:] for s in symbols(dim) if s in graph.example}
    plain = replace(graph, operations=tuple(operations), at_most=at_most)
    plain = selected(plain, sorted(needed(plain)))
    return Captured(plain, {name: value for name, value in captured.values.items() if name in plain.sources})


def _length(graph: OperationGraph, given: Plain) -> Dim | None:
    """Return the number of queries or keys that an operand of attention has."""
    kind = graph.type_of(given.get("op", given.get("of")))
    return None if kind is None else kind.shape[-2]


# ---- what a mask says


def _kind(captured: Captured, mask: int, varying: Dims | None, notify: Notify) -> Kind:
    graph = captured.graph
    operation = graph.operations[mask]
    if operation.type is None or len(operation.type.shape) < 2 or varying is None:
        return "other"
    rank = len(operation.type.shape)
    if not varying <= {rank - 2, rank - 1}:
        return "other"
    inner = {s for dim in operation.type.shape[-2:] for s in symbols(dim)}
    sizes = {name: value if name in inner else 1 for name, value in graph.example.items()}
    longest = max(evaluate_all(operation.type.shape[-2:], sizes))
    if longest > LONGEST:
        notify(f"attention keeps its mask {operation.name}, for at length {longest} it is not compared with others")
        return "other"
    key = _made_by(captured, mask, sizes)
    if key not in _known:
        if len(_known) >= MASKS:
            _known.clear()
        _known[key] = _compared(captured, mask, sizes)
    return _known[key]


_known: dict[str, Kind] = {}
"""Masks by what makes them: the shares of tensor ranks have the same one, of which half a second is saved."""


def _made_by(captured: Captured, mask: int, sizes: Sizes) -> str:
    """Describe what ``computed`` computes: operations, constants, and the shapes of what only has its shape read."""
    graph, places, said = captured.graph, dict[int | str, int](), list[object]()

    def shape_of(operand: int | str) -> object:
        kind = graph.type_of(operand)
        return None if kind is None else (kind.dtype, evaluate_all(kind.shape, sizes))

    def place(operand: int | str) -> object:
        if operand not in places:
            what: object = shape_of(operand)
            if isinstance(operand, int):
                operation = graph.operations[operand]
                name = short_name(operation.target)
                shape_alone = name == "sym_size" or name in CONSTANT
                read = [(shape_alone and shape_of(one)) or place(one) for one in operation.operands]
                what = operation.target, _bare(operation.args), _bare(operation.kwargs), read
            elif operand in captured.values:
                what = captured.values[operand].tolist()
            places[operand] = len(places)
            said.append(what)
        return places[operand]

    place(mask)
    return repr((said, sizes))


def _bare(value: Plain) -> Plain:
    """Return arguments without the numbers and names of operands."""
    if isinstance(value, list | tuple):
        return [_bare(item) for item in value]
    if isinstance(value, Mapping):
        return {key: None if key in ("op", "of") else _bare(item) for key, item in value.items()}
    return value


def _compared(captured: Captured, mask: int, sizes: Sizes) -> Kind:
    """Compare the values of a mask with those of a causal one and of one that shows everything."""
    operation = captured.graph.operations[mask]
    assert operation.type is not None
    value = computed(captured, mask, sizes)
    if value is None:
        return "other"
    hidden = _hidden(value.reshape(-1, *value.shape[-2:])[0])
    if hidden is None:
        return "other"
    if not bool(hidden.any()):
        return "absent"
    square = operation.type.shape[-2] == operation.type.shape[-1]
    return "causal" if square and torch.equal(hidden, torch.ones_like(hidden).triu(1)) else "other"


def _hidden(mask: Tensor) -> Tensor | None:
    """Return which keys a mask hides; None for one that changes the weights in another way."""
    if mask.dtype == torch.bool:
        return ~mask
    if not mask.dtype.is_floating_point:
        return None
    hidden = mask <= torch.finfo(mask.dtype).min
    return hidden if bool((hidden | (mask == 0)).all()) else None


def computed(captured: Captured, wanted: int, sizes: Sizes) -> Tensor | None:
    """Compute a positional result; None if it looks something up by a negative index."""
    graph = captured.graph

    def given(operand: int | str) -> Any:
        operation = graph.operations[operand] if isinstance(operand, int) else None
        if operation is None:
            constant = captured.values.get(str(operand))
            return any_of(operand) if constant is None else constant
        if short_name(operation.target) == "sym_size":
            kind = graph.type_of(operation.operands[0])
            assert kind is not None, "only tensors have sizes"
            return evaluate(kind.shape[operation.args[1]], sizes)
        if short_name(operation.target) in CONSTANT:
            args, kwargs = decoded(operation, {o: any_of(o) for o in operation.operands}, "cpu")
            return resolve(operation.target)(*args, **kwargs)
        return None

    def any_of(operand: int | str) -> Any:
        """Return a size, or for a tensor of which only the shape is read, any one of that shape."""
        kind = graph.type_of(operand)
        if kind is None:
            return compute(graph, int(operand), given)
        return torch.zeros((), dtype=getattr(torch, kind.dtype)).expand(evaluate_all(kind.shape, sizes))

    def allowed(operation: Operation, args: Sequence[Any]) -> bool:
        return short_name(operation.target) != "index" or not any(bool((place < 0).any()) for place in args[1])

    result: Tensor | None = compute(graph, wanted, given, allowed)
    return result

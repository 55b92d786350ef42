"""A compiled stage on disk: a JSON document and the Python modules that Inductor has generated, one per piece.

Who finds it need not trace the stage again, nor import what traces. Modules load the kernels that lie in torch's cache
beside them, and are as trustworthy as those: code that this user's processes have written. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raypipe.atomic_write import whole, write_whole
from raypipe.files import read_json, read_regular
from raypipe.runtime.compiled.layout import Gradient, GraphLayout, InputSlot, Interface
from raypipe.runtime.compiled.program import Compiled, CompiledPiece, Pieces, StageProgram
from raypipe.runtime.compiled.stage import CompiledStage, Span
from raypipe.runtime.compiled.traced_keys import RandomPlaces
from raypipe.runtime.executor.compile_report import CutReport
from raypipe.runtime.stage.stage import StageModule
from raypipe.runtime.transport.channel import TensorSpec

DOCUMENT = "stage.json"


@dataclass(frozen=True)
class PieceSource:
    """A piece and the Python module that computes it."""

    piece: Interface
    code: str


@dataclass(frozen=True)
class StoredPart:
    """The compiled pieces of a stage, or of a segment of it."""

    span: Span
    layout: GraphLayout
    shapes: tuple[TensorSpec, ...]
    pieces: dict[str, PieceSource]
    """By the names of ``Pieces``; those that the schedule has no use for are missing."""
    validates: bool = False
    """Whether it is the stage's forward in validations."""


def write_stage(folder: Path, parts: Sequence[StoredPart], kept: CutReport) -> None:
    """Write a compiled stage, whole or not at all; what another process has written meanwhile stays."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with whole(folder, folder=True) as made:
        rows = []
        for part in parts:
            pieces = {}
            for name, source in part.pieces.items():
                digest = hashlib.sha256(source.code.encode()).hexdigest()
                write_whole(made / f"{digest}.py", source.code)
                pieces[name] = {**_interface(source.piece), "code": digest}
            shapes = [[list(spec.shape), _name(spec.dtype)] for spec in part.shapes]
            what = {"span": part.span, "validates": part.validates}
            rows.append({**what, "layout": _layout(part.layout), "shapes": shapes, "pieces": pieces})
        write_whole(made / DOCUMENT, json.dumps({"parts": rows, "kept": asdict(kept)}))


def is_sound(folder: Path) -> bool:
    """Return whether a compiled stage lies here as it was written."""
    try:
        document: Any = read_json(folder / DOCUMENT)
        codes = {piece["code"] for part in document["parts"] for piece in part["pieces"].values()}
        for digest in codes:
            _checked(folder, digest)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False
    return True


def read_stage(folder: Path, module: StageModule) -> tuple[CompiledStage, CutReport] | None:
    """Load a compiled stage; None if it is missing or damaged.

    Args:
        folder: where it was written.
        module: the stage that it computes.
    """
    try:
        document: Any = read_json(folder / DOCUMENT)
        compiled = CompiledStage()
        for row in document["parts"]:
            layout, shapes = _read_layout(row["layout"]), [TensorSpec(tuple(s), _dtype(d)) for s, d in row["shapes"]]
            loaded = {
                name: CompiledPiece(_read_interface(piece), _call_of(folder, piece["code"]))
                for name, piece in row["pieces"].items()
            }
            pieces = Pieces(**loaded)
            program = StageProgram(module, layout, pieces, shapes)
            if row["validates"]:
                compiled.validation.append(program)
                continue
            span = None if row["span"] is None else (int(row["span"][0]), int(row["span"][1]))
            compiled.programs.setdefault(span, []).append(program)
        kept = document["kept"]
        sizes = int(kept["kept_bytes"]), int(kept["handed_bytes"])
        return compiled, CutReport(tuple(kept["in_input_grad"]), *sizes, kept["eager_validation"])
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, ImportError):
        return None


def _call_of(folder: Path, digest: str) -> Compiled:
    """Load the module of a piece; errors are those of ``_checked``."""
    path = _checked(folder, digest)
    spec = importlib.util.spec_from_file_location(f"raypipe_stage_{digest}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    call: Callable[[list[Tensor]], Sequence[Tensor]] = module.call
    return call


def _checked(folder: Path, digest: str) -> Path:
    """Return the file of a module.

    Raises:
        OSError: it is missing.
        ValueError: it is not what was written.
    """
    path = folder / f"{digest}.py"
    if path.parent != folder or hashlib.sha256(read_regular(path)).hexdigest() != digest:
        raise ValueError(f"{path} is damaged")
    return path


def _interface(piece: Interface) -> dict[str, Any]:
    return {"slots": piece.slots, "gradients": piece.gradients, "back": piece.back, "hands": piece.hands}


def _read_interface(row: dict[str, Any]) -> Interface:
    return Interface(
        slots=tuple(InputSlot(source, int(number)) for source, number in row["slots"]),
        gradients=tuple(Gradient(*one) for one in row["gradients"]),
        back=tuple(row["back"]),
        hands=int(row["hands"]),
    )


def _layout(layout: GraphLayout) -> dict[str, Any]:
    row = {one.name: getattr(layout, one.name) for one in fields(GraphLayout)}
    return row | {"places": asdict(layout.places), "casts": [(n, _name(dtype)) for n, dtype in layout.casts]}


def _read_layout(row: dict[str, Any]) -> GraphLayout:
    return GraphLayout(
        parameters=list(row["parameters"]),
        buffers=list(row["buffers"]),
        inputs=list(row["inputs"]),
        places=RandomPlaces(**row["places"]),
        trained=list(row["trained"]),
        takes_gradient=tuple(row["takes_gradient"]),
        differentiable=tuple(row["differentiable"]),
        statistics=list(row["statistics"]),
        casts=[(int(number), _dtype(name)) for number, name in row["casts"]],
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return found

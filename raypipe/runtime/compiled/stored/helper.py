"""The process that compiles one stage for a worker, which trains meanwhile: ``python -m`` this module.

A request comes on standard input, which stays open as long as the worker wants the answer. The process builds the
stage, traces and compiles it, writes it to the cache, and prints on one line why it could not, if it could not.
"""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import shutil
import sys
import threading
from contextlib import suppress
from dataclasses import fields
from typing import Any

import torch

from raypipe.models import build_model
from raypipe.runtime.compiled.compiler import TracedStage, shapes_of, trace_stage, wanted_pieces
from raypipe.runtime.compiled.inductor.compile_graph import compile_graph
from raypipe.runtime.compiled.layout import GraphLayout, Interface
from raypipe.runtime.compiled.needs import Example
from raypipe.runtime.compiled.stage import span_of
from raypipe.runtime.compiled.stored.document import PieceSource, StoredPart, is_sound, write_stage
from raypipe.runtime.compiled.stored.limit import keep_within
from raypipe.runtime.compiled.stored.request import Request
from raypipe.runtime.compiled.tracing.cut import GraphPiece
from raypipe.runtime.compiled.tracing.joint import JointGraph
from raypipe.runtime.executor.compile_report import first_line
from raypipe.runtime.setup.setup import build_stage, io_specs_of

# Compile a traced stage into the sources of its pieces.


def compiled_parts(traced: TracedStage) -> list[StoredPart]:
    """Compile the pieces that a stage's programs run, and its forwards in validations as far as they can be.

    Raises:
        ValueError: a piece holds constants that are no part of its source.
        Exception: whatever Inductor raises.
    """
    found = []
    for example, joint, cut in traced.parts:
        pieces = {
            name: PieceSource(_interface(piece), _source(joint, piece, name not in ("forward", "forward_only")))
            for name, piece in wanted_pieces(cut, traced.needed).items()
        }
        found.append(StoredPart(span_of(example.segment), _layout(joint), shapes_of(example, joint), pieces))
    try:
        return [*found, *map(_validation, traced.validation)]
    except Exception as error:  # the stage trains compiled all the same
        traced.eager_validation = first_line(error)
        return found


def _validation(part: tuple[Example, JointGraph, GraphPiece]) -> StoredPart:
    example, joint, piece = part
    only = {"forward": PieceSource(_interface(piece), _source(joint, piece, False))}
    return StoredPart(None, _layout(joint), shapes_of(example, joint), only, validates=True)


def _source(joint: JointGraph, piece: GraphPiece, backward: bool) -> str:
    compiled: Any = compile_graph(piece.graph, joint.fake, backward)
    if getattr(compiled, "constants", None) or any(node.op == "get_attr" for node in piece.graph.graph.nodes):
        raise ValueError("it holds constants that a stored program cannot have")
    code: str = compiled.source_code
    return code


def _interface(piece: GraphPiece) -> Interface:
    return Interface(slots=piece.slots, gradients=piece.gradients, back=piece.back, hands=piece.hands)


def _layout(joint: JointGraph) -> GraphLayout:
    return GraphLayout(**{one.name: getattr(joint, one.name) for one in fields(GraphLayout)})


NICENESS = 10
"""Compilation leaves the processor to whoever trains."""


def main() -> int:
    """Compile what standard input asks for; the exit status is 0 unless the process itself fails."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    with suppress(OSError):
        os.nice(NICENESS)
    with os.fdopen(os.dup(0), "rb") as given:
        size = int.from_bytes(given.read(8), "big")
        request: Request = pickle.loads(given.read(size))  # from the worker that has started this process
    threading.Thread(target=_end_with_worker, daemon=True).start()
    reason = None
    try:
        _compile(request)
    except Exception as error:  # torch raises anything at all; the stage then runs eagerly
        reason = first_line(error)
    print(json.dumps({"reason": reason}), file=answers, flush=True)
    return 0


def _end_with_worker() -> None:
    """End this process when nobody waits for it any more."""
    os.read(0, 1)  # not through ``sys.stdin``, whose lock the interpreter wants when it ends
    os._exit(1)


def _compile(request: Request) -> None:
    setup = request.setup
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(request.cache)
    torch.set_num_threads(1)
    if setup.job.train.deterministic:
        torch.use_deterministic_algorithms(True)
    request.folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{request.folder}.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a copy of the stage may be compiled for another worker of this host
        if is_sound(request.folder):
            return
        shutil.rmtree(request.folder, ignore_errors=True)  # it is damaged, or only begun
        plan = build_model(setup.job, setup.fields, setup.tensor_rank, setup.parallel)
        module = build_stage(setup, plan, io_specs_of(setup, plan), request.stage, torch.device("cpu"))
        traced = trace_stage(module, request.needs)
        module.release()  # only shapes are needed from here on
        parts = compiled_parts(traced)
        write_stage(request.folder, parts, traced.kept)
    keep_within(request.folder.parent)


if __name__ == "__main__":
    sys.exit(main())

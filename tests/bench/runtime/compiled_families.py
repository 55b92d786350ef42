"""What compiled stages keep and put off, family by family: activations beside eager stages, weight gradients left in B.

    python -m tests.bench.runtime.compiled_families [NAME ...]

Two stages of each model of ``compiled_losses``, float32, with dropout, in this process; nothing is compiled, since the
cut decides both. Prints the activations that a micro-batch keeps (parameters, received activations and raw inputs not
counted) of eager and of compiled stages with a joint backward, and the share of the weight gradients' FLOPs that B
computes where the backward is split. The exit status is the number of families that keep more than eager stages or
leave more than 2 % in B.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from raypipe.data import declared_fields, open_data, prepare_data
from raypipe.job.spec import job_from
from raypipe.models import LayeredModel, build_model
from raypipe.runtime.compiled.compiler import TracedStage
from raypipe.runtime.compiled.cut import Cut, GraphPiece, ancestors, is_product, results
from raypipe.runtime.compiled.trace import value
from tests.bench.accuracy.compiled_losses import NAMES, models
from tests.bench.command import options
from tests.bench.runtime.compiled_stages import activation_bytes
from tests.runtime.compiled.pieces import compiled_device
from tests.runtime.runs.one_device import even_cut, one_device

MICROBATCH = 2
MOST_IN_B = 0.02


def loaded(job: dict[str, Any], folder: Path) -> tuple[LayeredModel, dict[str, Tensor]]:
    """A family's model in float32, and a mini-batch for it."""
    spec = job_from({**job, "train": {**job["train"], "dtype": "float32"}})
    prepare_data(spec, build_model(spec, declared_fields(spec.data)).task, folder)
    model = build_model(spec, declared_fields(spec.data))
    data = open_data(folder, model.task, spec.data.pad_to_multiple_of, None, True)
    rows = data.batch("train", spec.train.seed, 0, spec.train.batch)
    return model, {name: x.float() if x.is_floating_point() else x for name, x in rows.items()}


def flops(nodes: Iterable[fx.Node]) -> int:
    """Floating-point operations of nodes, as torch counts them."""
    total = 0
    for node in nodes:
        if not is_product(node):
            continue
        target: Any = node.target
        given = torch.utils._pytree.tree_map(lambda x: x.meta["val"] if isinstance(x, fx.Node) else x, node.args)
        total += flop_registry[target._overloadpacket](*given, **node.kwargs, out_val=node.meta["val"])
    return total


def outputs_at(piece: GraphPiece, places: Iterable[int | None]) -> list[fx.Node]:
    """Nodes that are outputs of a piece."""
    result = results(piece.graph.graph)
    return [node for place in places if place is not None and (node := result[place]) is not None]


def weight_flops(cut: Cut) -> tuple[int, int]:
    """FLOPs that only weight gradients need: those that B computes, and all of them."""
    b, w = cut.input_grad, cut.weight_grad
    needed = outputs_at(b, [*b.back, *range(b.hands, len(results(b.graph.graph)))])
    early = ancestors(outputs_at(b, [gradient.first for gradient in b.gradients])) - ancestors(needed)
    late = flops(w.graph.graph.nodes)
    for gradient in w.gradients:
        if gradient.second is not None:
            left, right = (value(node) for node in outputs_at(w, [gradient.first, gradient.second]))
            late += 2 * left.shape[0] * left.shape[1] * right.shape[1]
    return flops(early), flops(early) + late


def share_in_b(stages: Iterable[TracedStage]) -> float:
    """Share of the weight gradients' FLOPs that B computes."""
    both = [weight_flops(cut) for stage in stages for _, _, cut in stage.parts]
    total = sum(of for _, of in both)
    return sum(in_b for in_b, _ in both) / total if total else 0.0


def main() -> int:
    """Print a row per family; see above."""
    asked = options(__doc__, NAMES)
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="raypipe-compiled-") as name:
        folder = Path(name)
        every = models(folder, 1)
        for family in asked.names or NAMES:
            model, rows = loaded(every[family], folder / family)
            cut = even_cut(model, 2)
            eager = activation_bytes(one_device(model, cut, rows, torch.float32, MICROBATCH))
            made, _, reports = compiled_device(model, cut, rows, torch.float32, MICROBATCH)
            compiled = activation_bytes(made)
            _, split, _ = compiled_device(model, cut, rows, torch.float32, MICROBATCH, split=True)
            share = share_in_b(split)
            reasons = {report.reason for report in reports if report.reason}
            wrong += compiled > eager or share > MOST_IN_B or bool(reasons)
            print(f"{family:8} activations: eager {eager / 1024:8.1f} KiB  compiled {compiled / 1024:8.1f} KiB  "
                  f"{compiled / eager:.2f}   weight gradients' FLOPs in B {share:.2%}  {'; '.join(reasons)}",
                  flush=True)  # fmt: skip
    return wrong


if __name__ == "__main__":
    sys.exit(main())

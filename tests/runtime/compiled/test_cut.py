"""The pieces of a stage's joint graph give what the eager stage gives: losses and all gradients, whatever the cut."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from raypipe.job import GptSpec
from raypipe.models import GptLayers
from raypipe.runtime.compiled import needs
from raypipe.runtime.compiled.cut import COLLECTIVES, GraphPiece, ancestors, order_collectives
from raypipe.tensor.operators import cross_entropy_over_group, gather_from_group, reduce_from_group
from tests.exhaustive import exhaustive
from tests.runtime.compiled.pieces import assert_same, compiled_device, step_of
from tests.runtime.runs.one_device import even_cut, run_step
from tests.runtime.runs.test_any_model import CASES, DROPS, LENGTHS, MICROBATCH, model_of

pytest.importorskip("transformers")
VARIANTS: dict[str, dict[str, Any]] = {
    "joint": {},
    "split": {"split": True},
    "recomputed": {"split": True, "recompute": True},
}


FEW = [("gpt2", "split"), ("bert", "joint"), ("cnn", "split"), ("half frozen", "recomputed")]
"""Products of both layouts and tied weights, masks and vectors, convolutions, frozen weights."""


@pytest.mark.slow
@pytest.mark.parametrize(("case", "variant"), FEW)
def test_pieces_give_the_eager_gradients(case: str, variant: str) -> None:
    model = model_of(case)
    rows = model.task.complete(CASES[case][1])
    cut = even_cut(model, 2)
    made, _, reports = compiled_device(model, cut, rows, torch.float64, 2, **VARIANTS[variant])
    assert [report.reason for report in reports] == [None, None]
    eager = run_step(model, cut, rows, torch.float64, 2, **VARIANTS[variant])
    assert_same(step_of(made), eager)
    assert (case in DROPS) == any(program.places.own for stage in made.executor.computation.compiled.values()
                                  for some in stage.programs.values() for program in some)  # fmt: skip


def test_independent_collectives_have_one_order() -> None:
    """Those of a block whose attention and feed-forward layers read the same, before a loss of divided logits."""

    def work(x: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
        attention, forward = reduce_from_group(x.sin()), reduce_from_group(x.cos())
        loss, _ = cross_entropy_over_group(x, labels, 8, -100, 0.0)
        return [attention + forward, loss + gather_from_group(x, 8), reduce_from_group(attention)]

    given = torch.randn(3, 8), torch.arange(3)
    piece = GraphPiece(graph=make_fx(work, tracing_mode="fake")(*given), slots=())
    order_collectives(piece)
    nodes = [node for node in piece.graph.graph.nodes if node.target in COLLECTIVES]
    assert len(piece.collectives) == len(nodes) == 5
    assert all(first in ancestors([second]) for first, second in pairwise(nodes))
    assert all(torch.equal(a, b) for a, b in zip(piece.graph(*given), work(*given), strict=True))


GPT = GptSpec(layers=4, hidden=16, heads=2, sequence=8, vocabulary=256, dropout=0.1, tie_embeddings=True)
BF16_ROUNDING = 2.0**-8
"""Eager and compiled programs round to bfloat16 at the same places, but kernels sum in orders that the CPU decides.

So a value may fall to the other side of a rounding: relative to each gradient's largest entry, however small."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "tolerance", "variant"),
    [
        (torch.float64, 1e-12, {"recompute": True, "recomputed": {1, 4}, "finest": True}),
        (torch.float64, 1e-12, {"recompute": True, "pairs": True}),
        (torch.float32, BF16_ROUNDING, {"autocast": torch.bfloat16, "split": True}),
    ],
    ids=["segments", "pairs", "autocast"],
)
def test_segments_micro_batches_in_pairs_and_autocast(
    dtype: torch.dtype, tolerance: float, variant: dict[str, Any]
) -> None:
    """Segments are compiled one by one; two micro-batches in one forward run eagerly, and compiled in R."""
    model = GptLayers(GPT, dtype)
    ids = torch.randint(256, (8, 9), generator=torch.Generator().manual_seed(0))
    rows = {"input_ids": ids[:, :-1].contiguous(), "shift_labels": ids[:, 1:].contiguous()}
    cut = even_cut(model, 2)
    made, traced, reports = compiled_device(model, cut, rows, dtype, 2, **variant)
    assert [report.reason for report in reports] == [None, None]
    spans = [set(stage.programs) for stage in made.executor.computation.compiled.values()]
    assert spans == [{(0, 1), (1, 2), (2, 3)}] * 2 if "finest" in variant else spans == [{None}] * 2
    lifted = any(joint.casts for stage in traced for _, joint, _ in stage.parts)
    assert lifted == ("autocast" in variant), "weights are cast once a step"
    least = 0.0 if "autocast" in variant else 1.0
    assert_same(step_of(made), run_step(model, cut, rows, dtype, 2, **variant), tolerance, least)


@pytest.mark.parametrize("split", [*exhaustive(False), True], ids=["joint", "split"])
def test_a_budget_keeps_less_and_changes_no_gradient(split: bool) -> None:
    model = GptLayers(GPT, torch.float64)
    ids = torch.randint(256, (4, 9), generator=torch.Generator().manual_seed(0))
    rows = {"input_ids": ids[:, :-1].contiguous(), "shift_labels": ids[:, 1:].contiguous()}
    cut = even_cut(model, 2)
    eager = run_step(model, cut, rows, torch.float64, 2, split=split)
    kept = {}
    for budget in (1.0, 0.5, 0.0):
        made, _, reports = compiled_device(model, cut, rows, torch.float64, 2, split=split, budget=budget)
        assert [report.reason for report in reports] == [None, None]
        assert_same(step_of(made), eager)
        kept[budget] = [report.kept_bytes for report in reports]
    for all_of_it, half, nothing in zip(*kept.values(), strict=True):
        assert nothing < half <= 0.5 * all_of_it


@pytest.mark.slow
@pytest.mark.parametrize("most", [*exhaustive(2), 5], ids=["some", "all"])
def test_samples_of_their_own_lengths(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "MOST_LENGTHS", most)
    model = model_of("bert")
    rows = model.task.complete(CASES["bert"][1])
    own = {name: np.array(LENGTHS) for name in rows}
    cut = even_cut(model, 2)
    made, _, reports = compiled_device(model, cut, rows, torch.float64, MICROBATCH, split=True, lengths=own)
    longest = Counter(np.array(LENGTHS).reshape(-1, MICROBATCH).max(axis=1).tolist())
    assert len(longest) > 2
    compiled = longest.most_common(most)
    eager = 1 - sum(n for _, n in compiled) / longest.total()
    assert [(one.reason, one.lengths, one.eager_share) for one in reports] == [(None, len(compiled), eager)] * 2
    (programs,) = made.executor.computation.compiled[0, 0].programs.values()
    assert {program.shapes[0].shape[1] for program in programs} == {length for length, _ in compiled}
    assert_same(step_of(made), run_step(model, cut, rows, torch.float64, MICROBATCH, split=True, lengths=own))


@pytest.mark.slow
def test_the_gradient_of_a_convolution_with_a_bias_waits_for_w() -> None:
    """On the first stage B is what several weight gradients share; weight and bias share no kernel."""
    model = model_of("cnn")
    rows = model.task.complete(CASES["cnn"][1])
    _, traced, _ = compiled_device(model, even_cut(model, 2), rows, torch.float64, 2, split=True)
    convolves = torch.ops.aten.convolution_backward.default
    for stage in traced:
        for _, _, pieces in stage.parts:
            graphs = {"B": pieces.input_grad.graph.graph, "W": pieces.weight_grad.graph.graph}
            masks = {name: [n.args[-1] for n in graph.nodes if n.target is convolves] for name, graph in graphs.items()}
            assert not any(mask[1] or mask[2] for mask in masks["B"])
            assert masks["W"]
            assert all(mask == [False, True, False] for mask in masks["W"])

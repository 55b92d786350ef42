"""Attention that is causal within the documents of a row is given their positions; any other keeps its mask."""

from __future__ import annotations

import pytest
import torch

from raypipe.errors import SpecError
from raypipe.graph.operations import ATTENTION
from raypipe.models import build_model, captured
from raypipe.models.sources import packed_rows
from raypipe.models.sources.packed_rows import given_positions
from raypipe.models.task import POSITIONS, Field
from tests.capture.models import FAMILIES, NO_DROPOUT
from tests.job_files import minimal_job

pytest.importorskip("transformers")
ROWS = {"input_ids": Field((24,), torch.int64), "labels": Field((24,), torch.int64)}


def packed_model(family: str, **changes: object):
    config = {**FAMILIES[family], "vocab_size": 90, **changes}
    job = minimal_job(
        {"hf": family, "config": config}, {"type": "arrays", "path": "rows.npz"},
        {"schedule": "1f1b", "stages": 1, "microbatch": 1}, batch=None, tokens_per_step=48, microbatch_tokens=24,
    )  # fmt: skip
    return build_model(job, ROWS)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_attention_within_documents_is_given_their_positions(family: str) -> None:
    model = packed_model(family, **({"attn_pdrop": 0.0} if family == "gpt2" else {}))
    attention = [o for o in given_positions(model.captured).operations if o.target == ATTENTION]
    assert attention
    for operation in attention:
        assert operation.causal
        assert operation.argument(3) == {"of": POSITIONS}
        assert bool(operation.kwargs.get("enable_gqa")) == (family != "gpt2")
    assert model.chunk_lengths(2) == {"input_ids": 6, "position_ids": 6, "labels": 6}
    model.slices = 2
    nodes = model.build_stage(range(model.count), 1).graph.graph.nodes
    assert not any(node.name.startswith(("diff", "cumsum", "index")) for node in nodes)  # of which a mask was made


def test_windows_are_refused_by_name() -> None:
    model = packed_model("mistral")
    assert all(o.mask is not None for o in given_positions(model.captured).operations if o.target == ATTENTION)
    with pytest.raises(SpecError, match=r"parallel.context: operation .*layers.0.self_attn.*: its mask .* window"):
        model.chunk_lengths(2)
    wide = packed_model("mistral", sliding_window=24)
    assert wide.chunk_lengths(2)


def test_rows_that_are_too_long_to_compare_their_mask_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_rows, "LONGEST", 23)
    monkeypatch.setattr(captured, "LONGEST", 23)
    with pytest.raises(SpecError, match=r"layers.0.self_attn.*: its mask is not compared .* more than 23 tokens"):
        packed_model("llama").chunk_lengths(2)


def test_dropped_weights_are_refused_by_name() -> None:
    assert "attn_pdrop" in NO_DROPOUT
    with pytest.raises(SpecError, match="attn_pdrop"):
        packed_model("gpt2").chunk_lengths(2)

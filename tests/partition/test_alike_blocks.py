"""A deep model's pieces are those that capturing it whole gives, but for the names of what crosses cuts."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from raypipe.job import JobSpec
from raypipe.partition.partition_job import JobPieces, _of_alike, captured_pieces
from tests.exhaustive import exhaustive
from tests.experts.families import FAMILIES
from tests.job_files import minimal_job

SMALL: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
SLIDING = {"layer_types": ["full_attention"] * 6 + ["sliding_attention"] * 6, "sliding_window": 8}


def job(kind: str, tensor: int = 1, **config: Any) -> JobSpec:
    return minimal_job({"hf": kind, "config": {**SMALL, **config}, "sequence": 16}, parallel={"tensor": tensor})


def bare(found: JobPieces) -> JobPieces:
    pieces = tuple(replace(p, behind=tuple(replace(x, name="") for x in p.behind)) for p in found.pieces)
    return found._replace(pieces=pieces)


@pytest.fixture(autouse=True)
def no_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYPIPE_CACHE_DIR", str(tmp_path))


DENSE_FIRST = {"first_k_dense_replace": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 64}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("llama", {"tie_word_embeddings": True, "tensor": 2}),
        *exhaustive(
            ("deepseek_v3", {**FAMILIES["deepseek_v3"], **DENSE_FIRST}),  # dense blocks are smaller than a share
            *((kind, config) for kind, config in FAMILIES.items() if kind != "gpt_oss"),
            ("glm4_moe", {**FAMILIES["glm4_moe"], "first_k_dense_replace": 2}),
            ("deepseek_v3", {**FAMILIES["deepseek_v3"], **DENSE_FIRST, "moe_intermediate_size": 16}),
        ),
    ],
)
def test_they_are_those_of_the_whole_model(kind: str, config: dict[str, Any]) -> None:
    one = job(kind, **{**config, "num_hidden_layers": 13})
    result = _of_alike(one)
    assert result is not None
    assert bare(result) == bare(captured_pieces(one))


@pytest.mark.parametrize(
    "one",
    [job("llama", num_hidden_layers=6), job("qwen3", num_hidden_layers=12, use_sliding_window=True, **SLIDING)],
    ids=["shallow", "two kinds of attention"],
)
def test_others_are_captured_whole(one: JobSpec) -> None:
    assert _of_alike(one) is None


def test_costs_of_pieces_that_are_kept_load_neither_torch_nor_transformers() -> None:
    """Both take a second or more, which a plan from the cache does without."""
    code = "import sys, raypipe.partition.job_costs; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

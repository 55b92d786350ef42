"""Experts divided over copies, with real actors: the losses of one device; checkpoints for any number of copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from raypipe.checkpoint import open_checkpoint
from raypipe.job.spec import JobSpec
from raypipe.observe.run_log import EVENTS, read_rows
from raypipe.tensor import is_experts
from tests.exhaustive import exhaustive
from tests.experts.families import FAMILIES
from tests.experts.test_divided_experts import model_of
from tests.runtime.runs.small_runs import Done, drive, job_for

pytest.importorskip("transformers")


AUXILIARY = {"output_router_logits": True, "router_aux_loss_coef": 0.3}
WITH_AUXILIARY = {"mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "olmoe", "ernie4_5_moe"}
MIXTRAL = {"hf": "mixtral", "config": FAMILIES["mixtral"], "sequence": 16}


def job_of(text: Path, parallel: dict[str, Any], model: dict[str, Any] = MIXTRAL, **train: Any) -> JobSpec:
    return job_for(model, text, {"microbatch": 2, **parallel}, **{"clip": 0.5, "checkpoint_every": 2, **train})


@pytest.fixture(scope="module")
def reference(text_folder: Path, tmp_path_factory: pytest.TempPathFactory, stage_pool) -> Done:
    """One device, which holds all experts."""
    return drive(job_of(text_folder, {}), stage_pool, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def known_loads() -> dict[str, Any]:
    """What the first plan's routers did."""
    return {}


TWO = {"replicas": 2, "experts": 2}
ORDERS = {"expert_order": [[3, 0, 2, 1], [1, 2, 0, 3]]}
PLANS = [
    {"schedule": "1f1b", "stages": 2, **TWO},
    {"schedule": "zb-v", "stages": 2, **TWO, "sync": "eager"},
    {"schedule": "chimera", "stages": 2, **TWO, "microbatch": 1},
    {"schedule": "1f1b", "stages": 1, "shard": "zero3", **TWO, **ORDERS},
    {"schedule": "1f1b", "stages": 1, "shard": "zero3", "replicas": 4, "experts": 2},
    {"schedule": "dualpipev", "stages": 1, **TWO, "microbatch": 1},
    {"schedule": "1f1b", "stages": 2, "slices": 2, **TWO},
    *exhaustive(
        {"schedule": "1f1b", "stages": 2, "vocabulary": "split", **TWO},
        {"schedule": "1f1b", "stages": 2, "vocabulary": "split", "shard": "zero3", **TWO},
        {"schedule": "1f1b", "stages": 1, "replicas": 4, "experts": 2},
        {"schedule": "1f1b", "stages": 1, "replicas": 4, "experts": 4},
        {"schedule": "1f1b", "stages": 2, "shard": "zero1", **TWO},
        {"schedule": "1f1b", "stages": 1, "shard": "zero1", "replicas": 4, "experts": 2},
        {
            "schedule": "1f1b",
            "stages": 1,
            "shard": "zero2",
            "replicas": 4,
            "experts": 2,
            "expert_order": [[3, 0, 2, 1], [1, 2, 0, 3]],
        },
        {"schedule": "1f1b", "stages": 1, "shard": "zero2", "shard_replicas": 2, "replicas": 4, "experts": 2},
        {"schedule": "chimera", "stages": 2, "shard": "zero2", "replicas": 4, "experts": 2, "microbatch": 1},
        {"schedule": "zb-v", "stages": 2, "shard": "zero1", "replicas": 4, "experts": 2, "microbatch": 1},
        {"schedule": "dualpipev", "stages": 1, "shard": "zero2", "replicas": 4, "experts": 2, "microbatch": 1},
        {"schedule": "early-recompute", "stages": 2, **TWO},
        {"schedule": "1f1b", "stages": 2, "recompute": "full", **TWO},
        {"schedule": "dualpipev", "stages": 2, **TWO, "microbatch": 1},
        {"schedule": "dualpipe", "stages": 2, **TWO, "microbatch": 1},
        {"schedule": "interleaved-overlap", "stages": 2, **TWO, "microbatch": 1},
        {"schedule": "1f1b", "stages": 1, "recompute": [2], **TWO},
    ),
]

OPENED = {(4, "zero3", None): 1 + 1 + 2 + 2, (4, "zero2", 2): 1 + 2 + 2 + 2}
"""By replicas, ``shard`` and ``shard_replicas`` of one stage, whose experts two copies divide, the process groups: all
devices, the members of shard groups, those with the same shards or experts, and those that divide experts."""
RECOMPUTED_LAYERS = {"early-recompute": 2, "full": 2, "[2]": 1}
"""By schedule or ``parallel.recompute``."""


@pytest.mark.runs
@pytest.mark.parametrize("parallel", PLANS, ids=lambda p: "-".join(str(v) for v in p.values()))
def test_the_losses_are_those_of_one_device(
    parallel, reference, known_loads, stage_pool, text_folder, tmp_path
) -> None:
    """Clipping: the norm counts every value once. The validation batch, and the saved values, are the same too."""
    done = drive(job_of(text_folder, parallel), stage_pool, tmp_path)
    assert done.losses == pytest.approx(reference.losses, abs=1e-9, rel=0)
    assert done.val_losses == pytest.approx(reference.val_losses, abs=1e-9, rel=0)
    (started,) = (row for row in read_rows(tmp_path / EVENTS) if row["event"] == "started")
    if (
        opened := OPENED.get((parallel["replicas"], parallel.get("shard"), parallel.get("shard_replicas")))
    ) is not None:
        assert started["process_groups"] == opened
    # Per layer and micro-batch of a group: counts, tokens with their weights, and the way back; two of them backwards.
    recomputed = RECOMPUTED_LAYERS.get(str(parallel.get("recompute", parallel["schedule"])), 0)
    microbatches = 8 // parallel.get("microbatch", 2) // parallel["experts"] * parallel.get("slices", 1)
    assert done.driver.counts["expert_all_to_all"] == ((3 + 2) * 2 + 3 * recomputed) * microbatches
    loads = [row["expert_load"] for row in done.rows]  # of the whole mini-batch: the same for every plan
    assert all(1.0 < load < 4.0 for step in loads for load in step.values())
    assert loads == known_loads.setdefault("loads", loads)
    assert list(loads[0]) == [f"model.layers.{n}.mlp.experts" for n in (0, 1)]
    saved, alone = (open_checkpoint(run.checkpoints[4]) for run in (done, reference))
    assert saved.keys == alone.keys
    expected = alone.read(alone.keys)
    for key, value in saved.read(saved.keys).items():
        torch.testing.assert_close(value, expected[key], rtol=0, atol=1e-8, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.runs
def test_bfloat16(stage_pool, text_folder, tmp_path) -> None:
    """Autocast: the same rows in the same products as one device has, which only adds them up in another order."""
    alone, divided = (
        drive(job_of(text_folder, parallel, dtype="bfloat16"), stage_pool, tmp_path / str(n))
        for n, parallel in enumerate([{}, {"stages": 2, **TWO}])
    )
    assert divided.losses == pytest.approx(alone.losses, abs=2e-3, rel=0)


@pytest.mark.runs
@pytest.mark.parametrize("family", ["ernie4_5_moe", *exhaustive(*(sorted(FAMILIES.keys() - {"ernie4_5_moe"})))])
def test_families_through_capture_and_pipeline(family, stage_pool, text_folder, tmp_path) -> None:
    """Two stages, the model's own loss with the routers' auxiliary losses where it has some (a micro-batch's own).

    Shared experts, dense first layers and biases of experts are among them.
    """
    own = {**FAMILIES[family], **(AUXILIARY if family in WITH_AUXILIARY else {})}
    model = {"hf": family, "config": own, "sequence": 16, "loss": "model"}
    alone, done = (
        drive(job_of(text_folder, parallel, model=model, steps=2), stage_pool, tmp_path / str(n))
        for n, parallel in enumerate([{}, {"stages": 2, **TWO}])
    )
    assert done.losses == pytest.approx(alone.losses, abs=1e-9, rel=0)
    if family in WITH_AUXILIARY:
        plain = model_of(family)(input_ids=(ids := torch.arange(32).view(2, 16)), labels=ids).loss
        assert plain < float(model_of(family, **AUXILIARY)(input_ids=ids, labels=ids).loss) - 0.1  # they are there
    assert done.driver.counts["expert_all_to_all"] >= (3 + 2) * 2


@pytest.mark.runs
def test_muon_for_all_else(stage_pool, text_folder, tmp_path) -> None:
    """AdamW updates stacks of matrices and of biases, which are divided; Muon what all copies have."""
    model = {"hf": "gpt_oss", "config": FAMILIES["gpt_oss"], "sequence": 16}
    plans = ({}, {"shard": "zero3", **TWO})
    alone, divided = (
        drive(job_of(text_folder, parallel, model=model, steps=2, optimizer="muon"), stage_pool, tmp_path / str(n))
        for n, parallel in enumerate(plans)
    )
    assert divided.losses == pytest.approx(alone.losses, abs=1e-9, rel=0)
    kinds = open_checkpoint(divided.checkpoints[2]).keys
    biases = {key for key in kinds if key.startswith("optim/") and "experts.gate_up_proj_bias" in key}
    assert {key.rsplit("/", 1)[1] for key in biases} == {"exp_avg", "exp_avg_sq", "step"}
    assert any(key.endswith("q_proj.weight/momentum_buffer") for key in kinds)


@pytest.mark.runs
@pytest.mark.exhaustive
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"gpt_oss"}))
def test_families_in_slices(family, stage_pool, text_folder, tmp_path) -> None:
    """Divided, and whole where they run as they are; a router chooses for each position by itself."""
    model = {"hf": family, "config": FAMILIES[family], "sequence": 16}
    names = {type(part).__name__ for part in model_of(family).modules() if is_experts(part)}
    whole = {**model, "as_it_is": sorted(names)}
    plans = [
        ({}, model, {}),
        ({"stages": 2, "slices": 2, **TWO}, model, {}),
        ({"stages": 2, "slices": 2}, whole, {"dtype": "float32"}),  # torch's grouped products have no float64
    ]
    alone, divided, as_it_is = (
        drive(job_of(text_folder, parallel, model=own, steps=2, **train), stage_pool, tmp_path / str(n))
        for n, (parallel, own, train) in enumerate(plans)
    )
    assert divided.losses == pytest.approx(alone.losses, abs=1e-9, rel=0)
    assert as_it_is.losses == pytest.approx(alone.losses, abs=1e-5, rel=0)


TABLE = """
family: mixtral's attention
model_types: [mixtral]
modules: {self_attn.q_proj: {column: num_attention_heads}, self_attn.k_proj: {column: num_key_value_heads},
          self_attn.v_proj: {column: num_key_value_heads}, self_attn.o_proj: row}
"""


@pytest.mark.runs
@pytest.mark.parametrize(
    "shared",
    [
        TWO,
        {**TWO, "shard": "zero3"},
        *exhaustive(
            {**TWO, "shard": "zero1"},
            {"replicas": 4, "experts": 2, "shard": "zero2"},
            {"replicas": 4, "experts": 2, "shard": "zero3"},
            {"replicas": 4, "experts": 2, "shard": "zero2", "shard_replicas": 2},
        ),
    ],
    ids=lambda p: "-".join(str(v) for v in p.values()),
)
def test_with_attention_divided_over_tensor_ranks(shared, reference, stage_pool, text_folder, tmp_path) -> None:
    """Each tensor rank exchanges tokens with its own of the other copy, and divides with its own what it holds, twice
    where two copies have the same experts. Checkpoints hold all kinds whole."""
    (tmp_path / "table.yaml").write_text(TABLE)
    parallel = {"stages": 1, "tensor": 2, "tensor_table": str(tmp_path / "table.yaml"), **shared}
    done = drive(job_of(text_folder, parallel), stage_pool, tmp_path / "run")
    assert done.losses == pytest.approx(reference.losses, abs=1e-9, rel=0)
    saved, alone = (open_checkpoint(run.checkpoints[4]) for run in (done, reference))
    expected = alone.read(alone.keys)
    for key, value in saved.read(saved.keys).items():
        torch.testing.assert_close(value, expected[key], rtol=0, atol=1e-8, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.runs
def test_a_checkpoint_is_read_with_another_number_of_copies(reference, stage_pool, text_folder, tmp_path) -> None:
    """Written with divided experts, read by two stages that hold all of theirs; the other way round; and in shards."""
    halves = drive(job_of(text_folder, TWO), stage_pool, tmp_path / "halves")
    shards = {"stages": 1, "replicas": 4, "experts": 2, "shard": "zero2"}
    for number, parallel in enumerate([{"stages": 2}, {"stages": 2, **TWO}, shards]):
        rest = drive(job_of(text_folder, parallel), stage_pool, tmp_path / str(number), halves.checkpoints[2], 2)
        assert rest.losses == pytest.approx(reference.losses[2:], abs=1e-9, rel=0)

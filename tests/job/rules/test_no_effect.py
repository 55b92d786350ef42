"""A key that would have no effect beside the others of its job is refused by name, and accepted where it has one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raypipe.errors import SpecError
from raypipe.job import JobSpec, job_from
from raypipe.job.rules.no_effect import RULES
from raypipe.train import prepare_run

CAPTURED = {"hf": "bert", "config": {}, "sequence": 16}


def job_of(*changes: dict[str, dict[str, Any]]) -> JobSpec:
    job: dict[str, Any] = {
        "name": "keys", "model": {"layers": 4, "hidden": 16, "heads": 2, "sequence": 16},
        "data": {"type": "bytes", "path": "stdlib"}, "train": {"steps": 4, "batch": 8},
        "parallel": {"schedule": "1f1b", "stages": 2, "microbatch": 2},
    }  # fmt: skip
    for change in changes:
        for section, keys in change.items():
            job[section] = keys if {"hf", "type"} & keys.keys() else {**job[section], **keys}
    return job_from(job)


def arrays(**keys: object) -> dict[str, Any]:
    return {"model": CAPTURED, "data": {"type": "arrays", "path": "rows.npz", **keys}}


def documents(**keys: object) -> dict[str, Any]:
    return {"data": {"type": "documents", "path": "documents", **keys}}


def packed(**keys: object) -> dict[str, Any]:
    """Return a job whose documents are packed; ``keys``: of its data."""
    return {**arrays(**keys), "train": {"steps": 4, "batch": 8, "tokens_per_step": 64}}


FOUR = [1.0, 1.0, 0.5, 0.1]
CASES: list[tuple[str, Any, dict[str, Any], dict[str, Any]]] = [
    # The key, its value, a job in which it has no effect and one in which it has one.
    ("data.held_out", "other", {}, arrays(held_out="other")),
    ("data.order", "rows.npy", {}, arrays(order="rows.npy", held_out="other")),
    ("data.group_by_length", True, {}, arrays(group_by_length=True)),
    ("data.group_by_length", True, arrays(order="rows.npy", held_out="other"), arrays(group_by_length=True)),
    ("data.order", "rows.npy", packed(held_out="other"), arrays(order="rows.npy", held_out="other")),
    ("data.group_by_length", True, packed(), arrays(group_by_length=True)),
    ("data.long_documents", "split", arrays(), packed()),
    ("train.microbatch_tokens", 32, arrays(), packed()),
    ("train.tokens_per_step", 64, {"model": CAPTURED}, arrays()),
    *(
        (f"data.{key}", value, {}, documents(**{key: value}))
        for key, value in {
            "column": "body", "tokenizer": "folder", "block_mb": 2.0, "shuffle_blocks": 2, "num_workers": 1,
        }.items()
    ),
    ("data.pad_to_multiple_of", 16, {}, arrays(pad_to_multiple_of=16)),
    ("data.mask", 0.3, {}, {"model": CAPTURED}),
    ("data.mask", 0.3, arrays(), {"model": CAPTURED}),
    ("data.mask", 0.3, {"model": {**CAPTURED, "task": "causal-lm"}}, {"model": {**CAPTURED, "task": "masked-lm"}}),
    ("model.loss_args", {"a": 1}, {"model": CAPTURED}, {"model": {**CAPTURED, "loss": "mine:loss"}}),
    ("model.loss_per", "microbatch", {"model": CAPTURED}, {"model": {**CAPTURED, "loss": "mine:loss"}}),
    ("train.betas", [0.8, 0.9], {"train": {"optimizer": "sgd"}}, {"train": {"optimizer": "adam"}}),
    ("train.betas", [0.8, 0.9], {"train": {"optimizer": "rmsprop"}}, {}),
    ("train.alpha", 0.9, {}, {"train": {"optimizer": "rmsprop"}}),
    ("train.muon_rate", "original", {}, {"train": {"optimizer": "muon"}}),
    ("train.muon_excludes", ["*"], {}, {"train": {"optimizer": "muon"}}),
    ("train.momentum", 0.9, {"train": {"optimizer": "adagrad"}}, {"train": {"optimizer": "rmsprop"}}),
    ("train.eps", 1e-6, {"train": {"optimizer": "sgd"}}, {}),
    ("train.momentum", 0.9, {}, {"train": {"optimizer": "sgd"}}),
    ("train.lr_schedule", "cosine", {"train": {"lr_table": FOUR}}, {}),
    ("train.warmup_steps", 2, {"train": {"lr_table": FOUR}}, {}),
    ("train.warmup_from_zero", True, {}, {"train": {"warmup_steps": 2}}),
    ("train.min_lr", 1e-5, {}, {"train": {"lr_schedule": "linear"}}),
    ("train.compile_first", True, {}, {"train": {"compile": "inductor"}}),
    ("train.compile_timeout_s", 60.0, {}, {"train": {"compile": "inductor"}}),
    ("train.standby", 1, {"train": {"recovery": "restart"}}, {}),
    ("parallel.activation_memory_budget", 0.5, {}, {"train": {"compile": "inductor"}}),
    ("parallel.first_k", 1, {}, {"parallel": {"sync": "reverse-first-k", "stages": 1, "replicas": 2}}),
    ("parallel.shard_replicas", 2, {}, {"parallel": {"shard": "zero1", "replicas": 4, "microbatch": 1}}),
    ("parallel.gather", "step", {}, {"parallel": {"shard": "zero3", "replicas": 2}}),
    ("parallel.keep", [0.5, 0.5], {}, {"parallel": {"recompute": "full"}}),
    ("parallel.alphas", 0.5, {"parallel": {"recompute": "full"}}, {"parallel": {"recompute": "stage-aware"}}),
    ("parallel.memory_cap_mb", 100, {}, {"parallel": {"recompute": "stage-aware"}}),
    ("parallel.tensor_table", "table.yaml", {}, {"parallel": {"tensor": 2}, "model": CAPTURED}),
    ("parallel.expert_order", [[1, 0]], {}, {"parallel": {"experts": 2, "replicas": 2, "microbatch": 1}}),
    ("parallel.imbalance", 1.5, {}, {"parallel": {"experts": "auto"}}),
    ("parallel.sub_pipelined", True, {}, {"parallel": {"tensor": 2, "microbatch": 4}, "model": CAPTURED}),
    ("parallel.sequence_parallel", True, {}, {"parallel": {"tensor": 2, "microbatch": 4}, "model": CAPTURED}),
]  # fmt: skip


def test_every_rule_has_a_case() -> None:
    assert {case[0] for case in CASES} == {key for rule in RULES for key in rule.keys}


@pytest.mark.parametrize(("key", "value", "idle", "used"), CASES, ids=lambda value: value if type(value) is str else "")
def test_it_is_refused_where_it_has_no_effect_alone(key: str, value: Any, idle: Any, used: Any) -> None:
    section, name = key.split(".")
    assert getattr(getattr(job_of(idle), section), name) != value
    with pytest.raises(SpecError) as caught:
        job_of(idle, with_key(idle, section, name, value))
    assert caught.value.where.endswith(key)
    assert caught.value.fix
    job_of(used, with_key(used, section, name, value))


def with_key(job: dict[str, Any], section: str, name: str, value: Any) -> dict[str, Any]:
    """Return a change by one key, of a section that stays what the job says."""
    return {section: {**job.get(section, {}), name: value}}


@pytest.mark.slow
def test_a_mask_is_refused_where_the_models_own_task_masks_nothing(text_folder: Path, tmp_path: Path) -> None:
    """Which task a model has is known when it has been captured, if the job names none."""
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16, "vocab_size": 256}
    data = {"type": "bytes", "path": str(text_folder), "mask": 0.3}
    job = job_of({"model": {"hf": "gpt2", "config": sizes, "sequence": 16}, "data": data})
    with pytest.raises(SpecError, match=r"data\.mask: has no effect"):
        prepare_run(job, tmp_path / "run", resume=False)


def test_what_the_planner_chooses_may_give_a_key_its_effect() -> None:
    with pytest.raises(SpecError, match="gather"):
        job_from({**job_of().model_dump(), "parallel": {"auto": True, "shard": "none", "gather": "step"}})
    job_from({**job_of().model_dump(), "parallel": {"auto": True, "gather": "step"}})

"""``parallel.experts`` in a job: what it cannot be combined with, and what the planner keeps of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from raypipe.capture.opaque import TARGET
from raypipe.errors import SpecError
from raypipe.models import build_model
from raypipe.runtime.stage.stage import StageModule
from raypipe.runtime.update.gradients import GradientSync
from raypipe.runtime.update.shards import divide
from raypipe.schedule.ir import Sharding
from raypipe.schedule.sharding import copy_ranks, sum_groups
from tests.experts.families import FAMILIES
from tests.job_files import minimal_job


def job_of(parallel: dict[str, Any], train: dict[str, Any] | None = None, model: dict[str, Any] | None = None) -> Any:
    mixtral = {"hf": "mixtral", "config": FAMILIES["mixtral"], "sequence": 16}
    return minimal_job(
        model or mixtral,
        ".",
        {"schedule": "1f1b", "stages": 1, "microbatch": 2, **parallel},
        **{"steps": 2, "batch": 24, "lr": 0.01, **(train or {})},
    )


@pytest.mark.parametrize(
    ("parallel", "train", "where", "fix"),
    [
        ({"replicas": 3, "experts": 2}, {}, "parallel.experts", "use experts: 1"),
        ({"replicas": 6, "experts": 4}, {}, "parallel.experts", "use experts: 2"),  # 3 divides the copies alone
        ({"replicas": 2, "experts": 2, "update": "optimistic"}, {}, "parallel.update", "use auto"),
        ({"replicas": 2, "experts": 2, "sync": "reverse-first-k"}, {}, "parallel.sync", "leave sync out"),
        ({"replicas": 2, "experts": 2}, {"optimizer": "adafactor"}, "parallel.experts", "another optimizer"),
        (
            {"replicas": 2, "experts": 2},
            {"cuda_graphs": "tasks", "compile": "inductor"},
            "train.cuda_graphs",
            "use none",
        ),
    ],
)
def test_what_cannot_be_combined(parallel: Any, train: Any, where: str, fix: str) -> None:
    with pytest.raises(SpecError) as caught:
        job_of(parallel, train)
    assert where in str(caught.value), caught.value
    assert fix in str(caught.value), caught.value


def test_stacks_that_muon_would_read_whole_are_not_divided() -> None:
    model = {"hf": "gpt_oss", "config": FAMILIES["gpt_oss"], "sequence": 16}
    job = job_of({"replicas": 2, "experts": 2}, {"optimizer": "muon", "muon_excludes": ["*router*"]}, model)
    with pytest.raises(
        SpecError, match=r"experts: 2 divides .*experts\.\w*bias, which Muon reads whole\n.*muon_excludes"
    ):
        build_model(job, None, 0)


def test_numbers_that_are_named_divide_copies_and_experts() -> None:
    with pytest.raises(SpecError, match=r"use experts: 4$"):
        job_of({"replicas": 12, "experts": 5})  # 6 divides the copies alone
    with pytest.raises(SpecError, match=r"use experts: 2$"):
        build_model(job_of({"replicas": 6, "experts": 3}), None, 0)  # 4 divides the experts alone


def test_models_without_experts() -> None:
    gpt = {"type": "gpt", "layers": 1, "hidden": 8, "heads": 1, "sequence": 8, "vocabulary": 256}
    with pytest.raises(SpecError, match=r"parallel\.experts: only the experts of models from model\.hf"):
        build_model(job_of({"replicas": 2, "experts": 2}, model=gpt), None, 0)


def test_a_capture_makes_no_real_values_of_divided_experts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They are nearly all of a model's memory; as every result, theirs has a row for each token."""
    monkeypatch.setenv("RAYPIPE_CACHE_DIR", str(tmp_path))  # nothing is captured before
    made: list[object] = []
    monkeypatch.setattr("raypipe.capture.opaque._real_copy", made.append)
    model = build_model(job_of({"replicas": 2, "experts": 2}), None, 0)
    assert not made
    calls = [one for one in model.graph.operations if one.target == TARGET]
    assert len(calls) == FAMILIES["mixtral"]["num_hidden_layers"]


FOUR = tuple((n,) for n in range(4))
SUMMED_WHOLE = {"stage 0, share 0 of the experts": (0, 2), "stage 0, share 1 of the experts": (1, 3)}


@pytest.mark.parametrize(
    ("copies", "experts", "sharding", "groups"),
    [
        (4, 2, None, {"stage 0": (0, 1, 2, 3), **SUMMED_WHOLE}),
        (2, 2, None, {"stage 0": (0, 1)}),
        (2, 2, Sharding(levels=(1,), copies=2), {"shards of stage 0, 0": (0, 1)}),
        (
            4,
            2,
            Sharding(levels=(3,), copies=4),
            {
                "shards of stage 0, 0": (0, 1, 2, 3),
                "shards of stage 0, 0, share 0 of the experts": (0, 2),
                "shards of stage 0, 1, share 1 of the experts": (1, 3),
            },
        ),
        (  # no two members of a shard group have the same experts
            4,
            2,
            Sharding(levels=(2,), copies=4, group=2),
            {
                "shards of stage 0, 0": (0, 1),
                "shards of stage 0, 2": (2, 3),
                "shard 0 of stage 0": (0, 2),
                "shard 1 of stage 0": (1, 3),
                **SUMMED_WHOLE,
            },
        ),
        (4, 1, Sharding(levels=(0,), copies=4), {"stage 0": (0, 1, 2, 3)}),
    ],
)
def test_only_the_groups_that_a_device_reads_are_opened(copies: int, experts: int, sharding: Any, groups: Any) -> None:
    shares = copy_ranks(copies, copies, experts) if experts > 1 else ()
    assert sum_groups(FOUR[:copies], sharding, shares=shares) == groups
    job = job_of({"replicas": copies, "experts": experts})
    for rank in range(copies):
        read = Read({name: Members(rank, members) for name, members in groups.items() if rank in members})
        model = build_model(job, None, 0, expert_rank=rank % experts)
        modules = {(0, rank): StageModule(model, range(model.count), 0, torch.device("cpu"), split=False)}
        shards = divide(modules, sharding, FOUR[:copies], (), read, shares=shares)
        GradientSync(rank, modules, FOUR[:copies], (), read, sharded=shards, expert_ranks=shares or None)
        assert read.found == set(read)


class Read(dict[str, Any]):
    """Notes which of its keys are read."""

    def __init__(self, items: dict[str, Any]) -> None:
        super().__init__(items)
        self.found = set[str]()

    def __getitem__(self, key: str) -> Any:
        self.found.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.found |= {key} & self.keys()
        return super().get(key, default)


class Members:
    """A process group that nothing is sent in."""

    def __init__(self, rank: int, members: tuple[int, ...]) -> None:
        self._rank, self._members = rank, members

    def rank(self) -> int:
        return self._members.index(self._rank)

    def size(self) -> int:
        return len(self._members)

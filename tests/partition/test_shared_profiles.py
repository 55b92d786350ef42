"""Divided models that a process of its own captures cost what they cost when they are captured here."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import raypipe.partition.job_costs as job_costs
from raypipe.cli.autoconfigure import _shared
from raypipe.cost.profile import Profile
from raypipe.errors import SpecError
from raypipe.job import JobSpec, load_cluster
from raypipe.job.cluster import ClusterSpec
from raypipe.partition.job_costs import SharedProfiles, capture_given, shared_profiles
from raypipe.partition.partition_job import captured_pieces, check_state, divided, job_pieces, to_capture
from raypipe.plan.choose import look_for_first
from raypipe.plan.tensor_groups import Sharing
from raypipe.plan.watch import Watch
from raypipe.search.budget import Budget
from tests.job_files import minimal_job
from tests.plan.conftest import make_job, make_profile

ROOT = Path(__file__).parents[2]
SMALL = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "num_hidden_layers": 1,
}  # fmt: skip


def small_job() -> JobSpec:
    return minimal_job({"hf": "llama", "config": SMALL, "sequence": 16}, parallel="auto")


@pytest.mark.parametrize("each", [16, 8], ids=["adamw", "sgd"])
def test_a_model_that_fits_nowhere_is_refused_before_it_is_captured(tmp_path: Path, monkeypatch, each: int) -> None:
    """Its parameters are those that transformers counts, and take four bytes for each of what AdamW keeps of them."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("RAYPIPE_CACHE_DIR", str(tmp_path))
    own = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    state = each * sum(p.numel() for p in own.parameters())
    job = small_job()
    job = job.model_copy(update={"train": job.train.model_copy(update={"optimizer": "sgd" if each == 8 else "adamw"})})
    h100 = load_cluster(ROOT / "cluster" / "devices" / "h100.yaml").resized(8)

    def of(total: float) -> ClusterSpec:
        device = h100.device.model_copy(update={"memory_gib": 1.0, "usable_gib": total / 8 / 2**30})
        return h100.model_copy(update={"device": device})

    check_state(job, of(1.01 * state))
    with pytest.raises(SpecError, match="no plan fits: weights, gradients and optimizer state of") as refused:
        check_state(job, of(0.99 * state))
    assert f"{state // each:,} parameters" in refused.value.why
    assert "use at least 16 devices" in refused.value.fix.replace("train.optimizer: sgd, or ", "")
    assert ("optimizer: sgd" in refused.value.fix) == (each == 16)
    job_pieces(divided(job, 1))  # kept now: the planner says more
    check_state(job, of(0.99 * state))


@pytest.mark.slow
def test_what_is_captured_elsewhere_is_found_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So is why a model cannot be divided so."""
    monkeypatch.setenv("RAYPIPE_CACHE_DIR", str(tmp_path))
    job = small_job()
    jobs = [divided(job, size) for size in (3, 2)]
    given = json.dumps([one.model_dump_json(exclude_unset=True) for one in jobs])
    monkeypatch.setattr(sys, "stdin", io.StringIO(given))
    assert all(map(to_capture, jobs))
    capture_given()
    assert not any(map(to_capture, jobs))
    with pytest.raises(SpecError, match="do not divide over tensor = 3") as kept:
        job_pieces(jobs[0])
    with pytest.raises(SpecError) as made:
        captured_pieces(jobs[0])
    assert kept.value.args == made.value.args


@pytest.mark.exhaustive
@pytest.mark.parametrize(("forked", "devices"), [(True, 2), (False, 2), (True, 4)])
def test_they_are_those_of_one_process(
    forked: bool, devices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_costs.os, "cpu_count", lambda: 2)
    if not forked:
        monkeypatch.setattr(job_costs, "fork_apart", lambda work: None)
    cluster = load_cluster(ROOT / "cluster/devices/h100.yaml").resized(devices)
    job = small_job()
    result = []
    for folder in ("here", "there"):
        monkeypatch.setenv("RAYPIPE_CACHE_DIR", str(tmp_path / folder))
        if folder == "here":
            result.append(shared_profiles(job, cluster))
        else:
            coming = SharedProfiles(job, cluster)
            assert not coming.ready
            result.append(coming.get())
            assert SharedProfiles(job, cluster).ready
    assert result[0] == result[1] != {}


FORKS = """
import time, torch
from raypipe.partition.job_costs import capture_forked
from raypipe.signals import fork_apart

torch.set_num_threads(2)
torch.zeros(4_000_000)  # by both threads
ended = fork_apart(lambda: (capture_forked(()), torch.zeros(4_000_000)))
until = time.monotonic() + 30
while not ended() and time.monotonic() < until:
    time.sleep(0.01)
print(ended())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="nothing is forked")
def test_a_forked_capture_waits_for_no_thread_of_its_parents() -> None:
    """DeepSeek-V3's constructor fills weights by OpenMP's threads, here before the fork and in the child behind it."""
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.stderr) == ("True\n", "")


class Coming:
    """Profiles that are there so many questions after a first plan; those of divided experts are there before."""

    experts: dict[Sharing, Profile] = {}  # noqa: RUF012
    helped = False

    def __init__(self, watch: Watch, questions: float) -> None:
        self.watch, self.left = watch, questions

    @property
    def ready(self) -> bool:
        if self.watch.first_plan is None:
            return False
        self.left -= 1
        return self.left < 0

    def help(self) -> None:
        self.helped = self.watch.first_plan is not None

    def get(self) -> dict[Any, Any]:
        return {"tensor": 2}


@pytest.mark.parametrize(("questions", "seconds"), [(5, 60.0), (float("inf"), 0.0)])
def test_a_first_plan_needs_none_of_them(questions: float, seconds: float, capsys: pytest.CaptureFixture[str]) -> None:
    """It is there before they are; if the time is up, or somebody stops the choice, plans go without them."""
    watch = Watch(Budget(seconds))
    coming = Coming(watch, questions)
    found, earlier = _shared(coming, make_job(), make_profile(), None, watch)  # type: ignore[arg-type]
    assert watch.first_plan is not None
    assert found == ({"tensor": 2} if seconds else {})
    assert earlier is not None
    assert coming.helped == bool(seconds)
    assert ("left out" in capsys.readouterr().err) == (not seconds)


def test_a_first_plan_may_divide_experts() -> None:
    """Where none fits without, it would not be looked for in vain until all others are there."""
    roomy = make_profile(memory_bytes=1e15).model_copy(update={"experts": 2})
    tight = make_profile(memory_bytes=1.0)
    watch = Watch(Budget(60.0))
    look_for_first(make_job(), tight, None, watch, lambda: False, {Sharing(experts=2): roomy})
    assert watch.first_plan is not None


def test_the_look_for_a_first_plan_ends_when_they_are_there() -> None:
    watch = Watch(Budget(60.0))
    look_for_first(make_job(), make_profile(), None, watch, lambda: True)
    assert watch.first_plan is None

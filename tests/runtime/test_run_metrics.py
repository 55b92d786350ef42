"""Exporting metrics never fails a run, keeps to its share of time, and goes on with a run's counts after a restart."""

import json
import math
from types import SimpleNamespace
from typing import ClassVar

import pytest

from raypipe.job.cluster import GIVEN, peak_flops_s
from raypipe.launch.plans import make_plan
from raypipe.runtime import run_metrics
from raypipe.runtime.process.memory import MeasuredMemory
from raypipe.runtime.run_metrics import RunMetrics
from tests.job_files import PIPELINE, minimal_job

ROW = {"step": 1, "loss": 2.0, "grad_norm": 1.0, "lr": 0.1, "step_s": 0.2, "tokens_per_s": 5.0, "bubble_ratio": 0.1}
CLOCK = SimpleNamespace(measured=lambda: None, recorded=None)


@pytest.fixture
def job():
    return minimal_job(
        {"type": "gpt", "layers": 2, "hidden": 16, "heads": 2, "sequence": 16, "vocabulary": 256},
        parallel=PIPELINE,
        steps=4,
        batch=8,
    )


class Recorded:
    """Stands where Ray's Gauge and Histogram do."""

    values: ClassVar[dict] = {}
    now = 0.0

    def __init__(self, name, description, *keys):
        self.name = name

    def set_default_tags(self, tags):
        self.tags = tags
        return self

    def set(self, value, tags):
        Recorded.now += 0.01  # each takes 10 ms
        Recorded.values[(self.name, *tags.values())] = value

    def observe(self, value):
        self.set(value, {})


slept: list[float] = []


class Never:
    """A thread that is not started: ``close`` sets what is newest."""

    def __init__(self, target, name, daemon):
        pass

    def start(self):
        pass

    join = start


@pytest.fixture
def recorded(monkeypatch):
    Recorded.values, Recorded.now = {}, 0.0
    slept.clear()
    for kind in ("Gauge", "Histogram"):
        monkeypatch.setattr(run_metrics.ray_metrics, kind, Recorded)
    monkeypatch.setattr(run_metrics.time, "thread_time", lambda: Recorded.now)
    monkeypatch.setattr(run_metrics.time, "monotonic", lambda: Recorded.now)
    monkeypatch.setattr(run_metrics.time, "sleep", slept.append)
    monkeypatch.setattr(run_metrics.threading, "Thread", Never)
    return Recorded.values


def places(*nodes, devices=()):
    names = devices or ["cpu"] * len(nodes)
    peers = [SimpleNamespace(node=node, device=device) for node, device in zip(nodes, names, strict=True)]
    return [SimpleNamespace(peer=peer, model="") for peer in peers]


def test_a_failure_is_told_once_and_ends_nothing(job, tmp_path, monkeypatch):
    def refuse(*_):
        raise RuntimeError("no metrics agent")

    monkeypatch.setattr(run_metrics.ray_metrics, "Gauge", refuse)
    said = []
    metrics = RunMetrics(job, make_plan(job), tmp_path, said.append)
    metrics.begin("1", places("a", "a"))
    metrics.step(ROW, CLOCK, [])
    metrics.validation(1.0)
    metrics.close()
    assert len(said) == 1
    assert "no metrics agent" in said[0]


def test_it_sets_all_again_for_no_more_than_its_share_of_the_time(job, tmp_path, recorded, monkeypatch):
    """Ray drops a gauge that nobody sets, so what came once is set with every step, and while no step comes."""
    metrics = RunMetrics(job, make_plan(job), tmp_path, pytest.fail)
    metrics.begin("1", places("a", "a"))
    metrics.validation(3.0)
    metrics.step(ROW | {"step": 5}, CLOCK, [])
    pauses = []

    def wait(pause):
        pauses.append(pause)
        recorded.clear()
        return len(pauses) > 3

    monkeypatch.setattr(metrics._ends, "wait", wait)
    metrics._work()
    assert pauses[0] == 0.0
    # Eight values of the step, the loss of the validation and four counts, 10 ms each.
    assert pauses[1:] == pytest.approx([13 * 0.01 / run_metrics.SHARE] * 3)
    metrics.close()
    assert recorded["raypipe_step",] == 5
    assert recorded["raypipe_validation_loss",] == 3.0


def test_what_came_before_and_what_was_planned(job, tmp_path, recorded):
    plan = make_plan(job)
    planned = {"schedule": "1f1b", "stages": 2, "microbatch": 2, "bubble_ratio": 0.25, "memory_bytes": [5e8, 4e8]}
    events = ["run", "restarted", "run", "restarted", "replanned", "restarted", "replanned", "replanned"]
    lines = [{"event": "planned", "candidates": [planned]}, *({"event": e} for e in events)]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    metrics = RunMetrics(job, plan, tmp_path, pytest.fail)
    metrics.begin("1", places("a", "a"))
    metrics._set_all()
    assert (recorded["raypipe_recoveries",], recorded["raypipe_replans",]) == (2, 3)
    assert recorded["raypipe_memory_planned_bytes", "1"] == 4e8
    assert recorded["raypipe_bubble_ratio_predicted",] == 0.25
    metrics.event("replanned", {})
    metrics.event("predicted", {"step_s": 0.3, "bubble_ratio": 0.2})
    metrics._set_all()
    assert recorded["raypipe_replans",] == 4
    assert (recorded["raypipe_step_predicted_seconds",], recorded["raypipe_bubble_ratio_predicted",]) == (0.3, 0.2)
    metrics.step(ROW, CLOCK, [])
    metrics.diverged()
    metrics.close()
    assert math.isnan(recorded["raypipe_loss",])


@pytest.mark.parametrize(("length", "waits"), [(30.0, []), (90.0, [3.0])])
def test_the_end_of_a_long_run_that_diverged_waits_for_the_export(
    job, tmp_path, recorded, monkeypatch, length, waits
):  # fmt: skip
    monkeypatch.setenv("RAY_metrics_report_interval_ms", "2000")
    metrics = RunMetrics(job, make_plan(job), tmp_path, pytest.fail)
    metrics.begin("1", places("a", "a"))
    Recorded.now += length
    metrics.diverged()
    metrics.close()
    assert math.isnan(recorded["raypipe_loss",])
    assert slept == waits


@pytest.mark.parametrize(
    ("devices", "limit"), [(("cpu", "cpu"), 50.0), (("cuda:a", "cuda:b"), 100.0), (("cuda:a", "cuda:a"), 50.0)]
)
def test_devices_share_the_memory_of_their_host_or_of_their_gpu(job, tmp_path, recorded, devices, limit):
    metrics = RunMetrics(job, make_plan(job), tmp_path, pytest.fail)
    metrics.begin("1", places("a", "a", devices=devices))
    metrics.step(ROW, CLOCK, [SimpleNamespace(device_memory=MeasuredMemory(7, 100.0))] * 2)
    metrics.close()
    assert recorded["raypipe_memory_limit_bytes", "0"] == recorded["raypipe_memory_limit_bytes", "1"] == limit
    assert recorded["raypipe_memory_bytes", "0"] == 7


@pytest.mark.parametrize(
    ("devices", "peaks", "says"),
    [
        (("cuda:a", "cuda:b"), (505e6, 404e6), ""),  # 1 % off
        (("cuda:a", "cuda:b"), (505e6, 440e6), "device 1 has 0.41 GiB of its GPU taken, +10% of the 0.37 GiB planned"),
        (("cuda:a", "cuda:a"), (1000e6, 800e6), ""),  # both have each other's memory in theirs
        (("cpu", "cpu"), (505e6, 440e6), ""),
    ],
)
def test_memory_of_gpus_that_is_not_what_was_planned_is_said_once_all_have_reported(
    job, tmp_path, recorded, devices, peaks, says
):  # fmt: skip
    planned = {"schedule": "1f1b", "stages": 2, "microbatch": 2, "bubble_ratio": 0.25, "memory_bytes": [5e8, 4e8]}
    (tmp_path / "events.jsonl").write_text(json.dumps({"event": "planned", "candidates": [planned]}) + "\n")
    said = []
    metrics = RunMetrics(job, make_plan(job), tmp_path, said.append)
    metrics.begin("1", places("a", "a", devices=devices))
    first, second = (SimpleNamespace(device_memory=MeasuredMemory(int(peak), 1e9)) for peak in peaks)
    nothing = SimpleNamespace(device_memory=None)
    metrics.step(ROW, CLOCK, [SimpleNamespace(device_memory=MeasuredMemory(1, 1e9))] * 2)  # of the first step
    metrics.step(ROW | {"step": 3}, CLOCK, [first, nothing])
    assert said == []
    for step in (4, 5):
        metrics.step(ROW | {"step": step}, CLOCK, [first, second])
    metrics.close()
    assert len(said) == bool(says)
    assert all(says in text for text in said)


def test_the_peak_is_that_of_the_description_or_as_given(monkeypatch):
    monkeypatch.delenv(GIVEN, raising=False)
    assert peak_flops_s("NVIDIA H100 80GB HBM3", "bfloat16") == pytest.approx(989e12, rel=0.01)
    assert peak_flops_s("NVIDIA H100 PCIe", "bfloat16") is None
    assert peak_flops_s("NVIDIA GeForce RTX 3090", "float32") is not None
    assert peak_flops_s("NVIDIA H200", "bfloat16") == pytest.approx(989e12, rel=0.01)
    assert peak_flops_s("NVIDIA A100-SXM4-80GB", "float64") == 9.7e12
    assert peak_flops_s("", "float32") is None
    assert peak_flops_s("Some other device", "float32") is None
    monkeypatch.setenv(GIVEN, "2.5")
    assert peak_flops_s("", "float32") == 2.5e12

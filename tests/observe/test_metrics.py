"""What a measured step fills the metrics with."""

import re
from pathlib import Path

import pytest

from raypipe.observe.metrics import (
    EXPERT_LOAD,
    METRICS,
    SAMPLES,
    TASK_SECONDS,
    WAIT,
    device_readings,
    exposed_s,
    session_readings,
    step_readings,
)
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Task
from raypipe.schedule.passes import replicate
from raypipe.simulate.engine import simulate
from raypipe.simulate.timeline import Span


def test_names_carry_their_units_and_are_different():
    names = [m.name for m in METRICS]
    assert len(names) == len(set(names))
    for metric in METRICS:
        assert re.fullmatch(r"raypipe_[a-z_]+", metric.name)
        assert metric.help.endswith(".")


F, AR = Task("F", 0, (0,)), Task("AR", 0, ())


@pytest.mark.parametrize(
    ("spans", "seconds"),
    [
        ([(F, 0, 4)], 0.0),
        ([(F, 0, 4), (AR, 1, 3)], 0.0),  # all of it behind compute
        ([(F, 0, 4), (AR, 3, 6)], 2.0),
        ([(AR, 0, 3), (AR, 1, 5), (F, 2, 4)], 3.0),  # two at once count once
        ([(AR, 0, 2), (F, 2, 3), (AR, 3, 4)], 3.0),
        ([(F, 0, 1), (F, 1, 2), (AR, 0.5, 1.5)], 0.0),
        ([], 0.0),
    ],
)
def test_all_reduces_that_nothing_overlaps(spans, seconds):
    assert exposed_s([Span(task, float(a), float(b)) for task, a, b in spans]) == pytest.approx(seconds)


def test_a_step_of_two_copies_by_hand(timeline):
    """ZB-H1, two devices, three micro-batches a copy: F, B and W take 1, 1 and 1, and device 0 waits in the middle."""
    one = timeline("zb-h1", devices=2, microbatches=3)
    readings = list(device_readings(one, one.makespan, copies=1))
    tasks = {(tags["stage"], tags["task"]): value for metric, value, tags in readings if metric is TASK_SECONDS}
    assert tasks == {(stage, kind): 3.0 for stage in "01" for kind in "FBW"}
    waits = [value for metric, value, _ in readings if metric is WAIT]
    assert waits == pytest.approx([one.makespan - 9.0] * 2)
    assert {name for metric, _, tags in readings for name in tags} == {"stage", "replica", "device", "task"}


@pytest.mark.parametrize(("name", "copies", "replicas"), [("chimera", 1, "0"), ("1f1b", 2, "01")])
def test_the_replica_tag_counts_copies_of_the_pipeline(timeline, name, copies, replicas):
    """Chimera's two directions are one copy."""
    one = timeline(name, devices=2, microbatches=2)
    if copies > 1:
        one = simulate(replicate(one.schedule, copies), CostTable.even(2))
    result = list(device_readings(one, one.makespan, copies))
    assert {tags["replica"] for metric, _, tags in result if metric is TASK_SECONDS} == set(replicas)
    total = sum(value for metric, value, _ in result if metric is TASK_SECONDS)
    assert total == pytest.approx(sum(one.busy))


def test_a_row_is_read_as_it_stands():
    row = {
        "step": 7, "loss": 2.5, "grad_norm": 0.3, "lr": 1e-3, "step_s": 0.5, "tokens_per_s": 64.0, "bubble_ratio": 0.1,
        "data_wait_share": 0.02, "expert_load": {"layers.0": 1.5, "layers.1": 2.0}
    }  # fmt: skip
    readings = list(step_readings(row, 16))
    result = {metric.name: value for metric, value, tags in readings if not tags}
    loads = {tags["layer"]: value for metric, value, tags in readings if metric is EXPERT_LOAD}
    assert loads == row["expert_load"]
    assert result[SAMPLES.name] == 32.0
    assert (result["raypipe_step"], result["raypipe_loss"], result["raypipe_bubble_ratio"]) == (7, 2.5, 0.1)
    assert len(result) == 9


def test_rows_of_a_served_run_are_read_by_model():
    row = {"step": 3, "loss": 2.5, "bubble_ratio": 0.1, "between_calls": 0.05, "calls": 2, "queue": 1}
    rows = {"a:0": {**row, "tokens_per_s": 10.0}, "b:0": {**row, "step": 4, "bubble_ratio": 0.2, "tokens_per_s": 20.0}}
    result = {(metric.name, *tags.values()): value for metric, value, tags in session_readings(rows)}
    assert result["raypipe_session_tokens_per_second", "b:0"] == 20.0
    assert (result["raypipe_step",], result["raypipe_bubble_ratio",]) == (4, 0.2)
    assert len(result) == 11
    assert not list(session_readings({}))


def test_the_guide_lists_every_metric_as_it_is_declared():
    page = (Path(__file__).parents[2] / "docs" / "guides" / "ray.md").read_text(encoding="utf-8")
    for metric in METRICS:
        tags = ", ".join(f"`{tag}`" for tag in metric.tags)
        assert f"| `{metric.name}` | {metric.help.rstrip('.')} | {tags} |" in page

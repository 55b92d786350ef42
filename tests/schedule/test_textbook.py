"""GPipe, 1F1B, interleaved and Chimera against their closed forms (PAPERS: Chimera, and "checked")."""

import itertools

import pytest

from raypipe.errors import ScheduleError
from raypipe.schedule import SCHEDULES, Shape, generate, stages_of
from raypipe.schedule.costs import CostTable
from raypipe.simulate.engine import simulate
from raypipe.simulate.timeline import Timeline


def run(name: str, forward: float = 1, backward: float = 2, **shape: object) -> Timeline:
    made = Shape(**shape)  # type: ignore[arg-type]
    costs = CostTable.even(stages_of(name, made), forward, backward / 2, backward / 2)
    return simulate(generate(name, made, costs), costs)


@pytest.mark.parametrize(("depth", "count"), [(1, 3), (2, 1), (4, 4), (4, 8), (8, 5), (7, 20)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "dapple"])
def test_flushed_linear_schedules(name: str, depth: int, count: int) -> None:
    timeline = run(name, 3, 5, devices=depth, microbatches=count)
    assert timeline.makespan == (count + depth - 1) * 8
    assert timeline.bubble_ratio == pytest.approx((depth - 1) / (count + depth - 1))
    held = [count] * depth if name == "gpipe" else [min(depth - d, count) for d in range(depth)]
    assert timeline.peak_activations == tuple(held)
    assert timeline.schedule.name == name


@pytest.mark.parametrize(("depth", "count", "chunks"), [(4, 8, 2), (4, 8, 3), (2, 6, 2), (8, 16, 4), (3, 9, 5)])
def test_interleaved(depth: int, count: int, chunks: int) -> None:
    timeline = run("interleaved-1f1b", 6 / chunks, 12 / chunks, devices=depth, microbatches=count, chunks=chunks)
    assert timeline.makespan == pytest.approx((count + (depth - 1) / chunks) * 18)
    held = tuple(min(2 * (depth - 1 - d) + (chunks - 1) * depth + 1, count * chunks) for d in range(depth))
    assert timeline.peak_activations == held


def test_interleaved_as_in_the_issue() -> None:
    timeline = run("interleaved-1f1b", 3, 6, devices=4, microbatches=8, chunks=2)
    assert (timeline.makespan, timeline.peak_activations) == (171, (11, 9, 7, 5))


@pytest.mark.parametrize("count", range(1, 14))
@pytest.mark.parametrize(("depth", "chunks"), [(4, 2), (3, 3), (5, 2)])
def test_interleaved_runs_with_any_number_of_micro_batches(depth: int, count: int, chunks: int) -> None:
    timeline = run("interleaved-1f1b", devices=depth, microbatches=count, chunks=chunks)
    assert timeline.busy == (count * chunks * 3,) * depth


SEVERAL = [(4, 4), (8, 4), (8, 8), (12, 4), (12, 6), (16, 8)]
"""Devices, and pipelines of which more than two run at once."""


@pytest.mark.parametrize(
    ("depth", "pipelines", "units"),
    [
        *((depth, 2, units) for depth, units in ((2, 1), (4, 1), (4, 3), (8, 4), (6, 2))),
        *((*shape, 1) for shape in SEVERAL), (8, 4, 3), (12, 6, 2), (12, 4, 2),
    ],
)  # fmt: skip
def test_chimera_with_equal_forward_and_backward(depth: int, pipelines: int, units: int) -> None:
    timeline = run("chimera", 1, 1, devices=depth, microbatches=units * depth, pipelines=pipelines)
    assert timeline.makespan == 2 * units * depth + depth // (pipelines // 2) - 2
    if units == 1 or pipelines == 2:
        assert min(timeline.peak_activations) == depth - depth // pipelines + 1
    if pipelines == 2:
        assert max(timeline.peak_activations) == depth


@pytest.mark.parametrize(("depth", "units"), [(4, 1), (6, 1), (8, 1), (4, 2), (8, 2), (4, 4)])
def test_chimera_direct_with_double_backward(depth: int, units: int) -> None:
    timeline = run("chimera", devices=depth, microbatches=units * depth)
    assert timeline.makespan == units * (4 * depth - 2) + depth - 2


def test_chimera_uses_one_pipeline_for_one_micro_batch() -> None:
    schedule = generate("chimera", Shape(devices=4, microbatches=1))
    assert {t.replica for t in schedule.tasks()} == {0}
    assert simulate(schedule, CostTable.even(4)).makespan == 12


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("1f1", {"devices": 2, "microbatches": 2}, 'did you mean "1f1b"'),
        ("chimera", {"devices": 3, "microbatches": 4}, "even number"),
        ("chimera", {"devices": 8, "microbatches": 8, "pipelines": 6}, "use one of 2, 4, 8"),
        ("1f1b", {"devices": 2, "microbatches": 2, "chunks": 2}, "no use for chunks"),
        ("1f1b", {"devices": 4, "microbatches": 8, "memory_limit": 3}, "needs 4"),
        ("gpipe", {"devices": 0, "microbatches": 2}, "not a count"),
        ("gpipe", {"devices": 2, "microbatches": 2, "unit": 3}, "3 micro-batches a unit, 2 in all"),
        ("chimera", {"devices": 2, "microbatches": 2, "pipelines": 3}, "not 2f"),
        ("chimera", {"devices": 2, "microbatches": 2, "concat": "doubled"}, "doubling"),
    ],
)
def test_refused_shapes(name: str, shape: dict[str, object], says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        generate(name, Shape(**shape))  # type: ignore[arg-type]


def test_every_family_has_one_line_about_it() -> None:
    assert all(f.about and "\n" not in f.about for f in SCHEDULES.values())


@pytest.mark.parametrize(("depth", "count", "chunks"), [(4, 8, 2), (4, 8, 3), (2, 5, 2), (8, 9, 4), (3, 3, 5)])
def test_breadth_first(depth: int, count: int, chunks: int) -> None:
    timeline = run("bfs", 6 / chunks, 12 / chunks, devices=depth, microbatches=count, chunks=chunks)
    assert timeline.makespan == pytest.approx((count + (depth - 1) / chunks) * 18)
    assert timeline.peak_activations == (count * chunks,) * depth
    for order in timeline.schedule.orders:  # a stage's micro-batches are contiguous: one gather of its weights a pass
        passes = [(t.kind, t.stage) for t in order]
        assert sum(a != b for a, b in itertools.pairwise(passes)) == 2 * chunks - 1


@pytest.mark.parametrize("depth", [2, 4, 6, 10])
@pytest.mark.parametrize(("forward", "backward"), [(1, 1), (2, 3), (1, 2), (2, 7)])
def test_one_unit_of_chimera_with_a_longer_backward(depth: int, forward: float, backward: float) -> None:
    timeline = run("chimera", forward, backward, devices=depth, microbatches=depth)
    assert timeline.makespan == depth * forward + (2 * depth - 2) * backward


@pytest.mark.parametrize(("depth", "pipelines"), [(8, 4), (12, 6), (12, 4)])
def test_a_unit_of_more_pipelines_with_double_backward(depth: int, pipelines: int) -> None:
    double = run("chimera", 1, 2, devices=depth, microbatches=depth, pipelines=pipelines)
    assert double.makespan == depth + 2 * (depth + depth // (pipelines // 2) - 2)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("latency", [0.5, 2])
def test_latency_on_the_way_there_and_back(name: str, latency: float) -> None:
    """One micro-batch passes each boundary twice."""
    costs = CostTable.even(4, 1, 1, 1, comm=latency)
    timeline = simulate(generate(name, Shape(devices=4, microbatches=1), costs), costs)
    assert timeline.makespan == 12 + 6 * latency

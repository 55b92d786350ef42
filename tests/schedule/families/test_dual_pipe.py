"""DualPipe, DualPipeV and interleaved 1F1B with overlap: what their papers say of them, and what pairs hide."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from raypipe.errors import ScheduleError
from raypipe.schedule import Shape, generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.forms.text import from_torch_csv, to_torch_csv
from raypipe.schedule.ir import Schedule
from raypipe.schedule.verify import verify
from raypipe.simulate.engine import simulate
from raypipe.simulate.lower_bound import lower_bound
from raypipe.simulate.period import period


def made(name: str, depth: int, count: int, **options: int) -> Schedule:
    schedule = generate(name, Shape(devices=depth, microbatches=count, **options))
    verify(schedule)
    return schedule


def routed(stages: int, compute: float, travel: float, weight_grad: float | None = None) -> CostTable:
    """Costs in which F and B compute so long and wait so long for tokens, half of it for dispatch."""
    half = (travel / 2,) * stages
    whole = compute + travel
    table = CostTable.even(stages, whole, whole, compute if weight_grad is None else weight_grad)
    return replace(table, dispatch=half, combine=half)


@pytest.mark.parametrize(("f", "b", "w"), [(1, 1, 1), (2, 2, 1), (4, 5, 3)])
@pytest.mark.parametrize(("depth", "count"), [(2, 4), (4, 8), (4, 14), (8, 20)])
def test_the_published_bubble(depth: int, count: int, f: float, b: float, w: float) -> None:
    """(PP/2 - 1)(F&B + B - 3W) of DualPipe's table, where B is a whole backward; PP + 1 activations.

    It is exact where F = B of the input; else the drain may be shorter.
    """
    pair = f + b + w
    for name, halves, busy in (("dualpipe", depth // 2, count), ("dualpipev", depth, 2 * count)):
        schedule = made(name, depth, count)
        timeline = simulate(schedule, CostTable.even(schedule.stages, f, b, w))
        table = busy * (f + b + w) + (halves - 1) * (pair + b + w - 3 * w)
        assert timeline.makespan <= table
        assert f != b or timeline.makespan == table
        assert set(timeline.peak_activations) == {2 * halves + 1}
    assert [len({row[d] for row in made("dualpipe", depth, count).placement}) for d in range(depth)] == [2] * depth


@pytest.mark.parametrize(("depth", "count"), [(2, 4), (4, 8), (4, 16), (4, 17), (8, 32)])
def test_dualpipev_is_torchs_own_and_overlapped_interleaving_is_no_longer(depth: int, count: int) -> None:
    torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    of = torch_schedules.ScheduleDualPipeV._calculate_single_rank_operations
    rows = [of(SimpleNamespace(pp_group_size=depth, _n_microbatches=count), rank) for rank in range(depth)]
    theirs = from_torch_csv("\n".join(",".join(map(str, row)) for row in rows), "torch.csv")
    ours = made("dualpipev", depth, count)
    assert (theirs.orders, theirs.joined, theirs.placement) == (ours.orders, ours.joined, ours.placement)
    limit = simulate(theirs, CostTable.even(2 * depth, 6, 6, 6)).makespan
    if count % depth == 0:
        short = made("interleaved-overlap", depth, count, chunks=3)
        assert simulate(short, CostTable.even(3 * depth, 4, 4, 4)).makespan <= limit
    text = to_torch_csv(ours)
    assert from_torch_csv(text, "dualpipev.csv") == replace(ours, name="dualpipev")
    for line, row in zip(text.splitlines(), rows, strict=True):
        assert [torch_schedules._Action.from_str(cell) for cell in line.split(",")] == row


@pytest.mark.parametrize(("depth", "chunks", "count"), [(2, 1, 4), (4, 2, 8), (4, 3, 16), (8, 4, 16)])
def test_overlapped_interleaving_loses_nothing_by_its_pairs(depth: int, chunks: int, count: int) -> None:
    schedule = made("interleaved-overlap", depth, count, chunks=chunks)
    timeline = simulate(schedule, CostTable.even(schedule.stages))
    assert timeline.makespan == 3 * chunks * count + 2 * depth - 1
    limits = [2 * (depth - 1 - d) + (chunks - 1) * depth + 2 for d in range(depth)]
    assert all(peak <= limit for peak, limit in zip(timeline.peak_activations, limits, strict=True))


@pytest.mark.parametrize(
    ("name", "options"), [("dualpipe", {}), ("dualpipev", {}), ("interleaved-overlap", {"chunks": 2})]
)
def test_pairs_hide_four_fifths_of_the_all_to_all_and_gain_a_fifth(name: str, options: dict[str, int]) -> None:
    """All-to-all at 30 % of compute; Megatron reports 1.32 for its combined 1F1B, compute kernels included."""
    schedule = made(name, 4, 64, **options)
    without = simulate(schedule.unpaired(), CostTable.even(schedule.stages)).makespan
    costs = routed(schedule.stages, 1.0, 0.45)
    paired, apart = (simulate(s, costs).makespan for s in (schedule, schedule.unpaired()))
    assert 1 - (paired - without) / (apart - without) >= 0.8
    assert apart / paired >= 1.2
    assert simulate(schedule, replace(costs, overlap=0.0)).makespan >= apart
    assert lower_bound(schedule, costs) <= period(schedule, costs) <= paired * (1 + 1e-12)


def test_shapes_without_a_steady_state_are_refused() -> None:
    for name, depth, count, why in (
        ("dualpipev", 4, 7, "begins with 8"),
        ("dualpipe", 3, 8, "even number"),
        ("dualpipe", 4, 9, "share them evenly"),
    ):
        with pytest.raises(ScheduleError, match=why):
            made(name, depth, count)

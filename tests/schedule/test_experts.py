"""Stages of experts divided: all-to-all as tasks beside compute, and in one order on all members of a group."""

from dataclasses import replace

import pytest

from raypipe.errors import ScheduleError
from raypipe.schedule import Shape, generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.deps import link
from raypipe.schedule.forms.json_form import from_json, to_json
from raypipe.schedule.forms.text import from_text, to_text
from raypipe.schedule.ir import Schedule
from raypipe.schedule.kinds import EXCHANGES
from raypipe.schedule.lowering.programs import programs
from raypipe.schedule.passes import divide_experts, replicate, split_backward
from raypipe.schedule.sharding import collectives
from raypipe.schedule.verify import verify
from raypipe.simulate.engine import simulate
from raypipe.simulate.lower_bound import lower_bound
from raypipe.simulate.period import period

TRAVEL = 0.45
"""Of F and of B, beside compute of 1 and W of 1: all-to-all at 30 % of compute."""


def routed(stages: int) -> CostTable:
    half = (TRAVEL / 2,) * stages
    return replace(CostTable.even(stages, 1 + TRAVEL, 1 + TRAVEL), dispatch=half, combine=half)


def divided(name: str, count: int = 32, parts: int = 2, **options: int) -> tuple[Schedule, CostTable]:
    schedule = generate(name, Shape(devices=4, microbatches=count, **options))
    result = divide_experts(schedule, routed(schedule.stages), parts=parts)
    verify(result[0])
    return result


def test_one_micro_batch_by_hand() -> None:
    """The layers before, the experts, the layers after; W follows its B and hides the combine of gradients."""
    costs = replace(CostTable.even(1, 6, 6, 4), dispatch=(1.0,), combine=(2.0,))
    step, table = divide_experts(from_text("device 0: 0F0 0BW0", "one"), costs, share=0.5)
    assert " ".join(map(str, step.orders[0])) == ("0F0 1DF0 1F0 1CF0 2F0 2B0 1DB0 2W0 1B0 1CB0 1W0 0B0 0W0")
    timeline = simulate(step, table)
    spans = {str(s.task): (s.start, s.end) for s in timeline.spans[0]}
    assert [spans[t] for t in ("0F0", "1DF0", "1F0", "1CF0", "2F0")] == [
        (0, 0.75), (0.75, 1.75), (1.75, 3.25), (3.25, 5.25), (5.25, 6)
    ]  # fmt: skip
    assert spans["1DB0"] == (6.75, 8.75)
    assert spans["2W0"] == (6.75, 7.75)
    assert spans["1W0"][0] == spans["1CB0"][0] == 10.25
    assert timeline.busy == (10.0,)


@pytest.mark.parametrize(
    ("name", "options"), [("dualpipev", {}), ("dualpipe", {}), ("interleaved-overlap", {"chunks": 2})]
)
@pytest.mark.parametrize("parts", [1, 4])
def test_a_pair_takes_as_long_as_its_parts_in_turn(name: str, options: dict[str, int], parts: int) -> None:
    """The closed form of the cost table against the play of every all-to-all."""
    whole = generate(name, Shape(devices=4, microbatches=32, **options))
    step, table = divided(name, parts=parts, **options)
    assert simulate(step, table).makespan == pytest.approx(simulate(whole, routed(whole.stages)).makespan, rel=0.03)
    assert lower_bound(step, table) <= period(step, table) <= simulate(step, table).makespan * (1 + 1e-12)


def test_weight_gradients_hide_combines() -> None:
    whole = generate("1f1b", Shape(devices=4, microbatches=32))
    step, table = divided("1f1b")
    least, most = simulate(whole, CostTable.even(4)).makespan, simulate(whole, routed(4)).makespan
    assert simulate(step, table).makespan <= most - 0.45 * (most - least)


def test_forms_and_drawings_have_them() -> None:
    step, table = divided("dualpipev", 8)
    step = replace(replicate(step, 2), exchange=(2, 2))
    verify(step)
    assert from_text(to_text(step)) == step
    assert from_json(to_json(step, table)) == (step, table)
    from raypipe.observe.figures import gantt
    from raypipe.observe.terminal import draw
    from raypipe.observe.timelines import trace

    timeline = simulate(step, table)
    assert len(gantt([timeline]).axes) == 1
    assert len(draw(timeline)) == step.devices
    assert {e["cat"] for e in trace(timeline)["traceEvents"] if e["ph"] == "X"} > EXCHANGES


def test_members_of_a_group_meet_and_an_order_of_their_own_is_refused() -> None:
    one = divided("1f1b", 4, parts=1)[0]
    step = replace(replicate(one, 4), exchange=(4, 2))
    graph = link(step)
    sizes = {name: 0 for name in collectives(graph).values()}
    for name in collectives(graph).values():
        sizes[name] += 1
    assert set(sizes.values()) == {2}
    turned = {(0,): (1,), (1,): (0,)}  # the first copy runs its second micro-batch first
    own = step.with_orders([t._replace(mbs=turned.get(t.mbs, t.mbs)) for t in order] for order in step.orders)
    with pytest.raises(ScheduleError, match="all-to-all of the other members of its expert group"):
        verify(own)
    verify(replace(own, exchange=(4, 1)))


def test_a_tokens_way_is_complete() -> None:
    step = divided("1f1b", 4)[0]
    for kind in ("DF", "CB"):
        orders = [[t for t in order if (t.kind, t.mbs) != (kind, (1,))] for order in step.orders]
        with pytest.raises(ScheduleError, match=rf"{kind}1, which no device runs|no device runs \d+{kind}1"):
            verify(step.with_orders(orders))
    with pytest.raises(ScheduleError, match="not one of experts alone"):
        verify(replace(step, rules=replace(step.rules, experts=step.rules.experts[1:])))


def test_what_is_not_divided_or_run_is_refused_by_name() -> None:
    whole = generate("1f1b", Shape(devices=2, microbatches=4))
    for schedule, costs, why in (
        (generate("early-recompute", Shape(devices=2, microbatches=4)), routed(2), "cannot be divided"),
        (whole, CostTable.even(2), "no stage has dispatch or combine"),
        (replace(whole, versions="stash"), routed(2), "weight versions"),
    ):
        with pytest.raises(ScheduleError, match=why):
            divide_experts(schedule, costs)
    step = divide_experts(split_backward(whole), routed(2))[0]
    with pytest.raises(ScheduleError, match="planned, simulated and emulated, but not run"):
        programs(step)

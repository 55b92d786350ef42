from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.errors import ScheduleError
from raypipe.schedule.forms.text import from_text, parse_task, to_text
from raypipe.schedule.ir import Rules, Schedule, StageGraph, Task

small = st.integers(0, 40)
compute = st.builds(
    Task, st.sampled_from(["F", "B", "W", "BW", "R"]), small, st.lists(small, min_size=1, max_size=3).map(tuple), small
)
bookkeeping = st.builds(Task, st.sampled_from(["AR", "U"]), small, st.just(()), small)
tasks = st.one_of(compute, bookkeeping)


@st.composite
def schedules(draw):
    """Any value of the type, runnable or not: the text form must not lose anything."""
    stages, devices = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    edge = st.tuples(st.integers(0, stages - 1), st.integers(0, stages - 1)).filter(lambda e: e[0] < e[1])
    edges = draw(st.lists(edge, unique=True).map(tuple)) if stages > 1 else ()
    place = st.lists(st.integers(0, devices - 1), min_size=stages, max_size=stages).map(tuple)
    return Schedule(
        name=draw(st.text(max_size=12)),
        placement=tuple(draw(st.lists(place, min_size=1, max_size=3))),
        orders=tuple(tuple(draw(st.lists(tasks, max_size=6))) for _ in range(devices)),
        microbatches=draw(small),
        graph=draw(st.sampled_from([StageGraph.chain(stages), StageGraph(stages, edges)])),
        rules=draw(
            st.builds(
                Rules,
                recompute=st.sampled_from(["early", "late"]),
                w_dep=st.sampled_from(["B", "grad"]),
                skip_first_b=st.booleans(),
            )
        ),
        size=draw(st.sampled_from([Fraction(1), Fraction(1, 2), Fraction(2, 3)])),
        versions=draw(st.sampled_from(["flush", "stash", "2bw"])),
    )


@pytest.mark.slow
@given(schedules())
def test_reads_back_what_it_printed(schedule):
    assert from_text(to_text(schedule)) == schedule


@given(tasks)
def test_task_reads_back(task):
    assert parse_task(str(task)) == task


def test_hand_written_form_needs_only_the_orders():
    schedule = from_text("# two stages\n\ndevice 1: 1F0 1BW0   # last\ndevice 0: 0F0 0BW0\n", "mine.txt")
    assert schedule.name == "mine"
    assert schedule.placement == ((0, 1),)
    assert schedule.microbatches == 1
    assert [str(t) for t in schedule.orders[1]] == ["1F0", "1BW0"]


def test_infers_both_directions():
    schedule = from_text("device 0: 0F0 1F1@1\ndevice 1: 1F0 0F1@1\n")
    assert schedule.placement == ((0, 1), (1, 0))


@pytest.mark.parametrize(
    ("text", "place", "why"),
    [
        ("device 0: 0F0 0G0", "s.txt:1:15", 'unknown kind "G"'),
        ("device 0: 0F0 F0", "s.txt:1:15", "not a task"),
        ("device 0: 0F", "s.txt:1:11", "lacks its micro-batch"),
        ("device 0: 0U3", "s.txt:1:11", "carries no micro-batch"),
        ("device zero: 0F0", "s.txt:1", "needs a number"),
        ("device 0 0F0", "s.txt:1", "colon"),
        ("device 0: 0F0\ndevice 0: 0BW0", "s.txt:2", "given twice"),
        ("microbatch 3", "s.txt:1", 'did you mean "microbatches"'),
        ("microbatches x", "s.txt:1", '"x" is not'),
        ("microbatches 1\nmicrobatches 2", "s.txt:2", "given twice"),
        ("placement 0 1\nplacement 0", "s.txt:2", "1 stages here"),
        ("edges 1>0", "s.txt:1", "not an edge"),
        ("size half", "s.txt:1", "not a share"),
        ("size 0", "s.txt:1", "not a share"),
        ("size -1", "s.txt:1", "not a share"),
        ("size 1e400", "s.txt:1", "not a share"),
        ("versions stsh", "s.txt:1", 'did you mean "stash"'),
        ("", "s.txt:0", "no device has tasks"),
        ("device 0: 0F0\ndevice 1: 0BW0", "s.txt", "device 0 and on device 1"),
        ("device 0: 1F0", "s.txt", "stage 0 of replica 0 has no task"),
        ("device 1234567: 0F0", "s.txt:1", "needs a number"),
    ],
)
def test_errors_say_where_and_why(text, place, why):
    with pytest.raises(ScheduleError) as caught:
        from_text(text, "s.txt")
    assert caught.value.where == place
    assert why in str(caught.value)
    assert "fix: " in str(caught.value)

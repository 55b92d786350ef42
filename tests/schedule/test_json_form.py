import json
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.errors import ScheduleError
from raypipe.schedule.costs import CostTable
from raypipe.schedule.forms.json_form import from_json, load, to_json
from raypipe.schedule.forms.text import from_text, parse_task
from raypipe.schedule.ir import Rules, Schedule, StageGraph

TWO = from_text("device 0: 0F0 0F1 0BW0 0BW1\ndevice 1: 1F0 1BW0 1F1 1BW1\n", "two")
times = st.floats(0, 1e6, allow_nan=False)


@st.composite
def schedules_and_costs(draw):
    stages, devices = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    kinds = st.sampled_from(["F", "B", "W", "BW", "R"])
    words = st.builds(
        lambda k, s, m, r: parse_task(f"{s}{k}{','.join(map(str, m))}@{r}"),
        kinds, st.integers(0, stages - 1), st.lists(st.integers(0, 9), min_size=1, max_size=2), st.integers(0, 1),
    )  # fmt: skip
    place = st.lists(st.integers(0, devices - 1), min_size=stages, max_size=stages).map(tuple)
    edges = tuple((i, j) for i in range(stages) for j in range(i + 1, stages))
    row = st.one_of(times.map(lambda t: (t,) * stages), st.tuples(*[times] * stages))
    schedule = Schedule(
        name=draw(st.text(max_size=5)),
        placement=tuple(draw(st.lists(place, min_size=1, max_size=2))),
        orders=tuple(tuple(draw(st.lists(words, max_size=5))) for _ in range(devices)),
        microbatches=draw(st.integers(0, 9)),
        graph=draw(st.sampled_from([StageGraph.chain(stages), StageGraph(stages, edges)])),
        rules=Rules(
            recompute=draw(st.sampled_from(["early", "late"])),
            w_dep=draw(st.sampled_from(["B", "grad"])),
            skip_first_b=draw(st.booleans()),
        ),
        size=draw(st.sampled_from([Fraction(1), Fraction(1, 2)])),
        versions=draw(st.sampled_from(["flush", "stash", "2bw"])),
    )
    keys = ("forward", "input_grad", "weight_grad", "recompute", "all_reduce", "update")
    return schedule, CostTable(**{k: draw(row) for k in keys}, comm=draw(st.one_of(times, row)))


@pytest.mark.slow
@given(schedules_and_costs())
def test_reads_back_schedule_and_costs(both):
    assert from_json(json.loads(json.dumps(to_json(*both)))) == both


def test_contract_keys_and_numbers():
    found = to_json(TWO, CostTable.even(2))
    assert list(found) == ["name", "placement", "orders", "durations", "comm", "microbatches"]
    assert found["durations"] == {"F": 1, "B": 1, "W": 1, "BW": 2, "R": 0}
    assert found["orders"][0][2] == {"kind": "BW", "stage": 0, "mb": 0, "replica": 0}


def test_dur_where_a_task_differs_from_its_kind():
    pair = from_text("device 0: 0F0,1 0BW0 0BW1", "pair")
    costs = CostTable.even(1, forward=3)
    assert [e.get("dur") for e in to_json(pair, costs)["orders"][0]] == [6, None, None]
    halves = from_text("size 1/2\ndevice 0: 0F0,1 0BW0 0BW1", "halves")
    assert [e.get("dur") for e in to_json(halves, costs)["orders"][0]] == [None, 1, 1]
    first = from_text("skip_first_B\ndevice 0: 0F0 0BW0\ndevice 1: 1F0 1BW0", "skip")
    entries = to_json(first, CostTable.even(2))["orders"]
    assert [e[1].get("dur") for e in entries] == [1, None]


def test_per_stage_times_are_lists():
    costs = CostTable.even(2)
    uneven = CostTable(**{**{k: getattr(costs, k) for k in costs.__slots__}, "forward": (1.0, 2.5)})
    assert to_json(TWO, uneven)["durations"]["F"] == [1, 2.5]


def test_hand_written_with_the_least():
    schedule, costs = from_json(
        {"orders": [["0F0", {"kind": "BW", "stage": 0, "mb": 0}]], "durations": {"F": 2, "BW": 3}}
    )
    assert [str(t) for t in schedule.orders[0]] == ["0F0", "0BW0"]
    assert (costs.by_kind("F"), costs.by_kind("BW")) == ((2.0,), (3.0,))


def task(**changes):
    return {"kind": "F", "stage": 0, "mb": 0, **changes}


@pytest.mark.parametrize(
    ("data", "place", "why"),
    [
        ([], "s", "expected an object"),
        ({}, "s", '"orders" is missing'),
        ({"ordes": []}, "s", 'did you mean "orders"'),
        ({"orders": 3}, "s: orders", "expected a list"),
        ({"orders": [[task(kind="G")]]}, "s: orders[0][0].kind", "unknown value 'G'"),
        ({"orders": [[task(mb="x")]]}, "s: orders[0][0].mb", "not a whole number"),
        ({"orders": [[task(stage=-1)]]}, "s: orders[0][0].stage", "not a whole number"),
        ({"orders": [[task(), "0Q1"]]}, "s: orders[0][1]", "unknown kind"),
        ({"orders": [[task(stag=1)]]}, "s: orders[0][0]", 'did you mean "stage"'),
        ({"orders": [[task(mb=[])]]}, "s: orders[0][0]", "needs a micro-batch"),
        ({"orders": [[task(dur=9)]]}, "s: orders[0][0].dur", "its costs give 1"),
        ({"orders": [[task(stage=1)]], "placement": [[0]]}, "s: orders[0][0]", "stage 1 of 1"),
        ({"orders": [[task()]], "placement": [[0], []]}, "s: placement", "no stages"),
        ({"orders": [[task()]], "durations": {"F": [1, 2]}}, "s: durations.F", "2 values for 1 stages"),
        ({"orders": [[task()]], "durations": {"F": -1}}, "s: durations.F", "not a number"),
        ({"orders": [[task()]], "durations": {"B": 1, "W": 1, "BW": 3}}, "s: durations.BW", "B + W is 2"),
        ({"orders": [[task()]], "edges": [[0, 1]]}, "s: edges[0]", "not an edge"),
        ({"orders": [[task()]], "recompute": "erly"}, "s: recompute", 'did you mean "early"'),
        ({"orders": [[task()]], "size": "0"}, "s: size", "not a share"),
        ({"orders": [[task()]], "size": "1e400"}, "s: size", "not a share"),
        ({"orders": [[task()]], "comm": True}, "s: comm", "not a number"),
        ({"orders": [[task()]], "comm": [1, 2]}, "s: comm", "2 values for 1 stages"),
        ({"orders": [["0F0"], ["1F0"]], "comm": [-1]}, "s: comm[0]", "not a number"),
    ],
)
def test_errors_name_the_field(data, place, why):
    with pytest.raises(ScheduleError) as caught:
        from_json(data, "s")
    assert caught.value.where == place
    assert why in str(caught.value)


def test_load_takes_both_forms(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(to_json(TWO, CostTable.even(2))))
    (tmp_path / "two.txt").write_text("device 0: 0F0 0F1 0BW0 0BW1\ndevice 1: 1F0 1BW0 1F1 1BW1\n")
    assert load(tmp_path / "a.json") == (TWO, CostTable.even(2))
    assert load(tmp_path / "two.txt") == (TWO, None)


@pytest.mark.parametrize(("content", "place"), [(b'{"orders": [[}', ":1:14"), (b"\xff\xfe", ""), (b"[" * 100_000, "")])
def test_load_refuses_damaged_files(tmp_path, content, place):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(ScheduleError) as caught:
        load(path)
    assert caught.value.where == f"{path}{place}"


def test_load_says_that_a_file_is_missing(tmp_path):
    with pytest.raises(ScheduleError, match="No such file"):
        load(tmp_path / "none.json")

"""Schedules as text, as JSON and as torch's CSV."""

import csv
import io
import json
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.errors import ScheduleError
from raypipe.schedule import SCHEDULES, Shape, generate, stages_of
from raypipe.schedule.costs import CostTable
from raypipe.schedule.forms.json_form import from_json, load, to_json
from raypipe.schedule.forms.text import from_text, from_torch_csv, parse_task, to_text, to_torch_csv
from raypipe.schedule.ir import Rules, Schedule, StageGraph, Task
from raypipe.schedule.passes import (
    add_recompute,
    add_updates,
    place_gradient_sync,
    replicate,
    shard,
    split_backward,
    without_frozen,
)
from raypipe.schedule.verify import verify
from raypipe.simulate.engine import simulate

small = st.integers(0, 40)


def compute(stages, replicas):
    mbs = st.lists(small, min_size=1, max_size=3).map(tuple)
    return st.builds(Task, st.sampled_from(["F", "B", "W", "BW", "R"]), stages, mbs, replicas)


bookkeeping = st.builds(Task, st.sampled_from(["AR", "U"]), small, st.just(()), small)
tasks = st.one_of(compute(small, small), bookkeeping)


@st.composite
def schedules(draw, inside=False):
    """Any value of the type, runnable or not: no form may lose anything. ``inside``: tasks of its own stages alone."""
    stages, devices = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    edge = st.tuples(st.integers(0, stages - 1), st.integers(0, stages - 1)).filter(lambda e: e[0] < e[1])
    edges = draw(st.lists(edge, unique=True).map(tuple)) if stages > 1 else ()
    place = st.lists(st.integers(0, devices - 1), min_size=stages, max_size=stages).map(tuple)
    task = compute(st.integers(0, stages - 1), st.integers(0, 1)) if inside else tasks
    return Schedule(
        name=draw(st.text(max_size=12)),
        placement=tuple(draw(st.lists(place, min_size=1, max_size=3))),
        orders=tuple(tuple(draw(st.lists(task, max_size=6))) for _ in range(devices)),
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


# Every named schedule survives the text and the JSON form.

CASES = [(name, {}) for name in SCHEDULES if name != "auto"] + [
    ("chimera", {"concat": "doubling"}), ("chimera", {"concat": "halving"}), ("interleaved-1f1b", {"chunks": 2}),
    ("zeropp", {"chunks": 2, "unit": 3}), ("modulo", {"chunks": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options"), CASES)
def test_reads_back(name, options):
    shape = Shape(devices=4, microbatches=8, **options)
    costs = CostTable.even(stages_of(name, shape), 1.0, 1.5, 0.5, recompute=1.0, comm=0.25)
    schedule = generate(name, shape, costs)
    assert from_text(to_text(schedule)) == schedule
    timeline = simulate(schedule, costs)
    result = json.loads(json.dumps(to_json(schedule, costs, timeline.spans)))
    again, same_costs = from_json(result)
    assert (again, same_costs) == (schedule, costs)
    verify(again)
    assert simulate(again, same_costs).spans == timeline.spans
    for order in result["orders"]:  # what a reader computes from the file alone is what was simulated
        for entry in order:
            stated = entry.get("dur", result["durations"][entry["kind"]])
            length = stated[entry["stage"]] if isinstance(stated, list) else stated
            assert entry["end"] - entry["start"] == pytest.approx(length)


SPLIT = from_text(
    "device 0: 0F0 0F1 0B0 0W0 0BW1 0AR 0U\ndevice 1: 1F0 1B0 1F1 1BW1 1W0 1AR 1U\n", "split"
)  # B and W apart, a joint BW, and the bookkeeping that torch does itself


def torch_loads(text, path, devices, stages, microbatches):
    """Give ``text`` to torch's own loader, which checks the orders and plans the messages (or says it cannot)."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    path.write_text(text)
    stage = SimpleNamespace(
        group_size=devices, group_rank=0, num_stages=stages, stage_index=0, is_last=stages == 1, has_backward=False,
        stage_index_to_group_rank={}, group=None, device="cpu", submod=None,
    )  # fmt: skip
    runtime = schedules._PipelineScheduleRuntime([stage], microbatches)
    runtime._load_csv(str(path))
    return runtime


def test_letters():
    assert to_torch_csv(SPLIT) == "0F0,0F1,0I0,0W0,0B1\n1F0,1I0,1F1,1B1,1W0\n"


def test_torch_loads_it(tmp_path):
    runtime = torch_loads(to_torch_csv(SPLIT), tmp_path / "s.csv", 2, 2, 2)
    rows = list(csv.reader(io.StringIO(to_torch_csv(SPLIT))))
    assert {d: [str(a) for a in actions] for d, actions in runtime.pipeline_order.items()} == dict(enumerate(rows))
    sends = [str(a) for a in runtime.pipeline_order_with_comms[0] if "SEND" in str(a)]
    assert sends == ["0SEND_F0", "0SEND_F1"]
    assert runtime.stage_index_to_group_rank == {0: 0, 1: 1}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("device 0: 0F0 1F1@1\ndevice 1: 1F0 0F1@1", "2 replicas put stage 0 on devices 0 and 1"),
        ("device 0: 0F0 0R0 0BW0", "0R0 on device 0 is a recompute task"),
        ("device 0: 0F0,1 0BW0 0BW1", "carries 2 micro-batches"),
        ("w_dep grad\ndevice 0: 0F0 0W0 0B0", "0W0 on device 0 runs with no B"),
        ("skip_first_B\ndevice 0: 0F0 0W0", "runs with no B"),
        ("edges 0>1 0>2 1>2\ndevice 0: 0F0\ndevice 1: 1F0\ndevice 2: 2F0", "not a chain"),
        ("versions stash\ndevice 0: 0F0 0BW0", "weight versions"),
        ("device 0: 0F0 0BW0 0U 0F1 0BW1", "before the end of the step"),
        ("placement 0\ndevice 0: 0F0 0BW0\ndevice 1:", "device 1 has no task"),
    ],
)
def test_refuses_what_torch_cannot_express(text, why):
    with pytest.raises(ScheduleError, match="torch CSV") as caught:
        to_torch_csv(from_text(text, "s"))
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options"),
    [("gpipe", {}), ("1f1b", {}), ("interleaved-1f1b", {"chunks": 2}), ("bfs", {"chunks": 2}), ("zb-h1", {}),
     ("zb-h2", {}), ("zb-v", {}), ("zeropp", {"chunks": 2, "unit": 4})],
)  # fmt: skip
def test_torch_loads_every_schedule_it_can_express(name, options, tmp_path):
    schedule = generate(name, Shape(devices=4, microbatches=8, **options))
    runtime = torch_loads(to_torch_csv(schedule), tmp_path / "s.csv", 4, schedule.stages, 8)
    assert runtime.stage_index_to_group_rank == dict(enumerate(schedule.placement[0]))
    assert [len(actions) for actions in runtime.pipeline_order.values()] == [len(order) for order in schedule.orders]


@pytest.mark.parametrize(
    "name", ["chimera", "gems", "pipedream", "pipedream-2bw", "early-recompute", "fast-forward", "modulo"]
)
def test_says_so_for_every_schedule_it_cannot(name):
    shape = Shape(devices=2, microbatches=1 if name in ("fast-forward", "modulo") else 4)
    with pytest.raises(ScheduleError, match="torch"):
        to_torch_csv(generate(name, shape))


TWO = from_text("device 0: 0F0 0F1 0BW0 0BW1\ndevice 1: 1F0 1BW0 1F1 1BW1\n", "two")
times = st.floats(0, 1e6, allow_nan=False)


@st.composite
def schedules_and_costs(draw):
    schedule = draw(schedules(inside=True))
    row = st.one_of(times.map(lambda t: (t,) * schedule.stages), st.tuples(*[times] * schedule.stages))
    keys = ("forward", "input_grad", "weight_grad", "recompute", "all_reduce", "update")
    return schedule, CostTable(**{k: draw(row) for k in keys}, comm=draw(st.one_of(times, row)))


@pytest.mark.slow
@given(schedules_and_costs())
def test_reads_back_schedule_and_costs(both):
    assert from_json(json.loads(json.dumps(to_json(*both)))) == both


def test_contract_keys_and_numbers():
    result = to_json(TWO, CostTable.even(2))
    assert list(result) == ["name", "placement", "orders", "durations", "comm", "microbatches"]
    assert result["durations"] == {"F": 1, "B": 1, "W": 1, "BW": 2, "R": 0}
    assert result["orders"][0][2] == {"kind": "BW", "stage": 0, "mb": 0, "replica": 0}


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


def test_pairs_survive_every_form_and_the_passes():
    schedule = generate("dualpipev", Shape(devices=2, microbatches=6))
    costs = replace(CostTable.even(4, 2, 2, 1), dispatch=(0.5, 0.25, 0, 0), combine=(0.5, 0, 0, 0), overlap=0.5)
    assert "3F2|0BW0" in to_text(schedule)
    assert from_text(to_text(schedule)) == schedule
    timeline = simulate(schedule, costs)
    data = json.loads(json.dumps(to_json(schedule, costs, timeline.spans)))
    assert from_json(data) == (schedule, costs)
    halves = {parse_task(f"{e['stage']}{e['kind']}{e['mb']}"): e for order in data["orders"] for e in order}
    for task, other in schedule.pairs.items():
        assert [halves[task][key] for key in ("start", "end", "dur")] == [
            halves[other][key] for key in ("start", "end", "dur")
        ]
        assert halves[task].get("joined", False) == (task in schedule.joined)
    for other in (
        replicate(schedule, 2), split_backward(schedule), add_recompute(schedule), shard(schedule, 3),
        add_updates(place_gradient_sync(replicate(schedule, 2), "eager")), without_frozen(schedule, [3]),
    ):  # fmt: skip
        verify(other)
        copies = len(other.placement)
        assert len(other.joined) == copies * len(schedule.joined)
        assert from_text(to_text(other)) == other
    with pytest.raises(ScheduleError, match="torch pairs F with joint backwards"):
        to_torch_csv(split_backward(schedule))


@pytest.mark.parametrize("text", ["0F0,1X0", "0F0,(0F1;0B0)OVERLAP", "0F0,(0F1)OVERLAP_F_B", "0F0,1SEND_F0"])
def test_a_csv_of_something_else_is_refused(text):
    with pytest.raises(ScheduleError, match="is not a compute action"):
        from_torch_csv(text)

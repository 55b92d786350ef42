"""Whatever is asked for: a schedule, or one clear message. Never a traceback."""

import contextlib
import io
import json

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from raypipe.cli import run
from raypipe.errors import ScheduleError
from raypipe.schedule import SCHEDULES
from raypipe.schedule.forms.json_form import from_json
from raypipe.schedule.forms.text import from_text
from raypipe.schedule.verify import verify

counts = st.one_of(st.sampled_from([2, 4, 8]), st.integers(-1, 9)).map(str)
costs = st.one_of(
    st.sampled_from(["0", "0.5", "1", "2", "2.5", "10"]),
    st.sampled_from(["-1", "nan", "inf", "1e400", "x", "", "1,2", "1,,2"]),
    st.lists(st.sampled_from(["0", "1", "3"]), min_size=1, max_size=6).map(",".join),
)
OPTIONS = {
    "--devices": counts, "--microbatches": counts, "--chunks": counts, "--unit": counts, "--pipelines": counts,
    "--concat": st.sampled_from(["direct", "doubling", "halving", "other"]), "--memory-limit": costs,
    "--forward": costs, "--input-grad": costs, "--weight-grad": costs, "--recompute": costs, "--comm": costs,
}  # fmt: skip
COMMON = ["--devices", "--microbatches", "--forward", "--input-grad", "--weight-grad", "--recompute", "--comm"]


@st.composite
def requests(draw):
    """A name and options: mostly those the family reads, now and then a stray one."""
    name = draw(st.sampled_from([n for n in SCHEDULES if n != "auto"]))
    own = ["--" + option.replace("_", "-") for option in SCHEDULES[name].options]
    chosen = draw(st.lists(st.sampled_from(COMMON + 3 * own), max_size=4))
    chosen += draw(st.lists(st.sampled_from(sorted(OPTIONS)), max_size=1)) if draw(st.integers(0, 3)) == 0 else []
    return name, {key: draw(OPTIONS[key]) for key in dict.fromkeys(chosen) if key in OPTIONS}


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(requests())
def test_a_schedule_or_one_message(request):
    name, options = request
    out, err = io.StringIO(), io.StringIO()
    argv = ["schedule", name, "--json", *(word for pair in options.items() for word in pair)]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = run(argv)
    event(f"status {status}")
    if status == 0:
        found = json.loads(out.getvalue())
        schedule, table = from_json(found)
        verify(schedule)
        assert from_json(json.loads(json.dumps(found))) == (schedule, table)
        assert 0 <= found["bubble_ratio"] <= 1
        assert found["lower_bound"] <= found["makespan"] + 1e-9
    else:
        assert (status, out.getvalue()) == (2, "")
        assert "\n  fix: " in err.getvalue()


WORDS = """schedule microbatches placement edges size versions recompute w_dep skip_first_B device 0: 1: device:
 0F0 1F0@1 0BW0 0F0,1 0>1 1/2 1/0 stash late grad 0 1 99999999 -1 ² " # : @ , F 0F 0FF0 0AR"""
words = st.sampled_from(WORDS.split())
lines = st.lists(st.lists(words, max_size=5).map(" ".join), max_size=5).map("\n".join)


@pytest.mark.slow
@given(st.one_of(lines, st.text()))
def test_any_text_is_read_or_refused(text):
    with contextlib.suppress(ScheduleError):
        verify(from_text(text, "f"))


keys = ["orders", "placement", "durations", "kind", "stage", "mb", "F", "BW", "size", "edges", "comm", "replica", "dur"]
leaves = st.one_of(st.none(), st.booleans(), st.integers(-2, 3), st.floats(), st.sampled_from(["F", "0F0", "1/2", ""]))
values = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(keys), inner, max_size=4)),
)
task_like = st.fixed_dictionaries({"kind": st.sampled_from(["F", "BW", "U"]), "stage": leaves, "mb": values})
documents = st.fixed_dictionaries(
    {"orders": st.one_of(values, st.lists(st.lists(st.one_of(leaves, task_like), max_size=3), max_size=3))},
    optional={key: values for key in ("placement", "durations", "size", "edges", "comm")}
    | {"comm": st.one_of(values, st.lists(st.integers(-1, 3), max_size=3))},
)


@given(st.one_of(values, documents))
def test_any_document_is_read_or_refused(value):
    with contextlib.suppress(ScheduleError):
        verify(from_json(value)[0])

import json

import pytest

from raypipe.errors import RequestError
from raypipe.observe.timelines import trace, write_trace
from raypipe.schedule.deps import link
from raypipe.simulate.timeline import live_activations


def of(events, phase):
    return [e for e in events if e["ph"] == phase]


def test_lanes_slices_and_arguments(timeline):
    events = trace(timeline("chimera", comm=0.5))["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in of(events, "M") if e["name"] == "thread_name"}
    assert names == {d: f"device {d}" for d in range(4)}
    slices = of(events, "X")
    assert len(slices) == 4 * 2 * 4
    one = next(e for e in slices if e["name"] == "1F2@1")
    assert one["args"] == {"kind": "F", "stage": 1, "mb": [2], "replica": 1}
    assert (one["tid"], one["ts"], one["dur"]) == (2, 1.5e6, 1e6)


def test_one_arrow_per_message_from_inside_the_sender_to_the_receiver(timeline):
    spans = timeline("1f1b", comm=0.5)
    events = trace(spans)["traceEvents"]
    graph = link(spans.schedule)
    across = sum(graph.device[p] != graph.device[i] for i, preds in enumerate(graph.preds) for p in preds)
    starts, ends = of(events, "s"), of(events, "f")
    assert len(starts) == len(ends) == across == 24
    slices = of(events, "X")
    for begin, end in zip(starts, ends, strict=True):
        assert begin["id"] == end["id"]
        source, target = begin["name"].split(" to ")
        sender = next(e for e in slices if e["name"] == source)
        receiver = next(e for e in slices if e["name"] == target)
        assert sender["tid"] == begin["tid"]
        assert sender["ts"] < begin["ts"] <= sender["ts"] + sender["dur"]
        assert (receiver["tid"], receiver["ts"]) == (end["tid"], end["ts"])
        assert end["ts"] >= begin["ts"]


def test_all_reduces_have_their_own_lane(written):
    text = "device 0: 0F0 0BW0 0AR 1F1@1 1BW1@1\ndevice 1: 1F0 1BW0 0F1@1 0BW1@1 0AR@1\n"
    events = trace(written(text))["traceEvents"]
    lanes = {e["args"]["name"]: e["tid"] for e in of(events, "M") if e["name"] == "thread_name"}
    assert {e["tid"] for e in of(events, "X") if e["cat"] == "AR"} == {
        lanes["device 0 network"],
        lanes["device 1 network"],
    }


def test_counters_peak_where_the_schedule_does(timeline, written):
    spans = timeline("1f1b", microbatches=8)
    counters = of(trace(spans)["traceEvents"], "C")
    for d, peak in enumerate(spans.peak_activations):
        assert max(e["args"]["alive"] for e in counters if e["name"] == f"activations of device {d}") == peak
    again = live_activations(written("device 0: 0F0 0F1 0R0 0BW0 0R1 0BW1\n", recompute=1.0))
    assert again == (((0.0, 0.0), (2.0, 1.0), (5.0, 1.0), (8.0, 0.0)),)  # alive from R, not from F


def test_writes_one_json_document(timeline, tmp_path):
    write_trace(timeline("gpipe"), tmp_path / "t.json")
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    with pytest.raises(RequestError, match="No such file"):
        write_trace(timeline("gpipe"), tmp_path / "none" / "t.json")

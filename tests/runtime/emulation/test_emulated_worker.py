"""Emulated devices: real actors and messages. Waits are never short, so no step beats its prediction.

How close the two are is a matter of the machine's load and is measured by ``raypipe emulate``, not tested here.
"""

from __future__ import annotations

import ctypes
import json
import math
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from raypipe.errors import ScheduleError, SpecError
from raypipe.plan.online.calibrate import message_delays
from raypipe.runtime.emulation import emulated_worker as emulation
from raypipe.runtime.emulation.emulated_run import (
    PROCESS_BYTES,
    SHARED_BYTES,
    Links,
    check_processes,
    collective_groups,
    emulate,
    exchanging_devices,
    rehearsal,
)  # fmt: skip
from raypipe.runtime.emulation.emulated_worker import AllReduceLane, EmulatedRunner, EmulatedSetup, wait_until
from raypipe.runtime.process.shared_clock import SharedClock
from raypipe.runtime.setup.communicators import Topology
from raypipe.schedule import Shape, generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.forms.text import from_text
from raypipe.schedule.kinds import EXCHANGES, NETWORK
from raypipe.schedule.lowering.asynchronous import WHOLE
from raypipe.schedule.lowering.programs import programs
from raypipe.schedule.passes import divide_experts, shard, split_backward
from raypipe.schedule.sharding import sum_groups
from tests.exhaustive import exhaustive

MS = 1e-3
EXACT = 1 - 1e-6
"""Clocks are read a few microseconds apart."""


SUMS = Links(bytes_per_s=1e9, message_bytes=1e6, gradient_bytes=2e6)
"""Messages of 1 ms, sums over two holders of 2 ms."""


@pytest.mark.runs
def test_stages_that_make_no_chain_are_emulated(local_ray) -> None:
    """Two branches that one stage joins: no kernel runs, so a task waits for its messages and nothing else."""
    joined = from_text(
        "microbatches 2\nplacement 0 1 2\nedges 0>2 1>2\n"
        "device 0: 0F0 0F1 0BW0 0BW1\ndevice 1: 1F0 1F1 1BW0 1BW1\ndevice 2: 2F0 2BW0 2F1 2BW1\n"
    )
    result = emulate(joined, CostTable.even(3, 2 * MS, 2 * MS, 2 * MS), Links(), 2, 1)
    assert result.predicted_steps_s[0] == pytest.approx(18 * MS)  # F, two turns of device 2, BW
    for k in (1, 2):
        assert sum(result.measured_s[:k]) >= sum(result.predicted_steps_s[:k]) * EXACT


@pytest.mark.runs
@pytest.mark.parametrize(
    ("name", "shape", "links", "steps", "replicas", "period_ms"),
    [
        ("1f1b", {"devices": 2, "microbatches": 4}, Links(), 3, 1, (4 + 1) * 6),  # (N + D - 1)(F + BW)
        ("gpipe", {"devices": 2, "microbatches": 2}, SUMS, 3, 2, None),
        # a device has two sums to wait for, which follow one another
        ("chimera", {"devices": 2, "microbatches": 2}, SUMS, 2, 1, None),
        ("pipedream", {"devices": 2, "microbatches": 4}, Links(), 3, 1, 4 * 6),
        # messages take longer than tasks: the link holds everything up, 4 x 5 ms in each direction and F + BW
        ("gpipe", {"devices": 2, "microbatches": 4}, Links(bytes_per_s=1e9, message_bytes=5e6), 2, 1, 2 * 20 + 12),
        *exhaustive(("zb-h1", {"devices": 2, "microbatches": 4}, Links(latency_s=1 * MS), 3, 1, None)),
    ],
)
def test_no_step_is_faster_than_predicted(local_ray, name, shape, links, steps, replicas, period_ms) -> None:
    base = generate(name, Shape(**shape))
    costs = CostTable.even(base.stages, 2 * MS, 2 * MS, 2 * MS)
    result = emulate(base, costs, links, steps, replicas)
    assert len(result.measured_s) == len(result.predicted_steps_s) == steps
    for k in range(1, steps + 1):
        assert sum(result.measured_s[:k]) >= sum(result.predicted_steps_s[:k]) * EXACT
    for spans in result.timeline.spans:
        for task, start, end in spans:
            if task.kind in ("F", "B", "W"):
                assert end - start >= 2 * MS * EXACT
    if period_ms is not None:
        assert result.predicted_s == pytest.approx(period_ms * MS)


@pytest.mark.runs
def test_slices_take_longer_along_the_sequence(local_ray) -> None:
    """Of k slices, slice i has (2i + 1) / k^2 of a micro-batch's attention and 1 / k of everything else."""
    k, attends = 2, 4 * MS
    costs = replace(CostTable.even(2, 6 * MS, 6 * MS, 2 * MS), attention=(attends,) * 2, attention_grad=(attends,) * 2)
    result = emulate(generate("1f1b", Shape(devices=2, microbatches=2, slices=k)), costs, Links(), 2, 1)
    assert sum(result.measured_s) >= sum(result.predicted_steps_s) * EXACT
    whole = {"F": 6 * MS, "BW": 8 * MS}
    seen = set()
    for spans in result.timeline.spans:
        for task, start, end in spans:
            if task.kind not in whole:
                continue
            i = task.mbs[0] % k
            least = (whole[task.kind] - attends) / k + attends * (2 * i + 1) / k**2
            assert end - start >= least * EXACT
            seen.add((task.kind, i))
    assert seen == {(kind, i) for kind in whole for i in range(k)}
    # F of 2 and 4 ms, BW of 3 and 5: to the last device and back 15, its next two and the device's own F 24, there and
    # back again 38, and the BW of the first slice last.
    assert result.predicted_s == pytest.approx(41 * MS)


def test_every_collective_of_a_sharded_schedule_has_its_group() -> None:
    """Four copies in groups of two: gathers inside a group, all-reduces between holders of the same shard."""
    order = shard(generate("1f1b", Shape(devices=2, microbatches=2)), 3, gather="microbatch", group=2)
    schedule = rehearsal(order, CostTable.even(2, MS, MS, MS), SUMS, 4).schedule
    groups = sum_groups(schedule.placement, schedule.sharding)
    result = collective_groups(schedule, groups)
    for device, (order, names) in enumerate(zip(schedule.orders, result, strict=True)):
        for task, name in zip(order, names, strict=True):
            if task.kind not in NETWORK:
                assert name == ""
                continue
            copy = task.replica
            partners = {copy, copy ^ 1} if task.kind in ("AG", "RS") else {copy, copy ^ 2}
            assert device in groups[name]
            assert set(groups[name]) == {schedule.placement[c][task.stage] for c in partners}


@pytest.mark.runs
def test_no_sharded_step_is_faster_than_predicted(local_ray) -> None:
    order = shard(generate("1f1b", Shape(devices=2, microbatches=2)), 3, gather="microbatch")
    result = emulate(order, CostTable.even(2, 2 * MS, 2 * MS, 2 * MS), SUMS, 3, 2)
    for k in (1, 2, 3):
        assert sum(result.measured_s[:k]) >= sum(result.predicted_steps_s[:k]) * EXACT
    for spans in result.timeline.spans:
        for task, start, end in spans:
            if task.kind in ("AG", "RS"):
                assert end - start >= 1 * MS * EXACT  # half an all-reduce


@pytest.mark.runs
def test_no_step_whose_tokens_travel_is_faster_than_predicted(local_ray) -> None:
    """Two copies divide experts; in each step one of them gets 1.5 times the mean of the tokens, the other half."""
    base = generate("zb-h1", Shape(devices=2, microbatches=3))
    costs = replace(CostTable.even(2, 8 * MS, 8 * MS, 4 * MS), dispatch=(2 * MS,) * 2, combine=(2 * MS,) * 2)
    order, table = divide_experts(base, costs)
    result = emulate(order, table, Links(), 3, 2, skew=1.5)
    for k in (1, 2, 3):
        assert sum(result.measured_s[:k]) >= sum(result.predicted_steps_s[:k]) * EXACT
    (routed,) = {table.forward[s] for s in order.rules.experts}
    busiest: dict[int, list[float]] = {0: [], 1: []}
    for spans in result.timeline.spans:
        for task, start, end in spans:
            if task.kind == "F" and task.stage in order.rules.experts:
                busiest[task.replica].append((end - start) / routed)
            if task.kind in EXCHANGES:
                assert end - start >= 1.5 * 2 * MS * EXACT
    less, more = sorted(busiest.values(), key=min)
    assert min(more) >= 1.5 * EXACT
    assert 0.5 * EXACT <= min(less) < 1.5


def test_who_exchanges_tokens_with_whom() -> None:
    """Both directions of Chimera in three copies: the copies of a direction divide its experts."""
    base = generate("chimera", Shape(devices=2, microbatches=2))
    costs = replace(CostTable.even(2, 8 * MS, 8 * MS, 4 * MS), dispatch=(2 * MS,) * 2, combine=(2 * MS,) * 2)
    what = rehearsal(*divide_experts(split_backward(base), costs), SUMS, 3, skew=2)
    experts = what.schedule.rules.experts
    assert experts == (1, 4)
    directions = [(0, 2, 4), (1, 3, 5)]
    assert exchanging_devices(what.schedule) == {
        (s, replica): directions[(s == 4) != (replica % 2 == 1)] for s in experts for replica in range(6)
    }
    assert [what.costs.forward[s] for s in (0, 1, 2)] == pytest.approx([MS, 4 * MS, MS])
    assert what.costs.dispatch[1] == pytest.approx(4 * MS)
    # The experts of a stage are held twice, once by each direction; all else six times, where 2 (6 - 1) / 6 are sent.
    assert what.costs.all_reduce[1] == pytest.approx(2 * MS)
    assert what.costs.all_reduce[0] == pytest.approx(2 * 5 / 6 * 2 * MS)
    with pytest.raises(ScheduleError, match="cannot get 4 times the mean"):
        rehearsal(*divide_experts(split_backward(base), costs), SUMS, 3, skew=4)


@pytest.mark.runs
@pytest.mark.parametrize(("norm", "clip_every", "period_ms"), [("wait", 0, 14), ("optimistic", 2, 12)])
def test_no_step_that_clips_is_faster_than_predicted(local_ray, norm, clip_every, period_ms) -> None:
    """Two devices, three tasks of four micro-batches: 12 units busy, one more and the norm's latency if it waits."""
    base = generate("zb-h2", Shape(devices=2, microbatches=4))
    costs = CostTable.even(2, 1 * MS, 1 * MS, 1 * MS)
    result = emulate(base, costs, Links(latency_s=0.5 * MS), 5, 1, norm, clip_every)
    assert result.predicted_s == pytest.approx((period_ms + (norm == "optimistic")) * MS)
    assert sum(result.measured_s) >= 4 * result.predicted_s * EXACT


def test_updates_that_know_no_norm_cannot_wait_for_it() -> None:
    costs = CostTable.even(2, MS, MS, MS)
    for name, norm in (("pipedream", "optimistic"), ("pipedream-2bw", "wait")):
        with pytest.raises(ScheduleError, match="norm: "):
            emulate(generate(name, Shape(devices=2, microbatches=4)), costs, Links(), 2, 1, norm)


def test_all_reduce_follows_rabenseifner() -> None:
    links = Links(latency_s=1e-5, bytes_per_s=1e9, gradient_bytes=8e6)
    assert links.all_reduce_s(1) == 0
    assert links.all_reduce_s(2) == pytest.approx(2 * 1e-5 + 8e-3)
    assert links.all_reduce_s(8) == pytest.approx(6 * 1e-5 + 2 * 7 / 8 * 8e-3)
    assert Links(message_bytes=5.0).seconds_per_message == 0
    assert math.isinf(Links().bytes_per_s)


@pytest.mark.runs
def test_every_link_has_its_own_latency(local_ray) -> None:
    """Messages over the slow link take its time, both ways, the others theirs, as the step as a whole shows.

    A task's end is noted a moment after its messages are stamped, so a single message may seem faster by that.
    """
    links = (3 * MS, 9 * MS)
    costs = CostTable.even(3, 2 * MS, 2 * MS, 2 * MS, comm=links)
    result = emulate(generate("1f1b", Shape(devices=3, microbatches=2)), costs, Links(latency_s=1 * MS), 2, 1)
    delays = message_delays(result.timeline)
    for s, latency in enumerate(links):
        seen = [d.seconds for d in delays if d.stages == (s, s + 1)]
        assert len(seen) == 4
        assert min(seen) >= latency
    assert result.predicted_steps_s[0] == pytest.approx((2 + 2) * 6 * MS + 2 * (sum(links) + 2 * MS))
    assert result.measured_s[0] >= result.predicted_steps_s[0] * EXACT


@pytest.mark.runs
def test_the_command_prints_one_object(local_ray, capsys) -> None:
    from raypipe.cli import run

    words = ["emulate", "1f1b", "--devices", "2", "--microbatches", "2", "--forward", "2", "--input-grad", "2"]
    assert run([*words, "--weight-grad", "2", "--steps", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["predicted_s"] == pytest.approx(18 * MS)
    assert len(result["measured_s"]) == 2
    assert {"bubble_ratio", "dispatch_overhead_s"} <= set(result)


def lone_runner(sender: object, receiver: object, offset_s: float = 0.0) -> EmulatedRunner:
    """Device 0 of two, before its first task; its host's clock is ``offset_s`` behind the run's."""
    program = programs(generate("1f1b", Shape(devices=2, microbatches=2)))[0]
    setup = EmulatedSetup(
        rank=0, topology=Topology((), "", (), {}, "auto", ""), microbatches=2, programs={WHOLE: program},
        durations={WHOLE: (2 * MS,) * len(program.actions)}, groups={WHOLE: ("",) * len(program.actions)},
        latency_s=4 * MS, seconds_per_message=0.0,
    )  # fmt: skip
    clock = SharedClock(ctypes.c_double(offset_s))
    runner = EmulatedRunner(setup, {1: sender}, {1: receiver}, {}, None, clock)  # type: ignore[dict-item]
    runner._part, runner.step, runner.base, runner.attempt, runner.program = WHOLE, 0, 0, 0, program
    runner.forget()
    return runner


def test_a_device_that_wakes_late_delivers_late(monkeypatch) -> None:
    """A message is due its latency after the task's true end, which the link must not absorb."""
    sent: list[float] = []
    runner = lone_runner(SimpleNamespace(send=lambda label, tensors: sent.append(float(tensors[0]))), None)
    woken: list[float] = []

    def late(moment: float) -> None:
        wait_until(moment + 3 * MS)
        woken.append(time.monotonic())

    monkeypatch.setattr(emulation, "wait_until", late)
    action = runner.program.actions[0]
    runner.handlers[action.task.kind](runner, action)
    runner.send(action.sends[0])
    assert sent[0] >= woken[-1] + 4 * MS


@pytest.mark.parametrize("offset_s", [-1000.0, 1000.0])
def test_messages_between_hosts_are_stamped_on_one_clock(offset_s) -> None:
    sent: list[float] = []
    came = torch.zeros(1, dtype=torch.float64)
    runner = lone_runner(
        SimpleNamespace(send=lambda label, tensors: sent.append(float(tensors[0]))),
        SimpleNamespace(recv=lambda label, timeout_s: [came]),
        offset_s,
    )
    action = runner.program.actions[0]
    begin = time.monotonic()
    runner.handlers[action.task.kind](runner, action)
    runner.send(action.sends[0])
    assert begin + 6 * MS * EXACT <= sent[0] - offset_s < time.monotonic() + 5 * MS
    gradient = next(m for a in runner.program.actions for m in a.receives)
    came[0] = time.monotonic() + offset_s + 20 * MS
    runner.receive(gradient, action)
    assert 0 <= time.monotonic() + offset_s - float(came[0]) < 5.0


@pytest.mark.parametrize("offset_s", [-1000.0, 1000.0])
def test_sums_and_norms_of_several_hosts_are_on_one_clock(monkeypatch, offset_s) -> None:
    """The other holder joins 30 s later, and its host says so on the run's clock; nobody waits for it here."""
    clock = SharedClock(ctypes.c_double(offset_s))
    began = time.monotonic()

    def both(everybody: torch.Tensor, own: torch.Tensor, group: object) -> None:
        everybody[0], everybody[1] = own[0], began + 30 + offset_s

    monkeypatch.setattr(emulation.dist, "all_to_all_single", both)
    lane = AllReduceLane({"stage 0": SimpleNamespace(size=lambda: 2)}, clock)  # type: ignore[dict-item]
    lane.join(7, 5 * MS, "stage 0")
    ((index, end),) = lane.finish()
    lane.close()
    assert index == 7
    assert end == pytest.approx(began + 30 + 5 * MS, abs=1e-6)
    runner = lone_runner(SimpleNamespace(send=None), None, offset_s)
    runner.updates.shares = SimpleNamespace(wait=lambda push: [0.0, began + offset_s])  # type: ignore[assignment]
    assert runner.updates._known_at() == pytest.approx(began + 4 * MS, abs=1e-6)
    runner.updates.shares = SimpleNamespace(wait=lambda push: [0.0])  # type: ignore[assignment]
    assert runner.updates._known_at() <= time.monotonic()


def test_a_group_that_does_not_exist_is_an_error() -> None:
    lane = AllReduceLane({}, SharedClock(ctypes.c_double(0.0)))
    lane.join(0, 5 * MS, "stage 3")
    with pytest.raises(KeyError, match="stage 3"):
        lane.finish()
    lane.close()


def test_more_processes_than_memory_are_refused() -> None:
    check_processes(8, SHARED_BYTES + 8 * PROCESS_BYTES)
    check_processes(10_000, math.inf)
    with pytest.raises(SpecError, match=r"(?s)9 emulated devices .* use at most 8,") as caught:
        check_processes(9, SHARED_BYTES + 8.5 * PROCESS_BYTES)
    assert "Ray has 0.5" in str(caught.value)
    with pytest.raises(SpecError, match="use at most 0,"):
        check_processes(1, 0.0)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "needs one schedule"),
        (["1f1b", "--grad-mb", "4"], "carry nothing"),
        (["1f1b", "--bandwidth", "-1"], "carry nothing"),
        (["1f1b", "--bandwidth", "nan"], "carry nothing"),
        (["1f1b", "--latency-us", "inf"], "--latency-us: a step would never end"),
        (["1f1b", "--json", "none/a.json"], "none/a.json: there is no such folder"),
        (["1f1b", "--devices", "0"], "is not a count"),
        (["1f1b", "--norm", "waits"], 'did you mean "wait"'),
        (["1f1b", "--clip-every", "2"], "nothing to undo"),
        (["1f1b", "--clip-every", "2", "--norm", "free"], "nothing to undo"),
        (["pipedream", "--clip-every", "2", "--norm", "ahead"], "updates wait for none"),
        (["1f2b"], 'did you mean "1f1b"'),
        (
            ["1f1b", "--devices", "6000", "--replicas", "2"],
            "--devices: 12000 emulated devices would need as many processes",
        ),
        (["1f1b", "--steps", "1000000000"], "steps: 1000000000 steps of 68 tasks are too many to predict"),
    ],
)
def test_wrong_requests_end_at_once(words, why, capsys) -> None:
    from raypipe.cli import run

    assert run(["emulate", *words]) == 2
    out = capsys.readouterr()
    assert why in out.err
    assert not out.out

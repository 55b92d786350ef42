"""The closed loop: measured costs lead to a better plan, what loses is undone, and no loss ever changes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from raypipe.data import prepare
from raypipe.launch.plans import kept_plan
from raypipe.observe.run_log import EVENTS, METRICS, RunLog, read_rows
from raypipe.plan.online import better_order as better_plan_module
from raypipe.plan.online import replan, sequence
from raypipe.plan.online.better_order import Running, Swap, better_plan, key, running_of, step_seconds
from raypipe.plan.online.controller import Event, MeasuredStep
from raypipe.plan.online.measured_steps import StepClock
from raypipe.plan.online.replan import Replanner
from raypipe.plan.plan import Plan, build_schedule, load_plan
from raypipe.runtime import calls
from raypipe.runtime.driver import Driver
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule, Task
from raypipe.schedule.live_activations import in_flight, peak_activations
from raypipe.train import make_plan
from tests.runtime.runs.plain_training import plain_losses
from tests.runtime.runs.test_exactness import make_job

AUTO = {"schedule": "auto", "stages": 4, "memory_limit": 4}
NAMED = {"stages": 4, "microbatch": 1, "replan": True}


@pytest.fixture(autouse=True)
def short_searches(monkeypatch) -> None:
    monkeypatch.setattr(better_plan_module, "BUDGET_S", 0.5)


def uneven(stages: int, all_reduce: float = 0.0) -> CostTable:
    """A last stage that takes far longer than its operations let expect, and slow messages."""
    costs = CostTable.even(stages, 1.0, 1.2, 0.8, comm=0.4)
    return replace(
        costs, forward=(*costs.forward[:-1], 1.9), weight_grad=(*costs.weight_grad[:-1], 0.2),
        all_reduce=(all_reduce,) * stages,
    )  # fmt: skip


def running(plan: Plan, batch: int, clips: bool = True) -> Running:
    return running_of(plan, batch, clips)


def without(schedule: Schedule, *kinds: str) -> list[list[Task]]:
    return [[t for t in order if t.kind not in kinds] for order in schedule.orders]


@pytest.mark.slow
def test_a_searched_order_is_searched_again(text_folder: Path) -> None:
    job = make_job(text_folder, AUTO)
    present = running(make_plan(job), job.train.batch)
    swap = better_plan(present, job.train.batch, True, uneven(4))
    assert 0 < swap.gain < 0.5
    assert swap.target.plan.cut == present.plan.cut
    assert swap.predicted_s == pytest.approx(step_seconds(swap.target.schedule, uneven(4), True, swap.target.ahead))
    assert swap.target.schedule == build_schedule(swap.target.plan, job.train.batch)  # what a resumed run would build
    recomputed = better_plan(swap.target, job.train.batch, True, uneven(4))
    assert recomputed.gain >= 0  # it begins from the order it has
    assert max(peak_activations(swap.target.schedule)) <= 4


@pytest.mark.parametrize(("name", "options"), [("zb-h1", {}), ("zeropp", {"chunks": 1, "unit": 4}), ("1f1b", {})])
def test_a_schedule_with_a_name_stays_of_its_family(text_folder: Path, name, options) -> None:
    """What changes is where W's go, or the same family's order for other costs; never what a device can hold."""
    job = make_job(text_folder, {"schedule": name, **NAMED, **options})
    present = running(make_plan(job), job.train.batch)
    swap = better_plan(present, job.train.batch, True, uneven(4))
    peaks = zip(peak_activations(swap.target.schedule), peak_activations(present.schedule), strict=True)
    assert all(after <= before for after, before in peaks)
    if name == "1f1b":
        assert swap.gain == 0
        assert swap.target == present
        return
    assert swap.gain > 0
    moved = better_plan(present, job.train.batch, True, CostTable.even(4))  # nothing new to generate for
    assert without(moved.target.schedule, "W") == without(present.schedule, "W")


def test_gradients_are_summed_when_it_costs_least(text_folder: Path) -> None:
    """Sums that take as long as several tasks are begun as soon as they can."""
    job = make_job(text_folder, {"schedule": "gpipe", "stages": 2, "replicas": 2, "replan": True})
    present = running(make_plan(job), job.train.batch, clips=False)
    swap = better_plan(present, job.train.batch, False, uneven(2, all_reduce=5.0))
    assert swap.target.plan.parallel.sync == "lazy"  # one stage a device: its last gradient is its last task
    job = make_job(text_folder, {"schedule": "interleaved-1f1b", "stages": 2, "chunks": 2, "replicas": 2})
    present = running(make_plan(job), job.train.batch, clips=False)
    swap = better_plan(present, job.train.batch, False, uneven(4, all_reduce=5.0))
    assert swap.target.plan.parallel.sync in ("eager", "eager-opt")
    assert swap.gain > 0.05
    assert "gradient all-reduce" in swap.change
    banned = better_plan(present, job.train.batch, False, uneven(4, all_reduce=5.0), {key(swap.target.plan)})
    assert banned.gain <= swap.gain
    assert key(banned.target.plan) != key(swap.target.plan)


def test_asynchronous_steps_change_nothing(text_folder: Path) -> None:
    job = make_job(text_folder, {"schedule": "pipedream-2bw", "stages": 4, "microbatch": 1})
    present = running(make_plan(job), job.train.batch)
    assert better_plan(present, job.train.batch, True, uneven(4)).target == present


class Scripted:
    """A replanner whose searches end at once, fed with made-up step times."""

    def __init__(self, text_folder: Path, monkeypatch, gain: float = 0.2) -> None:
        job = make_job(text_folder, AUTO)
        self.first = running(make_plan(job), job.train.batch)
        other = better_plan(self.first, job.train.batch, True, uneven(4))
        self.found = replace(other, current_s=1.0, predicted_s=1.0 - gain)
        self.searches = 0

        def search(*_: object) -> object:
            self.searches += 1
            return self.found

        monkeypatch.setattr(replan, "better_plan", search)
        self.replanner = Replanner(self.first, job.train.batch, True)
        self.clock = StepClock(self.first.schedule)
        self.log: list[Event] = []
        self.since = 0

    def step(self, seconds: float) -> Running | None:
        """One step of the present plan, whose costs are known after ten."""
        self.since += 1
        self.replanner.observe(MeasuredStep(seconds, [], self.clock, uneven(4) if self.since == 10 else None))
        if self.replanner._thread is not None:
            self.replanner._thread.join()
        target = self.replanner.next_plan()
        self.log += self.replanner.drain()
        if target is not None:
            self.since = 0
        return target

    def steps(self, count: int, seconds: float) -> list[Running]:
        return [target for _ in range(count) if (target := self.step(seconds)) is not None]

    def events(self) -> list[str]:
        return [event.name for event in self.log]


def test_what_gains_stays_and_is_planned_on(text_folder: Path, monkeypatch) -> None:
    loop = Scripted(text_folder, monkeypatch)
    assert loop.steps(9, 1.0) == []
    assert loop.steps(1, 1.0) == [loop.found.target]
    assert loop.steps(10, 0.9) == []
    loop.found = replace(loop.found, predicted_s=loop.found.current_s)  # nothing more to gain
    assert loop.steps(20, 0.9) == []
    assert loop.events() == ["replanned", "realised", "refitted", "kept"]
    realised = loop.log[1].fields
    assert realised["gain"] == pytest.approx(0.1)
    assert realised["predicted_gain"] == pytest.approx(0.2)
    assert loop.replanner.present == loop.found.target


def test_what_loses_is_undone(text_folder: Path, monkeypatch) -> None:
    """Then the plan before it is timed again, and another one looked for."""
    loop = Scripted(text_folder, monkeypatch)
    assert loop.steps(10, 1.0) == [loop.found.target]
    assert loop.replanner.proven == loop.first.plan  # what a restart begins with
    assert loop.steps(11, 1.05) == [loop.first]
    loop.found = replace(loop.found, predicted_s=loop.found.current_s)
    assert loop.steps(30, 1.0) == []
    assert loop.events() == ["replanned", "realised", "reverted", "refitted", "kept"]
    assert loop.searches == 2
    assert key(loop.found.target.plan) in loop.replanner._tried


def test_no_swap_is_blamed_for_a_machine_that_became_slower(text_folder: Path, monkeypatch) -> None:
    loop = Scripted(text_folder, monkeypatch)
    assert loop.steps(10, 1.0) == [loop.found.target]
    assert loop.steps(11, 1.3) == [loop.first]  # undone, as if the swap had been the cause
    assert loop.steps(11, 1.6) == [loop.found.target]
    assert loop.events() == ["replanned", "realised", "reverted", "restored"]
    assert loop.log[-1].fields["gain"] == pytest.approx(1 - 1.3 / 1.6)
    assert loop.replanner.proven == loop.found.target.plan
    assert loop.steps(30, 1.3) == []


@pytest.mark.slow
def test_within_the_noise_more_steps_decide(text_folder: Path, monkeypatch) -> None:
    """Steps that vary by a tenth: ten of them say nothing of a gain of a hundredth."""

    def noisy(count: int, seconds: float) -> list[Running]:
        return [t for i in range(count) for t in loop.steps(1, seconds * (1.1 if i % 2 else 0.9))]

    loop = Scripted(text_folder, monkeypatch)
    assert noisy(10, 1.0) == [loop.found.target]
    assert noisy(20, 0.99) == []
    assert loop.events() == ["replanned"]
    loop.found = replace(loop.found, predicted_s=loop.found.current_s)
    noisy(25, 0.99)
    assert loop.events()[:2] == ["replanned", "realised"]
    realised = loop.log[1].fields
    assert realised["steps"] == replan.UNSURE * replan.WATCHED
    assert realised["gain"] == pytest.approx(0.01, abs=0.001)
    loop = Scripted(text_folder, monkeypatch, gain=0.02)  # less than the noise of what was measured
    assert noisy(30, 1.0) == []
    assert loop.events() == ["kept"]


def test_a_promise_below_the_threshold_is_not_taken(text_folder: Path, monkeypatch) -> None:
    loop = Scripted(text_folder, monkeypatch, gain=0.005)
    assert loop.steps(30, 1.0) == []
    assert loop.events() == ["kept"]


def test_other_step_times_begin_it_again(text_folder: Path, monkeypatch) -> None:
    loop = Scripted(text_folder, monkeypatch, gain=0.0)
    assert loop.steps(30, 1.0) == []
    assert loop.steps(10, 1.3) == [loop.first]  # the same plan, measured anew
    assert loop.steps(20, 1.3) == []
    assert loop.events() == ["kept", "drifted", "refitted", "kept"]
    assert loop.searches == 2


def test_a_settled_plan_is_looked_at_now_and_then(text_folder: Path, monkeypatch) -> None:
    """Costs may change where no step shows it; ever more rarely, since nothing changed so far."""
    loop = Scripted(text_folder, monkeypatch, gain=0.0)
    taken = [n for n in range(1, 400) if loop.step(1.0) is not None]
    assert taken == [60, 170, 380]  # 10 to measure, then 50, 100 and 200 quiet ones
    assert loop.searches == 4
    assert "drifted" not in loop.events()


def test_a_search_that_fails_keeps_the_plan(text_folder: Path, monkeypatch) -> None:
    loop = Scripted(text_folder, monkeypatch)
    loop.found = None
    assert loop.steps(20, 1.0) == []
    assert loop.events() == ["kept"]


def test_the_biggest_change_is_named() -> None:
    was = CostTable.even(3)
    now = replace(was, input_grad=(1.0, 0.4, 1.0), forward=(1.5, 1.0, 1.0))
    assert replan.largest_change(was, now) == ("B", 1, 0.4)


def test_only_what_flushes_can_be_planned_again(text_folder: Path) -> None:
    from raypipe.errors import SpecError

    with pytest.raises(SpecError, match=r"parallel\.replan: .*never flushes"):
        make_job(text_folder, {"schedule": "pipedream-2bw", "stages": 4, "microbatch": 1, "replan": True})


def test_orders_of_a_step_that_recomputes_keep_no_more_micro_batches_in_flight(text_folder: Path) -> None:
    """What is kept from F to R does not show in the activations that live after it."""
    job = make_job(text_folder, {**AUTO, "recompute": "full"})
    present = running(make_plan(job), job.train.batch, clips=False)
    dear = replace(uneven(4), recompute=(1.0, 1.0, 1.0, 3.0))
    swap = better_plan(present, job.train.batch, False, dear)
    before, after = in_flight(present.schedule), in_flight(swap.target.schedule)
    assert all(after[at] <= count for at, count in before.items())
    assert swap.gain >= 0


@pytest.mark.parametrize("parallel", [AUTO, {"schedule": "zb-h1", **NAMED}])
def test_a_resumed_run_begins_with_the_plan_that_was_found(text_folder: Path, tmp_path: Path, parallel) -> None:
    job = make_job(text_folder, parallel)
    present = running(make_plan(job), job.train.batch)
    result = better_plan(present, job.train.batch, True, uneven(4)).target.plan
    assert result.program != present.plan.program
    result.save(tmp_path / "plan.json")
    kept = kept_plan(job, tmp_path)
    assert kept is not None
    assert kept.plan == result
    assert kept_plan(make_job(text_folder, {"schedule": "zb-h2", **NAMED}), tmp_path) is None
    assert kept_plan(make_job(text_folder, {"schedule": "zb-h1", "stages": 4, "microbatch": 1}), tmp_path) is None


class Eager(Replanner):
    """Finds its plan before the next step begins, however fast steps are; those after a swap seem to take ``by``."""

    by = 1.0

    def observe(self, measured):
        super().observe(replace(measured, step_s=measured.step_s * (self.by if self.state == "watching" else 1.0)))

    def next_plan(self):
        if self._thread is not None:
            self._thread.join()
        return super().next_plan()


@pytest.mark.runs
@pytest.mark.parametrize(
    ("parallel", "stays"), [(AUTO, True), ({"schedule": "zb-h1", "stages": 2, "replicas": 2, "replan": True}, False)]
)
def test_swaps_between_two_steps_change_no_loss(
    stage_pool, text_folder, tmp_path, monkeypatch, parallel, stays
) -> None:
    """Another order is taken up right after a checkpoint, and given up again where it is said to lose. A run that is
    resumed begins with what has proved itself."""
    steps = 28
    job = make_job(text_folder, parallel, steps=steps, checkpoint_every=12)
    prepare(job.data, job.model.sequence, tmp_path / "data")
    expected = plain_losses(job, tmp_path / "data", steps)
    log = RunLog(tmp_path)
    saved: dict[int, Path] = {}
    monkeypatch.setattr(sequence, "Replanner", Eager)
    monkeypatch.setattr(Eager, "by", 1e-3 if stays else 1e3)
    monkeypatch.setattr(calls, "MOST_STEPS", 1)  # so that it is known which steps are queued by then
    driver = Driver(job, make_plan(job), tmp_path, log, lambda step, path, _: saved.update({step: path}))
    present, before = driver.running, driver.schedule
    present.plan.save(tmp_path / "plan.json")
    other = better_plan(present, job.train.batch, True, uneven(before.stages, all_reduce=2.0))
    assert other.target.schedule.orders != before.orders
    promised = replace(other, predicted_s=0.0)  # more than any noise
    monkeypatch.setattr(replan, "better_plan", lambda now, *_: promised if now is present else Swap(now, "", 1.0, 1.0))
    driver.run(stage_pool(4), None, 0)
    losses = [row["loss"] for row in read_rows(tmp_path / METRICS) if "loss" in row]
    assert losses == pytest.approx(expected, abs=1e-9, rel=0)
    events = [e for e in read_rows(tmp_path / EVENTS) if e["event"] in ("replanned", "realised", "reverted")]
    assert [e["event"] for e in events] == ["replanned", "realised", *([] if stays else ["reverted"])]
    assert events[0]["step"] == 12  # ten to measure, two that were queued by then
    assert (driver.schedule.orders != before.orders) == stays
    kept = load_plan(tmp_path / "plan.json")
    assert kept == driver.running.plan == (other.target.plan if stays else present.plan)
    assert json.loads((tmp_path / "plan.json").read_text())["parallel"]["schedule"] == parallel["schedule"]
    if stays:
        log = RunLog(tmp_path)
        Driver(job, kept, tmp_path, log, lambda *_: None).run(stage_pool(4), saved[24], 24)
        recomputed = [row["loss"] for row in read_rows(tmp_path / METRICS) if "loss" in row][steps:]
        assert recomputed == pytest.approx(expected[24:], abs=1e-9, rel=0)

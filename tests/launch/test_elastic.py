"""When an elastic run changes its devices, and with which plan; Ray is played by numbers."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RaySystemError

from raypipe.errors import RunError, SpecError
from raypipe.job.spec import job_from
from raypipe.launch import elastic as module
from raypipe.launch.elastic import DrainedNodes, Elastic, NamedNodes
from raypipe.launch.plans import with_plan
from raypipe.launch.prepared import Prepared
from raypipe.observe.run_dir import LEAVING, PROFILE, SAVE, STOP, ask, asked, asked_to_stop
from raypipe.observe.run_log import EVENTS, RunLog, read_rows, slow_devices
from raypipe.observe.run_record import summarise
from raypipe.plan.choose import choose
from raypipe.plan.plan import build_schedule, load_plan
from raypipe.runtime.hosts.devices import DeviceRequest
from raypipe.runtime.worker import worker_group
from raypipe.train import prepare_run
from tests.plan.conftest import make_job, make_profile
from tests.plan.test_experts import measured


class Devices:
    """Devices that nobody reserved, by the node they are on."""

    together, kinds, request, run_id = 1, (), DeviceRequest(1.0, 0.0), "0" * 8

    def __init__(self, ray: Run, on: dict[str, int]) -> None:
        self.ray, self.on = ray, on

    @property
    def devices(self) -> int:
        return sum(self.on.values())

    @property
    def parts(self) -> list[Any]:
        return [SimpleNamespace(name=f"part on {node}") for node in self.on]

    def nodes(self) -> set[str]:
        return {*self.on}

    def is_broken(self) -> bool:
        return not self.ray.lost.isdisjoint(self.on)

    def without(self, going: set[str]) -> Devices:
        return Devices(self.ray, {node: n for node, n in self.on.items() if node not in going | self.ray.lost})

    def at_most(self, devices: int) -> Devices:
        return self if self.devices <= devices else Devices(self.ray, {})

    def with_more(self, devices: int) -> Devices | None:
        needs = devices - self.devices
        if needs > self.ray.free or self.ray.scattered:
            return None
        self.ray.free -= needs
        return Devices(self.ray, {**self.on, **({f"node {len(self.on)}": needs} if needs else {})})

    def give_back(self) -> None:
        self.ray.free += self.devices
        self.on = {}


class Started:
    """Processes that are warm once somebody says so."""

    warm = False

    def __init__(self, reservation: Devices, among: Devices) -> None:
        self.reservation = reservation

    def ready(self) -> bool:
        return self.warm


class Run:
    """An elastic run on two devices of a cluster that has ``free`` more."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, **spec: Any) -> None:
        self.free, self.scattered, self.lost, self.anew = 0, False, set[str](), 0
        self.now = 100.0
        asked = make_job(parallel={"auto": True, "schedule": "1f1b", "replicas": 1}, elastic={"wait_s": 0.0, **spec})
        (directory / PROFILE).write_text(make_profile(devices=2).model_dump_json())
        plan = choose(asked, make_profile(devices=2), 2, search_s=0).plan
        plan.save(directory / "plan.json")
        job = with_plan(asked, plan)
        model: Any = SimpleNamespace()
        prepared = Prepared(job, model, plan, build_schedule(plan, job.train.batch), directory, False, asked)
        self.directory, self.log = directory, RunLog(directory)
        self.log.event("run", devices=2)
        self.elastic = Elastic(prepared, Devices(self, {"node 0": 2}), self._reserve)  # type: ignore[arg-type]
        self.going: set[str] = set()
        monkeypatch.setattr(module, "draining_nodes", lambda: self.going)
        monkeypatch.setattr(worker_group, "Warm", Started)
        monkeypatch.setattr(Started, "warm", True)
        monkeypatch.setattr(Elastic, "_free", lambda _: self.free)
        monkeypatch.setattr(module, "RELEASED_S", 0.0)
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(module.time, "sleep", self._sleep)

    def _reserve(self, prepared: Prepared, run_id: str) -> Any:
        self.anew += 1
        return Devices(self, {"any node": prepared.schedule.devices})

    @property
    def devices(self) -> dict[str, int]:
        """Devices that the run has, by node."""
        return self.elastic._reservation.on  # type: ignore[attr-defined]

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def look(self, seconds: float) -> None:
        """Look twice a second for so long."""
        for _ in range(int(seconds * 2)):
            self.elastic.look()
            self.now += 0.5

    def why_it_pauses(self) -> str:
        """Return why the run is asked to pause."""
        stop = asked_to_stop(self.directory)
        assert stop is not None
        assert stop.pauses
        return stop.why

    def pause(self, seconds: float = 1) -> None:
        """Pause as asked, and look for so long."""
        self.log.event("paused", step=7, message="as asked")
        self.look(seconds)

    def lose(self, *nodes: str) -> None:
        """Lose nodes, and look once."""
        self.lost = set(nodes)
        self.log.event("devices_lost", message="gone")
        self.look(0.5)

    def resized(self) -> list[dict[str, Any]]:
        return [e for e in read_rows(self.directory / EVENTS) if e["event"] == "resized"]


@pytest.fixture
def new_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """``new_run(min_devices=2)`` is a run with these keys of ``train.elastic``."""
    return partial(Run, tmp_path, monkeypatch)


@pytest.fixture
def run(new_run: Callable[..., Run]) -> Run:
    return new_run()


def test_more_devices_pause_the_run_once_they_stay(run: Run) -> None:
    run.free = 2
    run.look(1.5)
    run.free = 0
    run.look(3)
    assert asked_to_stop(run.directory) is None
    run.free = 2
    run.look(4)
    assert run.why_it_pauses().startswith("2 more devices: a step of")
    run.pause()
    (change,) = run.resized()
    assert (change["devices"], change["was"]) == (4, 2)
    assert change["reservation"] == ["part on node 0", "part on node 1"]
    assert (run.devices, run.anew) == ({"node 0": 2, "node 1": 2}, 0)
    assert load_plan(run.directory / "plan.json").parallel.stages == 4
    assert run.elastic.prepared.schedule.devices == 4
    assert run.elastic.prepared.resume
    assert asked_to_stop(run.directory) is None
    run.free = 0
    run.look(5)
    assert len(run.resized()) == 1


def slowed(run: Run, device: int, slowdown: float) -> None:
    """The driver names a device, and the run is looked at."""
    run.log.event("straggler", device=device, slowdown=slowdown, message=f"device {device}")
    run.look(1)


def test_a_slow_device_gets_less_until_it_recovers(run: Run) -> None:
    slowed(run, 1, 1.01)  # too little to gain
    assert asked_to_stop(run.directory) is None
    even = [len(stage) for stage in run.elastic.prepared.plan.cut]
    for slowdown in (3.0, 1.0):
        slowed(run, 1, slowdown)
        assert ("device 1 takes 3.00 times as long" in run.why_it_pauses()) is (slowdown > 1)
        run.pause()
        change = run.resized()[-1]
        assert (change["devices"], change["was"]) == (2, 2)
        assert slow_devices(run.directory) == ({1: 3.0} if slowdown > 1 else {})
        cut = [len(stage) for stage in load_plan(run.directory / "plan.json").cut]
        assert (cut == even) is (slowdown == 1)
        assert cut[1] < even[1] or slowdown == 1
        assert asked_to_stop(run.directory) is None
    assert (run.devices, run.anew) == ({"node 0": 2}, 0)


@pytest.mark.parametrize("key", ["experts", "context"])
def test_plans_that_are_not_costed_at_other_speeds_stay(run: Run, key: str) -> None:
    prepared = run.elastic.prepared
    parallel = prepared.plan.parallel.model_copy(update={key: 2})
    run.elastic.prepared = replace(prepared, plan=prepared.plan.model_copy(update={"parallel": parallel}))
    slowed(run, 1, 3.0)
    assert asked_to_stop(run.directory) is None


def test_experts_go_to_other_copies_where_loads_would_be_more_even(run: Run) -> None:
    profile = measured(8).model_copy(update={"devices": 2, "hosts": (2,)})
    (run.directory / PROFILE).write_text(profile.model_dump_json())
    asked = make_job(layers=4, parallel={"auto": True, "experts": 2, "replicas": 2, "stages": 1}, elastic={"wait_s": 0})
    plan = choose(asked, profile, 2, search_s=0).plan
    schedule = build_schedule(plan, asked.train.batch)
    now = replace(run.elastic.prepared, job=with_plan(asked, plan), plan=plan, schedule=schedule, asked=asked)
    run.elastic.prepared = now
    layers = sum(layer.experts is not None for layer in profile.layers)
    for loads, pauses in (([11, 10, 10, 9], False), ([4, 3, 1, 0], True)):
        run.log.event("uneven_experts", loads=[loads] * layers, message="the busiest of 2 copies ...")
        run.look(1)
        assert (asked_to_stop(run.directory) is not None) is pauses
    assert run.why_it_pauses().startswith("experts in another order: a step of")
    run.pause()
    assert (run.devices, run.anew) == ({"node 0": 2}, 0)
    after = load_plan(run.directory / "plan.json")
    assert after.parallel.expert_order == ((0, 3, 1, 2),) * layers
    assert after.program == plan.program
    assert after.differences(now.job) == plan.differences(now.job)


def test_who_is_slow_is_found_again_on_other_devices(run: Run) -> None:
    slowed(run, 1, 3.0)
    run.free = 2
    run.lose("node 0")
    assert slow_devices(run.directory) == {}


def test_devices_that_save_too_little_are_left_alone(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WORTH", 0.9)
    run.free = 2
    run.look(10)
    assert asked_to_stop(run.directory) is None


def test_a_run_that_is_asked_to_stop_is_not_paused(run: Run) -> None:
    ask(run.directory, STOP, "enough")
    run.free = 2
    run.look(10)
    stop = asked_to_stop(run.directory)
    assert stop is not None
    assert not stop.pauses


def test_the_run_goes_on_until_the_processes_for_more_devices_have_started(run: Run) -> None:
    Started.warm = False
    run.free = 2
    run.look(30)
    assert run.free == 0  # held for them
    assert asked_to_stop(run.directory) is None
    Started.warm = True
    run.look(1)
    run.log.event("paused", step=7, message=run.why_it_pauses())
    started = weakref.ref(run.elastic._more)  # type: ignore[arg-type]
    run.look(0.5)
    assert run.resized()[0]["devices"] == 4
    assert started() is not None, "Ray ends an actor that its creator has forgotten"


def test_nodes_that_will_go_are_left_also_while_processes_start(run: Run) -> None:
    Started.warm = False
    run.free = 2
    run.look(10)
    run.going = {"node 0"}
    run.look(1)
    assert run.why_it_pauses() == "1 of its nodes will go: node 0"
    run.pause(0.5)
    (change,) = run.resized()
    assert change["devices"] == 2
    assert run.devices == {"node 1": 2}


def test_a_lost_driver_is_noticed_also_while_processes_start(run: Run) -> None:
    Started.warm = False
    run.free = 2
    run.look(10)
    run.lost = {"node 0"}
    run.look(13)
    assert not run.devices


def test_devices_that_other_jobs_take_meanwhile_are_waited_for(run: Run) -> None:
    run.free, run.scattered = 2, True
    run.look(10)
    run.why_it_pauses()
    run.pause()
    assert (run.devices, run.anew) == ({"any node": 4}, 1)


def test_devices_that_go_while_the_run_pauses_for_more_are_not_planned_for(run: Run) -> None:
    run.free = 2
    run.look(10)
    run.lost = {"node 1"}
    run.pause()
    (change,) = run.resized()
    assert change["devices"] == 2
    assert run.devices == {"node 0": 2}


def test_lost_devices_that_come_back_keep_the_plan(
    new_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    run = new_run(wait_s=5.0)
    run.lost = {"node 0"}
    monkeypatch.setattr(Elastic, "_free", lambda _: 2 if run.now > 103 else 0)
    run.free = 2
    better = load_plan(run.directory / "plan.json").model_copy(update={"predicted_step_s": 0.125})
    better.save(run.directory / "plan.json")  # the run has found a better order since it began
    run.log.event("devices_lost", message="gone")
    run.look(0.5)
    (change,) = run.resized()
    assert change["devices"] == 2
    assert run.devices == {"node 0": 2}
    assert 103 < run.now < 105
    assert load_plan(run.directory / "plan.json") == better


def test_lost_devices_make_another_plan_for_those_that_stay(run: Run) -> None:
    run.free = 2
    run.look(10)
    run.pause()
    run.lose("node 0")
    change = run.resized()[-1]
    assert (change["devices"], change["was"], change["plan"]["stages"]) == (2, 4, 2)
    assert run.devices == {"node 1": 2}


def test_lost_devices_make_another_plan(run: Run) -> None:
    run.free = 1
    run.lose("node 0")
    (change,) = run.resized()
    assert (change["devices"], change["was"], change["plan"]["stages"]) == (1, 2, 1)
    assert sum(run.devices.values()) == 1


def test_devices_that_will_go_are_left_before_they_do(run: Run) -> None:
    run.going = {"node of something else"}
    run.look(2)
    assert asked_to_stop(run.directory) is None
    run.going = {"node 0"}
    run.free = 1
    run.look(1)
    assert run.why_it_pauses() == "1 of its nodes will go: node 0"
    run.pause(5)
    (change,) = run.resized()
    assert (change["devices"], change["was"]) == (1, 2)


def test_a_ray_that_does_not_answer_ends_no_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def unanswered(_devices: Devices) -> bool:
        raise RaySystemError("GCS is not available")

    monkeypatch.setattr(Devices, "is_broken", unanswered)
    run.look(1)
    assert asked_to_stop(run.directory) is None


def test_it_keeps_within_its_limits(new_run: Callable[..., Run]) -> None:
    run = new_run(min_devices=2, max_devices=3)
    run.free = 1
    run.lose("node 0")
    assert run.resized()[-1]["devices"] == 2  # waited for
    run.lost = set()
    run.free = 6
    run.look(5)
    run.pause(0.5)
    assert run.resized()[-1]["devices"] == 3


def test_no_plan_for_the_devices_left_is_one_error(run: Run) -> None:
    (run.directory / PROFILE).write_text(make_profile(devices=2, memory_bytes=2**20).model_dump_json())
    run.lost = {"node 0"}
    run.log.event("devices_lost", message="gone")
    run.free = 1
    with pytest.raises(RunError, match="there is no plan for 1 devices"):
        run.look(0.5)


def test_devices_that_nobody_reports_lost_are_given_back(run: Run) -> None:
    """Where the driver was on the lost node too, Ray starts no other one before that."""
    run.lost = {"node 0"}
    run.look(5)
    assert run.devices
    run.look(8)
    assert not run.devices


def test_changes_are_recoveries(tmp_path: Path) -> None:
    def event(kind: str, time: float, **fields: Any) -> dict[str, Any]:
        return {"event": kind, "time": time, **fields}

    log = [
        event("run", 0.0, devices=4),
        event("started", 1.0, devices=[{}] * 4, resumed_from=None),
        event("failed", 5.0, message="gone"),
        event("devices_lost", 5.1, message="gone"),
        event("resized", 6.0, devices=2, was=4),
        event("restarted", 6.5, checkpoint=None, step=3, steps_repeated=2),
        event("started", 9.0, devices=[{}] * 2, resumed_from=3),
        event("paused", 20.0, step=8, message="2 more devices"),
        event("resized", 21.0, devices=4, was=2),
        event("started", 26.0, devices=[{}] * 4, resumed_from=8),
    ]
    (tmp_path / EVENTS).write_text("".join(json.dumps(row) + "\n" for row in log))
    (tmp_path / "metrics.jsonl").write_text("")
    result = summarise(tmp_path, {})
    assert result["devices"] == 4
    assert result["recoveries"] == 2
    assert result["recovery"] == [
        {"step": 3, "kind": "replan", "seconds": 4.0, "steps_repeated": 2, "replaced": [0, 1]},
        {"step": 8, "kind": "replan", "seconds": 6.0, "steps_repeated": 0, "replaced": [0, 1, 2, 3]},
    ]


def test_it_takes_a_plan_that_leaves_something_open(tmp_path: Path) -> None:
    job = make_job(parallel={"schedule": "1f1b", "stages": 2, "microbatch": 2}, elastic={})
    with pytest.raises(SpecError, match=r"train\.elastic: there is nothing left to choose"):
        prepare_run(job, tmp_path / "run", resume=False)


def test_limits_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(SpecError, match="max_devices is 2, less than min_devices, 4"):
        make_job(elastic={"min_devices": 4, "max_devices": 2})
    assert job_from(make_job(elastic={}).model_dump()).train.elastic is not None


def unanswered() -> set[str]:
    raise RaySystemError("GCS is not available")


def test_a_node_that_will_go_asks_for_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    going: set[str] = set()
    monkeypatch.setattr(module, "draining_nodes", lambda: going)
    drained = DrainedNodes(tmp_path, SimpleNamespace(nodes=lambda: {"a", "b"}))  # type: ignore[arg-type]
    drained.look()
    going.add("c")
    drained.look()
    assert not asked(tmp_path, SAVE)
    for node in ("a", "b"):
        going.add(node)
        drained.look()
        assert asked(tmp_path, SAVE)
        drained.look()
        assert not asked(tmp_path, SAVE)
    monkeypatch.setattr(module, "draining_nodes", unanswered)
    drained.look()
    assert [row["message"][-1] for row in read_rows(tmp_path / EVENTS)] == ["a", "b"]


def test_nodes_that_a_file_names_are_drained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By any of their names; what names none is told, and the file is taken once."""
    nodes = [
        {"Alive": k != "c", "NodeID": k, "NodeManagerHostname": f"host-{k}", "NodeManagerAddress": f"10.0.0.{n}"}
        for n, k in enumerate("abc")
    ]
    calls: list[tuple[str, float]] = []
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(gcs_address="gcs:1"))
    monkeypatch.setattr(module, "drain_node", lambda _, node, why, seconds: calls.append((node, seconds)))
    named = NamedNodes(tmp_path)
    named.look()
    (tmp_path / LEAVING).write_text("host-a\n\n10.0.0.1 120\nhost-c\na soon\n")
    named.look()
    named.look()
    assert calls == [("a", 30.0), ("b", 120.0)]
    dead, soon = [row["message"] for row in read_rows(tmp_path / EVENTS)]
    assert dead.startswith("leaving says 'host-c': ")
    assert "host-" in dead.partition(": ")[2]
    assert soon == "leaving says 'a soon': soon is no number of seconds"
    monkeypatch.setattr(module, "drain_node", lambda *_: "this version of Ray has no call for it")
    (tmp_path / LEAVING).write_text("a")
    named.look()
    assert read_rows(tmp_path / EVENTS)[-1]["message"] == "leaving says 'a': this version of Ray has no call for it"

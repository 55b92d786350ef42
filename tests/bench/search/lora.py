"""Adapters on a GPT-2 of medium size: plans that know of frozen weights beside plans of the same schedule that do not.

The work of every layer is counted off the captured model, with adapters and without, on A100. The unaware plan is cut
for the model that trains whole. What that costs depends on what is unaware. The planner alone: a run has the frozen
model's times either way (the first figure). The run as well: it also makes the weight gradients of frozen weights, and
throws them away (the figure behind it). With the frozen model's times, the plan with all its tasks is timed too: the
aware one's cut with the empty B and W, and the messages back, that stages without a trained weight need not. ``lora``
times them with a clock that shares nothing with the planner (``tests/plan/joint/clock.py``), ``lora-emulated`` on stage
actors.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from raypipe.cost.profile import Profile
from raypipe.job.cluster import load_cluster
from raypipe.job.spec import JobSpec, job_from
from raypipe.partition.job_costs import job_profile
from raypipe.plan.candidate import Candidate
from raypipe.plan.certificate.of_plan import Certifier
from raypipe.plan.predict.prediction import Cut, Prediction
from raypipe.plan.predict.predictor import Predictor
from raypipe.runtime.emulation.emulated_run import rehearsal
from raypipe.runtime.emulation.links import Links
from raypipe.schedule import generate
from raypipe.schedule.forms.text import to_text
from raypipe.schedule.ir import Schedule
from raypipe.schedule.shape import Grid, pipeline_shape
from tests.bench.search.line import Effort, Line
from tests.bench.turns import Turns, lead, take_turns
from tests.plan.joint.clock import Layer, time_of

CLUSTER = Path(__file__).parents[3] / "cluster" / "devices" / "a100.yaml"
MEDIUM = {
    "n_layer": 24, "n_embd": 1024, "n_head": 16, "n_positions": 1024, "attn_pdrop": 0.0, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
}  # fmt: skip
LAYERS = "(c_attn|c_fc|c_proj)"
ADAPTERS = {
    "all blocks": rf".*\.{LAYERS}",
    "last half": rf".*\.h\.(1[2-9]|2[0-3])\..*{LAYERS}",
    "last quarter": rf".*\.h\.(1[89]|2[0-3])\..*{LAYERS}",
}
"""Where the adapters are; blocks before them have neither B nor W."""
SCHEDULES = (("1f1b", 1), ("interleaved-1f1b", 2), ("zb-h1", 1))
DEVICES, SAMPLES, COUNT = (4, 8), 4, 32
"""Devices of a pipeline, samples of a micro-batch, and micro-batches of a step."""
SPEED_UP = 1.3
EMULATED, STEPS, CLOSE = 4, 5, 0.03


class Plans(NamedTuple):
    name: str
    judge: Predictor
    """Of the model with adapters."""
    unaware: Prediction
    whole: float
    """Seconds of the unaware plan's step, by the clock, when all weight gradients are made."""
    tasks: Schedule
    """The aware plan's order with all its tasks."""
    aware: Prediction


def medium(where: str | None) -> JobSpec:
    """The job; with adapters in these blocks, or trained whole."""
    lora = None if where is None else {"r": 16, "target_modules": ADAPTERS[where]}
    return job_from({
        "name": "medium", "model": {"hf": "gpt2", "config": MEDIUM, "sequence": 1024, "lora": lora},
        "data": {"type": "bytes", "path": "stdlib"},
        "train": {"steps": 1, "batch": SAMPLES * COUNT, "dtype": "bfloat16", "clip": 1.0}, "parallel": "auto",
    })  # fmt: skip


@cache
def profiled(where: str | None) -> Profile:
    return job_profile(medium(where), load_cluster(CLUSTER))


def judge_of(where: str | None) -> Predictor:
    profile = profiled(where)
    return Predictor(profile, medium(where).train, len(profile.layers), divides=False)


def plans(devices: int) -> Iterator[Plans]:
    """Every schedule with the unaware cut and the planner's own, with the frozen model's costs."""
    whole = judge_of(None)
    for where in ADAPTERS:
        judge = judge_of(where)
        for name, chunks in SCHEDULES:
            other, aware = (best(one, devices, name, chunks) for one in (whole, judge))
            unaware = judge.predict_order(other.candidate, whole.schedule_of(other), other.cut)
            tasks = generate(name, pipeline_shape(aware.candidate, COUNT))
            trained = seconds(judge, whole.schedule_of(other), other.cut, whole)
            yield Plans(f"{where}, {name}", judge, unaware, trained, tasks, aware)


def best(judge: Predictor, devices: int, name: str, chunks: int) -> Prediction:
    """The planner's plan of this schedule: the better of its two ways of cutting."""
    grid = Grid(devices, 1, SAMPLES, COUNT)
    ways: tuple[Literal["stages", "devices"], ...] = ("stages", "devices")
    made = (Candidate.on(grid, name, chunks=chunks, update="wait", balance=way) for way in ways)
    return min(map(judge.predict, made), key=lambda p: p.step_s)


def seconds(judge: Predictor, schedule: Schedule, cut: Cut, whole: Predictor | None = None) -> float:
    """The makespan of a step by the clock; with all weight gradients of the ``whole`` model, and its way back, if
    given."""
    layers = []
    for n, x in enumerate(judge.profile.layers):
        t = x.times[SAMPLES]
        back, weight, both = t.input_grad, t.weight_grad, t.joint
        if whole is not None:
            all_of_it = whole.profile.layers[n].times[SAMPLES]
            back, weight = max(back, all_of_it.input_grad), weight + all_of_it.weight_grad
            both = back + weight
        layers.append(Layer(t.forward, back, weight, both, 0.0, 0.0, 0.0))
    messages = [judge.profile.inside.seconds(x.output_bytes * SAMPLES) for x in judge.profile.layers]
    return time_of(to_text(schedule), [list(own) for own in cut], layers, messages).makespan


def lora(effort: Effort) -> Iterator[Line]:
    """A line for each schedule and place of the adapters.

    Held against a limit where the unaware cut matters: adapters in all blocks leave the blocks alike, and two stages a
    device balance what is frozen whatever the cut.
    """
    for devices in DEVICES[: effort.count]:
        for plan in plans(devices):
            judge, cut = plan.judge, plan.aware.cut
            before = seconds(judge, judge.schedule_of(plan.unaware), plan.unaware.cut)
            kept, after = (seconds(judge, s, cut) for s in (plan.tasks, judge.schedule_of(plan.aware)))
            gap = Certifier(plan.judge).of(plan.aware).gap(plan.aware.step_s)
            text = f"{devices} devices, {plan.name:30} {1e3 * before:6.1f} ms, aware {1e3 * after:6.1f} ms"
            text += f" ({1e3 * kept:6.1f} with all tasks; all weight gradients made {1e3 * plan.whole:6.1f} ms, "
            text += f"{plan.whole / after:.2f} times)"
            memory = f"fullest {max(plan.aware.memory_bytes) / 2**30:4.1f} GiB, gap {gap:5.1%}"
            limited = plan.aware.form.stages == devices and not plan.name.startswith("all")
            value = SPEED_UP * after / before if limited else 0.0
            yield Line(f"{text}, {before / after:.2f} times, {memory}", value, 1.0)


def emulated(effort: Effort) -> Iterator[Line]:
    """The same pairs on stage actors whose kernels are timed waits; wants a quiet machine."""
    pairs = []
    for plan in plans(EMULATED):
        pair = []
        for p in (plan.unaware, plan.aware):
            schedule = plan.judge.schedule_of(p)
            split = any(task.kind == "W" for task in schedule.tasks())
            costs = plan.judge.costs_of(p.candidate, p.cut, schedule.placement, split)
            pair.append(Turns(rehearsal(schedule, costs, Links(), 1, "wait"), plan.name))
        pairs.append(pair)
    take_turns([turns for pair in pairs for turns in pair], 1, STEPS)
    for unaware, aware in pairs:
        worst = max(abs(unaware.error), abs(aware.error))
        predicted, measured = lead(aware, unaware)
        text = (
            f"{aware.name:30} {1e3 * unaware.step_s:6.1f} ms, aware {1e3 * aware.step_s:6.1f} ms, {measured:.2f} times"
        )
        yield Line(f"{text} ({predicted:.2f} predicted), off by up to {worst:.1%}", worst, CLOSE)

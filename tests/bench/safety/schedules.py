"""Strategies for schedule files, and a check of schedules written from their definition, apart from the verifier."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

from hypothesis import strategies as st

from raypipe.errors import ScheduleError
from raypipe.schedule import SCHEDULES, Shape, generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.forms.json_form import to_json
from raypipe.schedule.forms.text import to_text
from raypipe.schedule.ir import Schedule, StageGraph
from tests.bench.safety.files import changed, torn
from tests.bench.safety.trial import expect

TASK = re.compile(r"\d+[A-Z]+[\d,]*(?:@\d+)?")
OWN = """schedule microbatches placement edges size versions recompute w_dep skip_first_B device 0: 1: device: 0F0 1F0@1
 0BW0 0F0,1 0>1 1/2 1/0 stash late grad 0 1 99999999 -1 ² " # : @ , F 0F 0FF0 0AR"""
WORDS = st.lists(st.lists(st.sampled_from(OWN.split()), max_size=5).map(" ".join), max_size=5).map("\n".join)
"""Texts of the form's own words in any order."""


@cache
def right_ones() -> tuple[Schedule, ...]:
    """Small schedules of every family."""
    result = []
    for name in SCHEDULES:
        for devices, microbatches, chunks in ((1, 2, 1), (2, 2, 1), (2, 4, 1), (4, 4, 1), (2, 4, 2)):
            try:
                result.append(generate(name, Shape(devices=devices, microbatches=microbatches, chunks=chunks)))
            except ScheduleError:
                continue
    return tuple(result)


@st.composite
def texts(draw: Any) -> str:
    """The text of a schedule with tasks removed, repeated, exchanged or renamed, or torn."""
    text = to_text(draw(st.sampled_from(right_ones())))
    for _ in range(draw(st.integers(0, 3))):
        tasks = list(TASK.finditer(text))
        if not tasks:
            break
        one, other = draw(st.sampled_from(tasks)), draw(st.sampled_from(tasks))
        kind = draw(st.sampled_from(["remove", "repeat", "exchange", "number", "kind"]))
        first, second = sorted((one, other), key=lambda m: m.start())
        if kind == "exchange" and first.end() <= second.start():
            between = text[first.end() : second.start()]
            text = text[: first.start()] + second[0] + between + first[0] + text[second.end() :]
            continue
        new = {
            "remove": "", "repeat": f"{one[0]} {one[0]}", "exchange": one[0],
            "number": re.sub(r"\d+", lambda _: str(draw(st.integers(0, 5))), one[0], count=draw(st.integers(1, 2))),
            "kind": re.sub("[A-Z]+", draw(st.sampled_from(["F", "B", "W", "BW", "R", "AR", "U", "AG", "RS"])), one[0]),
        }[kind]  # fmt: skip
        text = text[: one.start()] + new + text[one.end() :]
    return draw(torn(text)) if draw(st.booleans()) else text


@cache
def right_documents() -> tuple[str, ...]:
    """The same schedules in their JSON form."""
    return tuple(
        json.dumps(to_json(s, CostTable.even(s.stages, comm=0.5))) for s in right_ones() if s.microbatches <= 2
    )


@st.composite
def documents(draw: Any) -> str:
    """The JSON of a schedule with values changed, removed or added, or torn."""
    text = draw(st.sampled_from(right_documents()))
    if draw(st.booleans()):
        text = json.dumps(draw(changed(json.loads(text))))
    return draw(torn(text)) if draw(st.integers(0, 2)) == 0 else text


def check(schedule: Schedule) -> None:
    """Check a schedule that the verifier has taken: run it, one task at a time, by what each task needs.

    Raises:
        SilentError: it is not a complete step, or it cannot run.
    """
    stages, count = schedule.stages, schedule.microbatches
    expect(stages >= 1 and count >= 1, "an empty step")
    expect(all(0 <= d < schedule.devices for row in schedule.placement for d in row), "a device that does not exist")
    tasks = [(d, t) for d, order in enumerate(schedule.orders) for t in order]
    for d, t in tasks:
        expect(0 <= t.stage < stages and 0 <= t.replica < schedule.replicas, f"{t} names nothing")
        expect(schedule.placement[t.replica][t.stage] == d, f"{t} is on another device")
        expect(all(0 <= mb < count for mb in t.mbs), f"{t} has a micro-batch that does not exist")
    reached: set[int] = set()  # by a gradient: a stage up to it is trained
    behind = [{a for a, b in schedule.graph.edges if b == stage} for stage in range(stages)]
    for stage in range(stages):
        frozen = stage in schedule.rules.frozen
        skips = schedule.rules.skip_first_b and not behind[stage] & reached
        if not frozen or behind[stage] & reached:
            reached.add(stage)
        wanted = [] if stage not in reached else [["B"]] if frozen else [["BW"], ["B", "W"]]
        for mb in range(count):
            own = [t.kind for _, t in tasks if t.stage == stage and mb in t.mbs]
            grads = sorted(k for k in own if k in ("B", "W", "BW"))
            expect(own.count("F") == 1, f"stage {stage} runs the forward of {mb} {own.count('F')} times")
            expect(
                grads in (wanted or [[]]) or (skips and not frozen and grads == ["W"]),
                f"{stage} has the gradients {grads} of {mb}",
            )
    if schedule.graph == StageGraph.chain(stages):
        _check_runs(schedule)


def _check_runs(schedule: Schedule) -> None:
    done: set[tuple[str, int, int]] = set()
    at = [0] * schedule.devices
    last = schedule.stages - 1
    first = next((s for s in range(schedule.stages) if s not in schedule.rules.frozen), 0)

    def ready(t: Any) -> bool:
        if not t.mbs or t.kind not in ("F", "B", "W", "BW"):
            return True
        if t.kind == "F":
            return t.stage == 0 or all(("F", t.stage - 1, mb) in done for mb in t.mbs)
        if any(("F", t.stage, mb) not in done for mb in t.mbs):
            return False
        if t.kind == "W" and schedule.rules.w_dep == "B" and not (schedule.rules.skip_first_b and t.stage == first):
            return all(("B", t.stage, mb) in done for mb in t.mbs)
        return t.stage == last or all(("B", t.stage + 1, mb) in done for mb in t.mbs)

    while True:
        moved = False
        for d, order in enumerate(schedule.orders):
            while at[d] < len(order) and ready(order[at[d]]):
                t = order[at[d]]
                done |= {
                    (kind, t.stage, mb) for mb in t.mbs for kind in (("B",) if t.kind in ("B", "BW") else (t.kind,))
                }
                at[d] += 1
                moved = True
        if not moved:
            break
    stuck = [str(order[n]) for order, n in zip(schedule.orders, at, strict=True) if n < len(order)]
    expect(not stuck, f"it cannot run: {stuck} wait for ever")

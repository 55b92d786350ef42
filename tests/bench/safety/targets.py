"""All kinds of input that are tried: what makes them, and what reads them and checks what was taken."""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from hypothesis import strategies as st

from raypipe.cli import run
from raypipe.cost.profile import Profile, load_profile
from raypipe.errors import RequestError
from raypipe.graph.placement.problem import load_problem
from raypipe.job import load_cluster, load_job
from raypipe.job.spec import JobSpec, job_from
from raypipe.launch.plans import given_plan, make_plan
from raypipe.partition.job_costs import job_profile
from raypipe.plan.hybrid import compare, load_epochs
from raypipe.schedule import SCHEDULES
from raypipe.schedule.costs import CostTable
from raypipe.schedule.forms.json_form import from_json, to_json
from raypipe.schedule.forms.json_form import load as load_schedule
from raypipe.schedule.forms.text import from_text, to_text
from raypipe.schedule.verify import verify
from raypipe.simulate.engine import simulate
from raypipe.tensor.table import load_table
from tests.bench.safety import checkpoints, runs, schedules
from tests.bench.safety.files import (
    EPOCHS,
    FIXED,
    GRAPH,
    HARDWARE,
    OVERRIDES,
    QUICK,
    ROOT,
    changed,
    jobs,
    right_cluster,
    right_job,
    torn,
    values,
)  # fmt: skip
from tests.bench.safety.trial import expect

YAML = "ab:&*[]{}<>-!|#'\"\n ,1e.?%@`~\t"
"""What a text is YAML by."""


class Target(NamedTuple):
    """A kind of input."""

    strategy: st.SearchStrategy[Any]
    read: Callable[[Any], None]
    share: int
    """Its part of all inputs, beside the other targets' parts."""


def targets(folder: Path) -> dict[str, Target]:
    """Every kind of input by name; ``folder`` is for the files that they are read from."""
    job = load_job(QUICK, FIXED)
    plan = json.loads(make_plan(job).text())
    profile = job_profile(job, load_cluster(ROOT / "cluster" / "devices" / "a100.yaml")).model_dump(mode="json")
    table = yaml.safe_load((ROOT / "raypipe" / "tensor" / "tables" / "gpt2.yaml").read_text())
    real = checkpoints.write(folder / "real")
    right = yaml.safe_dump(right_job())

    def write(name: str, content: object) -> Path:
        path = folder / name
        text = content if isinstance(content, str) else json.dumps(content)
        path.write_bytes(text.encode(errors="surrogatepass"))
        return path

    def mixed(data: Any) -> st.SearchStrategy[Any]:
        return st.one_of(st.just(data), changed(data), changed(data), torn(json.dumps(data)), values)

    def read_job(data: Any) -> None:
        check_job(job_from(data), data)

    def read_overrides(given: list[str]) -> None:
        check_job(load_job(QUICK, [*FIXED, *given]), {})

    def read_yaml(text: str) -> None:
        check_job(load_job(write("job.yaml", text)), {})

    def read_cluster(data: Any) -> None:
        result = load_cluster(write("cluster.yaml", data))
        expect(1 <= result.devices <= 100_000, f"{result.devices} devices")
        made = job_profile(job, result)
        expect(all(map(math.isfinite, numbers(made.model_dump()))), "costs that are not finite")

    def read_profile(data: Any) -> None:
        result: Profile = load_profile(write("profile.json", data))
        expect(all(map(math.isfinite, numbers(result.model_dump()))), "numbers that are not finite")
        expect(load_profile(write("profile.json", result.model_dump_json())) == result, "it reads as another one")

    def read_plan(data: Any) -> None:
        result = given_plan(job, write("plan.json", data), {}, lambda _: None)
        check_job(result.job, {})
        expect(
            [i for part in result.plan.cut for i in part] == list(range(6)), f"the cut {result.plan.cut} of 6 layers"
        )
        expect(all(result.plan.cut), "a stage without layers")
        one = result.schedule
        expect(one.devices == result.job.parallel.stages * result.job.parallel.replicas, "another number of devices")
        expect(one.microbatches * result.job.parallel.microbatch * one.size == job.train.batch, "another mini-batch")
        schedules.check(one)

    def read_text(text: str) -> None:
        result, _ = load_schedule(write("schedule.txt", text))
        verify(result)
        schedules.check(result)
        simulate(result, CostTable.even(result.stages))
        expect(from_text(to_text(result)) == result, "it reads as another one")

    def read_document(text: str) -> None:
        result, costs = load_schedule(write("schedule.json", text))
        verify(result)
        schedules.check(result)
        made = simulate(result, costs or CostTable.even(result.stages))
        expect(math.isfinite(made.makespan), f"a step of {made.makespan}")

    def read_epochs(data: Any) -> None:
        made = compare(load_epochs(write("epochs.yaml", data)))
        result = [value for row in made.rows for value in (row.dp, *row.hybrid.values(), row.gain) if value is not None]
        expect(all(map(math.isfinite, result)), "a speed-up that is not finite")

    def read_problem(pair: tuple[Any, Any]) -> None:
        graph, machine = load_problem(write("graph.json", pair[0]), write("hardware.json", pair[1]))
        expect(set(graph.order) == {op.name for op in graph.operations}, "an order that lacks operations")
        result = [link.seconds(size) for _, _, link in machine.links for _, _, size in graph.edges]
        expect(all(0 <= t < math.inf for t in result), "a transfer without an end")

    def read_manifest(body: Any) -> None:
        checkpoints.try_manifest(real, folder / "copy", body)

    def read_run(files: dict[str, str]) -> None:
        runs.try_directory(folder / "run", files)

    def read_table(data: Any) -> None:
        load_table(write("table.yaml", data))

    def read_options(argv: list[str]) -> None:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = run(["schedule", *argv, "--json"])
        if status == 2:
            expect("\n  fix: " in err.getvalue() and not out.getvalue(), f"no clear message: {err.getvalue()[:200]}")
            raise RequestError("options", "refused", "")
        result = json.loads(out.getvalue())
        expect(status == 0 and math.isfinite(result["makespan"]), f"status {status}")
        schedule, costs = from_json(result)
        verify(schedule)
        expect(from_json(to_json(schedule, costs)) == (schedule, costs), "it reads as another one")
        expect(
            0 <= result["bubble_ratio"] <= 1 and result["lower_bound"] <= result["makespan"] * (1 + 1e-9),
            "impossible times",
        )

    return {
        "job": Target(jobs, read_job, 4),
        "overrides": Target(OVERRIDES, read_overrides, 2),
        "job text": Target(torn(right) | st.text(YAML, max_size=60), read_yaml, 2),
        "plan": Target(mixed(plan), read_plan, 3),
        "schedule text": Target(schedules.texts() | schedules.WORDS | st.text(), read_text, 4),
        "schedule JSON": Target(schedules.documents() | values.map(json.dumps), read_document, 4),
        "manifest": Target(checkpoints.manifests(real), read_manifest, 3),
        "profile": Target(mixed(profile), read_profile, 1),
        "cluster": Target(mixed(right_cluster()), read_cluster, 2),
        "epochs": Target(mixed(EPOCHS), read_epochs, 1),
        "placement": Target(st.tuples(mixed(GRAPH), mixed(HARDWARE)), read_problem, 1),
        "tensor table": Target(mixed(table), read_table, 1),
        "run directory": Target(runs.directories(), read_run, 2),
        "options": Target(options(), read_options, 1),
    }


@st.composite
def options(draw: Any) -> list[str]:
    """The words of a ``raypipe schedule``."""
    plain = ["1", "2", "4", "8", "0", "-1", "²", "1e308", "nan", "inf", "1,2", "x", "0.5", "1e12"]
    number = st.sampled_from([*plain, "", "9" * 30, "9" * 5000])
    family = draw(st.sampled_from([*(name for name in SCHEDULES if name != "auto"), "zzz"]))
    own = [option.replace("_", "-") for option in SCHEDULES[family].options] if family in SCHEDULES else []
    names = ("devices", "microbatches", "chunks", "unit", "pipelines", "memory-limit", "forward", "input-grad",
             "weight-grad", "recompute", "comm", "zero", "gather", "ahead", "load", *3 * own)  # fmt: skip
    words = [family]
    for name in draw(st.lists(st.sampled_from(names), max_size=3, unique=True)):
        words += [f"--{name}", draw(st.sampled_from(["direct", "doubling", "x"]) if name == "concat" else number)]
    return words


def numbers(data: object) -> list[float]:
    """All numbers in nested data."""
    if isinstance(data, Mapping):
        return [n for value in data.values() for n in numbers(value)]
    if isinstance(data, list | tuple):
        return [n for value in data for n in numbers(value)]
    return [data] if isinstance(data, float) else []


def check_job(spec: JobSpec, given: Any) -> None:
    """Check a job that was taken: arithmetic between its keys, and no value taken for another type's.

    Raises:
        SilentError: it cannot run as it says.
    """
    t, p = spec.train, spec.parallel
    result = numbers(spec.model_dump())
    expect(all(map(math.isfinite, result)), "a number that is not finite")
    expect(t.batch % (p.microbatch * p.replicas) == 0, f"{t.batch} sequences in micro-batches of {p.microbatch}")
    expect(p.stages * p.replicas * p.tensor <= 100_000, "more devices than anybody has")
    expect(1.0 <= t.message_timeout_s <= 604_800, f"a timeout of {t.message_timeout_s} s")
    hidden, heads = getattr(spec.model, "hidden", 1), getattr(spec.model, "heads", 1)
    expect(hidden % heads == 0 and getattr(spec.model, "layers", 1) <= 4096, "an impossible model")
    kept = spec.model_dump(mode="json")
    for section in ("model", "data", "train"):
        for key, value in (given.get(section) or {}).items() if isinstance(given, dict) else ():
            other = kept[section].get(key)
            same = other == value or (key in ("hf", "loss") and isinstance(value, str))
            typed = isinstance(value, bool) == isinstance(other, bool) and isinstance(value, str) == isinstance(
                other, str
            )
            expect(same and typed, f"{section}.{key}: {value!r} was taken for {other!r}")

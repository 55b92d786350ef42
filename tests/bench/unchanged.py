"""Are programs and plans still the same, byte for byte? For refactorings: record before, compare after.

    python -m tests.bench.unchanged --write before.json      # on the old code
    python -m tests.bench.unchanged --against before.json    # on the new code; exit status 1 if anything differs

What is recorded goes through the command line, except the programs of the devices, which no command prints. Orders
that are searched within a time limit are left out: they depend on how fast the machine is.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from raypipe.cli import run
from raypipe.schedule.forms.json_form import from_json
from raypipe.schedule.lowering.programs import Program, step_programs

ROOT = Path(__file__).parent.parent.parent
SHAPES = [(2, 4), (4, 8), (4, 16)]
"""Devices and micro-batches."""
COSTS = ["--forward", "3", "--input-grad", "4", "--weight-grad", "2", "--comm", "0.5"]
OPTIONS: dict[str, list[list[str]]] = {
    "interleaved-1f1b": [["--chunks", "2"]],
    "bfs": [["--chunks", "2"]],
    "zeropp": [["--chunks", "2", "--unit", "4"], ["--chunks", "2", "--unit", "2"]],
    "chimera": [[], ["--concat", "doubling"], ["--concat", "halving"]],
    "modulo": [["--chunks", "2"]],
}
NAMES = [
    "gpipe", "1f1b", "interleaved-1f1b", "bfs", "chimera", "gems", "pipedream", "pipedream-2bw", "zb-h1", "zb-h2",
    "zb-v", "zeropp", "early-recompute", "shifted-critical-path", "model-parallel", "fast-forward", "modulo",
]  # fmt: skip
JOBS = ["bert-48", "gpt2-1.3b", "gpt2-xl", "quickstart"]
CLUSTERS = ["a100", "piz-daint", "rtx3090", "v100"]
DEVICES = [4, 16]
UNBOUNDED_S = 600
"""Budget of a plan: more than any takes, so that it does not depend on the machine."""
CUT = ["--set", "parallel.auto=true"]


def call(*words: str) -> str:
    """Standard output of a ``raypipe`` command.

    Raises:
        RuntimeError: it ended with another status than 0.
    """
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        status = run(list(words))
    if status:
        raise RuntimeError(f"raypipe {' '.join(words)}: {errors.getvalue().strip()}")
    return out.getvalue()


def steady(value: Any) -> Any:
    """Without the fields that say how long something took."""
    if isinstance(value, dict):
        return {k: steady(v) for k, v in value.items() if k not in ("seconds", "search_s", "first_plan_s")}
    return [steady(v) for v in value] if isinstance(value, list) else value


def program_text(program: Program) -> str:
    """One device's program, field by field, by position where classes may be renamed."""
    rows = [f"{a[0]} <- {[tuple(m) for m in a[1]]} -> {[tuple(m) for m in a[2]]}" for a in program.actions]
    arrivals = {k: [tuple(m) for m in v] for k, v in sorted(program.arrivals.items())}
    return "\n".join([*rows, repr(arrivals), repr(sorted(program.recomputed)), repr(sorted(program.weights_first))])


def schedule_case(name: str, devices: int, microbatches: int, options: list[str]) -> Callable[[], str]:
    """A schedule, its times and its programs."""

    def one() -> str:
        shape = ["--devices", str(devices), "--microbatches", str(microbatches)]
        text = call("schedule", name, *shape, *COSTS, *options, "--json").strip()
        schedule, _ = from_json(json.loads(text))
        programs = [
            f"{part}\n" + "\n".join(map(program_text, rows)) for part, rows in sorted(step_programs(schedule).items())
        ]
        return text + "\n" + "\n".join(programs)

    return one


def plan_case(job: str, cluster: str, devices: int) -> Callable[[], str]:
    """The planner's ranking for a job on a described cluster."""

    def one() -> str:
        words = ["autoconfigure", str(ROOT / "jobs" / f"{job}.yaml"), "--cluster", str(cluster_file(cluster))]
        words += ["--devices", str(devices), "--search", "0", "--budget", str(UNBOUNDED_S)]
        text = call(*words, "--json", *CUT)
        return json.dumps(steady(json.loads(text)), sort_keys=True)

    return one


def partition_case(job: str, cluster: str, stages: int) -> Callable[[], str]:
    """How a model is cut."""

    def one() -> str:
        words = ["partition", str(ROOT / "jobs" / f"{job}.yaml"), "--cluster", str(cluster_file(cluster))]
        return json.dumps(steady(json.loads(call(*words, "--stages", str(stages), "--json"))), sort_keys=True)

    return one


def cluster_file(name: str) -> Path:
    """A described cluster, wherever such files are kept."""
    return next((ROOT / "cluster").rglob(f"{name}.yaml"))


def cases() -> Iterator[tuple[str, Callable[[], str]]]:
    """Every case by name."""
    for name, (devices, microbatches) in itertools.product(NAMES, SHAPES):
        for options in OPTIONS.get(name, [[]]):
            yield (
                " ".join([name, f"{devices}x{microbatches}", *options]),
                schedule_case(name, devices, microbatches, options),
            )
    for job, cluster, devices in itertools.product(JOBS, CLUSTERS, DEVICES):
        yield f"plan {job} {cluster} {devices}", plan_case(job, cluster, devices)
    for job, stages in itertools.product(("bert-48", "gpt2-xl", "quickstart"), (2, 4)):
        yield f"partition {job} {stages}", partition_case(job, "a100", stages)


def record() -> dict[str, str]:
    """Case -> what it gave, or how it was refused."""
    result = {}
    for name, case in cases():
        try:
            text = case()
        except RuntimeError as error:
            text = f"refused: {error}".replace(str(ROOT), "")
        result[name] = text
        print(f"{hashlib.sha256(text.encode()).hexdigest()[:12]}  {name}", file=sys.stderr)
    return result


def compare(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """The cases that differ, each with what is told of its plan."""
    rows = []
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name, "absent"), after.get(name, "absent")
        if old != new:
            rows.append(f"{name}: {_told(old)} -> {_told(new)}")
    return rows


def _told(text: str) -> str:
    try:
        best = json.loads(text)["candidates"][0]
    except (ValueError, KeyError, TypeError):
        return text[:60]
    keys = ("schedule", "stages", "replicas", "microbatch", "predicted_step_s")
    return " ".join(f"{best[key]:.6g}" if isinstance(best[key], float) else str(best[key]) for key in keys)


def command() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--write", type=Path, metavar="FILE")
    which.add_argument("--against", type=Path, metavar="FILE")
    options = parser.parse_args()
    result = record()
    if options.write is not None:
        options.write.write_text(json.dumps(result, indent=0), encoding="utf-8")
        return
    rows = compare(json.loads(options.against.read_text(encoding="utf-8")), result)
    print(f"{len(result)} cases, {len(rows)} differ", *rows, sep="\n")
    sys.exit(bool(rows))


if __name__ == "__main__":
    command()

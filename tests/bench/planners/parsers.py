"""Plans written for other trainers, read by raypipe and by the trainers' own parsers.

    python -m tests.bench.planners.parsers [--python TRAINER=PYTHON ...] [--only WORDS]

Each of 33 plans is written for each trainer; raypipe reads it back to the same plan, and the trainer's own parser, run
by PYTHON where that is given, finds the same degrees, batch, micro-batch and sharding. What a trainer cannot express is
told with its predicted cost. Megatron-LM's arguments are no package: PYTHON finds a checkout by its ``PYTHONPATH``.
Exit status 1 if a plan is refused by a parser or read as another one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from raypipe.errors import RequestError
from raypipe.job import job_from, load_cluster, load_job
from raypipe.job.spec import JobSpec
from raypipe.partition.job_costs import SharedProfiles, job_profile, shared_profiles
from raypipe.plan.choose import choose
from raypipe.plan.emit.layout import TrainerLayout
from raypipe.plan.emit.trainers import TRAINERS, Costs, emit, read
from raypipe.plan.watch import Watch
from raypipe.search.budget import Budget

SEARCH_S, BUDGET_S = 1.0, 6.0
"""Seconds for a plan, and of its search for orders."""


class Case(NamedTuple):
    model: str
    cluster: str
    devices: int
    parallel: dict[str, Any] = {}  # noqa: RUF012
    """Keys that the plan is to have."""

    @property
    def name(self) -> str:
        wishes = ", ".join(f"{key}: {value}" for key, value in self.parallel.items())
        return f"{self.model} on {self.devices} {self.cluster}" + (f" with {wishes}" if wishes else "")


SIZES = {"1.3B": (24, 2048, 2048, 64), "7B": (32, 4096, 4096, 64), "13B": (40, 5120, 4096, 64)}
"""Blocks, width, sequence and batch of GPTs."""
CASES = (
    Case("1.3B", "h100", 1),
    Case("1.3B", "h100", 8),
    Case("1.3B", "a100", 8, {"shard": "zero1", "stages": 1}),
    Case("1.3B", "a100", 8, {"shard": "zero2", "stages": 1}),
    Case("7B", "h100", 16, {"shard": "zero3", "shard_replicas": 8, "stages": 1}),
    Case("1.3B", "a100", 8, {"stages": 4}),
    Case("1.3B", "a100", 8, {"stages": 4, "schedule": "1f1b", "shard": "none"}),
    Case("1.3B", "a100", 8, {"stages": 2, "tensor": 2}),
    Case("1.3B", "a100", 16, {"schedule": "interleaved-1f1b", "stages": 4}),
    Case("1.3B", "a100", 16, {"schedule": "zb-h1", "stages": 4}),
    Case("1.3B", "a100", 16, {"schedule": "zb-v", "stages": 4}),
    Case("1.3B", "a100", 16, {"schedule": "chimera", "stages": 4}),
    Case("1.3B", "a100", 8, {"schedule": "gpipe", "stages": 4}),
    Case("1.3B", "a100", 8, {"schedule": "bfs", "stages": 4}),
    Case("1.3B", "a100", 4, {"schedule": "auto", "stages": 4}),
    Case("13B", "a100", 16, {"recompute": "full", "stages": 4}),
    Case("13B", "a100", 32),
    Case("13B", "h100", 32, {"innermost": "stages", "stages": 8, "shard": "zero1"}),
    Case("13B", "a100", 32, {"tensor": 8}),
    Case("jobs/llama3-8b.yaml", "h100", 8),
    Case("1.3B", "a100", 8, {"stages": 2, "tensor": 2, "shard": "zero1"}),
    Case("1.3B", "a100", 8, {"stages": 1, "tensor": 2, "shard": "zero3"}),
    Case("7B", "h100", 16, {"stages": 2, "tensor": 2, "shard": "zero2"}),
    Case("13B", "a100", 32, {"stages": 2, "tensor": 4, "shard": "zero1", "schedule": "interleaved-1f1b"}),
    Case("jobs/llama3-8b.yaml", "h100", 16, {"stages": 1, "tensor": 4, "shard": "zero3", "shard_replicas": 2}),
    Case("jobs/llama3-8b.yaml", "h100", 8, {"stages": 1, "context": 2, "shard": "zero3"}),
    Case("jobs/llama3-8b.yaml", "h100", 16, {"stages": 2, "context": 2, "shard": "zero1"}),
    Case("jobs/qwen3-30b-a3b.yaml", "h100", 8, {"experts": 8}),
    Case("jobs/qwen3-30b-a3b.yaml", "h100", 32, {"experts": 8, "stages": 1, "shard": "zero3", "shard_replicas": 16}),
    Case("jobs/qwen3-30b-a3b.yaml", "h100", 32, {"experts": 8, "stages": 2, "shard": "zero1"}),
    Case("jobs/qwen3-30b-a3b.yaml", "h100", 32, {"experts": 4, "stages": 4, "schedule": "1f1b", "shard": "zero2"}),
    Case("jobs/qwen3-30b-a3b.yaml", "h100", 64, {"experts": 8, "stages": 4, "schedule": "interleaved-1f1b"}),
    Case("jobs/deepseek-v3.yaml", "h100", 1024, {"experts": 256, "stages": 1}),
)


def job_of(case: Case) -> JobSpec:
    parallel = {"auto": True, **case.parallel}
    if case.model not in SIZES:
        return load_job(Path(case.model), [f"parallel.{key}={value}" for key, value in case.parallel.items()])
    layers, hidden, sequence, batch = SIZES[case.model]
    return job_from({
        "name": "emitted", "data": {"type": "bytes", "path": "stdlib"}, "parallel": parallel,
        "model": {"layers": layers, "hidden": hidden, "heads": hidden // 128, "sequence": sequence,
                  "vocabulary": 32_000, "tie_embeddings": False},
        "train": {"steps": 100, "batch": batch, "dtype": "bfloat16-true", "clip": 1.0},
    })  # fmt: skip


class Written(NamedTuple):
    case: Case
    trainer: str
    file: Path
    layout: TrainerLayout


def written(case: Case, folder: Path) -> Iterator[Written | str]:
    """Plan a case and write it for each trainer: the files, or why one cannot express it, or what is wrong."""
    job, cluster = job_of(case), load_cluster(f"cluster/devices/{case.cluster}.yaml").resized(case.devices)
    profile, shared = job_profile(job, cluster), shared_profiles(job, cluster)
    plan = choose(job, profile, top=1, search_s=SEARCH_S, shared=shared, watch=Watch(Budget(BUDGET_S))).plan
    costs, p = Costs(job, profile, shared, SharedProfiles(job, cluster).of), plan.parallel
    shape = f"{p.schedule} {p.stages} x {p.replicas} x {p.tensor}, micro-batches of {p.microbatch}, shard {p.shard}"
    print(f"{case.name}: {shape}")
    for trainer in TRAINERS:
        file = folder / f"{CASES.index(case)}.{trainer}"
        try:
            result = emit(trainer, plan, costs, file)
        except RequestError as error:
            print(f"  {trainer}: not expressible: {error.why}")
            continue
        file.write_text(result.text)
        missing = [line for line in result.lost if line not in result.text]
        if missing:
            yield f"{trainer}: the file does not say: {missing[0]}"
        if read(file, costs, case.devices)[1].plan() != result.layout.plan():
            yield f"{trainer}: read back to another plan"
        print(f"  {trainer}: {'; '.join(result.lost) or 'nothing is lost'}", flush=True)
        yield Written(case, trainer, file, result.layout)


def parsed(trainer: str, python: str, files: list[Written]) -> Iterator[str]:
    """Yield what the trainer's own parser refuses, or reads otherwise."""
    script = Path(__file__).with_name("peer_parsers.py")
    command = [python, "-W", "ignore", str(script), trainer, *(str(one.file) for one in files)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = run.stdout.splitlines()
    if len(lines) != len(files):
        yield f"{trainer}: {python} ended early: {run.stderr[-500:]}"
        return
    for one, line in zip(files, lines, strict=True):
        result, p = json.loads(line), one.layout.parallel
        chunks = p.chunks if one.layout.pipelined else 1
        keys = ("stages", "replicas", "tensor", "microbatch", "experts", "context", "shard")
        wanted = {**{key: getattr(p, key) for key in keys}, "batch": one.layout.batch, "chunks": chunks}
        if result != wanted:
            yield f"{trainer}: {one.case.name}: {result.get('error', f'{result}, not {wanted}')}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", default=[], metavar="TRAINER=PYTHON")
    parser.add_argument("--only", default="", help="cases whose name has these words")
    args = parser.parse_args()
    pythons = dict(one.split("=", 1) for one in args.python)
    if unknown := set(pythons) - set(TRAINERS):
        parser.error(f"unknown trainer {unknown.pop()}; there are {', '.join(TRAINERS)}")
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        files: list[Written] = []
        for case in (c for c in CASES if args.only in c.name):
            for one in written(case, Path(folder)):
                if isinstance(one, str):
                    faults.append(f"{case.name}: {one}")
                else:
                    files.append(one)
        for trainer in TRAINERS:
            own = [one for one in files if one.trainer == trainer]
            faults += parsed(trainer, pythons[trainer], own) if trainer in pythons and own else []
            how = "its own parser was not asked (--python)"
            if trainer in pythons:
                how = "read by its own parser" if own else "nothing to read"
            print(f"{trainer}: {len(own)} of the plans written, {how}")
    print(*faults, f"{len(faults)} faults", sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

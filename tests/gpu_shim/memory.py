"""The memory that a plan counts, against what its run takes of the shim's GPUs: ``python -m tests.gpu_shim.memory``.

A profile is measured over the shim, the planner makes each configuration's plan on it, and the plan's run has torch's
real allocator take from the shim's GPUs, which count. Workers are those of a run, in processes of their own; pipes
stand in for Ray, which has no part in a GPU's memory. A row has every device of a configuration.

The model is large enough that what is reserved beside tensors (a context, communicators, the last segments of the
allocator's pools: 162 to 170 MiB) is a small part of any device, so that 5 % says something about tensors. Nobody
writes to the memory, so it takes none of the host's. Kernels take no time, so that a count does not depend on the
machine: with slow ones the host is ahead, and messages and what is freed on another stream are there for longer.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import multiprocessing
import os
import struct
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from tests.gpu_shim.shim import ROOT, said_by
from tests.gpu_shim.whole_run import MOST_GPUS
from tests.job_files import minimal_job, write_text

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from raypipe.cost.profile import Profile
    from raypipe.job.spec import JobSpec
    from raypipe.plan.choose import Decision
    from raypipe.plan.plan import Plan
    from raypipe.runtime.compiled.program import Compiled
    from raypipe.runtime.worker.worker_group import WorkerGroup

GPUS = 4
NEAR = 0.05
"""Share of the planned bytes by which a device may miss them."""
MODEL = {"type": "gpt", "layers": 16, "hidden": 1024, "heads": 16, "sequence": 1024, "vocabulary": 256, "dropout": 0.0,
         "tie_embeddings": True}  # fmt: skip
MICROBATCH, STEPS = 4, 3
SETTINGS: dict[str, object] = {"devices": GPUS, "memory_mb": 128 << 10}


LIMIT_S = 1800.0
"""For all configurations."""


@dataclass(frozen=True)
class Case:
    """A configuration: what is given to the planner, and of the job beside it."""

    parallel: dict[str, Any]
    train: dict[str, Any] = field(default_factory=dict)


GRAPH = "graph of a step"
LINE = {"stages": 4, "replicas": 1}
COMPILED = {"compile": "inductor", "compile_first": True}
COPIES = {"schedule": "1f1b", "stages": 2, "replicas": 2}
CASES = {
    "1f1b": Case({"schedule": "1f1b", **LINE}),
    "gpipe": Case({"schedule": "gpipe", **LINE}),
    "interleaved": Case({"schedule": "interleaved-1f1b", "chunks": 2, **LINE}),
    "zb-h1": Case({"schedule": "zb-h1", **LINE}),
    "zb-v": Case({"schedule": "zb-v", **LINE}, {"clip": None}),
    "chimera": Case({"schedule": "chimera", "pipelines": 2, **LINE}),
    "slices": Case({"schedule": "1f1b", "slices": 2, **LINE}),
    "two copies": Case({**COPIES, "shard": "none"}),
    "zero1": Case({**COPIES, "shard": "zero1"}),
    "zero3": Case({**COPIES, "shard": "zero3"}),
    "checkpointing": Case({"schedule": "1f1b", "recompute": "full", **LINE}),
    "bfloat16": Case({"schedule": "1f1b", **LINE}, {"dtype": "bfloat16"}),
    "tensor 2": Case({"schedule": "1f1b", "stages": 2, "replicas": 1, "tensor": 2, "sequence_parallel": False}),
    "positions": Case({"schedule": "1f1b", "stages": 2, "replicas": 1, "tensor": 2, "sequence_parallel": True}),
    "shard beside tensor": Case({"schedule": "1f1b", "stages": 1, "replicas": 2, "tensor": 2, "shard": "zero2"}),
    "compiled": Case({"schedule": "1f1b", **LINE}, COMPILED),
    "compiled zb-h1": Case({"schedule": "zb-h1", **LINE}, COMPILED),
    "graphs of tasks": Case({"schedule": "1f1b", **LINE}, COMPILED | {"cuda_graphs": "tasks"}),
    "graphs of zb-v": Case({"schedule": "zb-v", **LINE}, COMPILED | {"cuda_graphs": "tasks", "clip": None}),
    GRAPH: Case({"schedule": "1f1b", "stages": 1, "replicas": 1}, {"cuda_graphs": "auto"}),
}
"""zb-v without clipping: whether a device has the copies by which an early update is undone, which the plan counts, at
its fullest moment depends on when the norm comes."""


class Actor:
    """A worker in a process of its own, called as Ray's actors are: ``actor.name.remote(...)``."""

    def __init__(self, rank: int, profiles: bool) -> None:
        context = multiprocessing.get_context("forkserver")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(rank, profiles, other), daemon=True)
        self.process.start()
        other.close()
        self.waiting: list[Ref] = []

    def __getattr__(self, name: str) -> Any:
        def remote(*args: object) -> Ref:
            self.pipe.send((name, args))
            self.waiting.append(Ref(self))
            return self.waiting[-1]

        return mock.Mock(remote=remote)

    def receive(self) -> None:
        """Wait for the oldest call under way."""
        works, result = self.pipe.recv()
        if not works:
            raise RuntimeError(result)
        self.waiting.pop(0).result.append(result)


class Ref:
    """What a call will return."""

    def __init__(self, actor: Actor) -> None:
        self.actor = actor
        self.result: list[Any] = []


def get(refs: Any, timeout: float | None = None) -> Any:
    """In place of ``ray.get``."""
    if not isinstance(refs, Ref):
        return [get(one) for one in refs]
    while not refs.result:
        refs.actor.receive()
    return refs.result[0]


def serve(rank: int, profiles: bool, pipe: Connection) -> None:
    """Be the worker of a GPU: call its methods in the order in which they are asked for."""
    from raypipe.profiling.profiling_worker import StageProfiler
    from raypipe.runtime.compiled.compiler import InProcess
    from raypipe.runtime.compiled.needs import Needs
    from raypipe.runtime.setup import communicators
    from raypipe.runtime.worker.compilation import Compilation
    from raypipe.runtime.worker.worker import StageWorker

    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    communicators.own_address = lambda: "127.0.0.1"
    communicators.own_node = lambda: communicators.Node("node", "127.0.0.1")
    worker = (StageProfiler if profiles else StageWorker)(rank, f"device {rank}")
    in_process = mock.patch(
        "raypipe.runtime.worker.compilation.StoredStages",
        lambda setup, executor: InProcess(executor, Needs.of_run(setup, executor), plainly),
    )
    profiled = mock.patch.object(InProcess, "of_run", lambda *at: InProcess(at[1], Needs.of_run(*at), plainly))
    # What tensor ranks tell one another before a swap has no values here.
    swap = mock.patch.object(Compilation, "swap", lambda self, step: self._swap_in() or [])
    with contextlib.suppress(EOFError), in_process, profiled, swap:
        while True:
            name, args = pipe.recv()
            try:
                pipe.send((True, getattr(worker, name)(*args)))
            except Exception:
                pipe.send((False, traceback.format_exc()))


def plainly(graph: GraphModule, fake: object, backward: bool) -> Compiled:
    """Run a piece of a compiled stage by torch's own operations, because there is no Triton to make kernels for it."""
    from torch.fx import Interpreter

    return lambda values: Interpreter(graph).boxed_run(values)


@contextlib.contextmanager
def group_of(count: int, profiles: bool = False) -> Iterator[WorkerGroup]:
    """Start a worker on each of the first ``count`` GPUs, for the block."""
    from raypipe.runtime.worker.worker_group import WorkerGroup

    actors = [Actor(rank, profiles) for rank in range(count)]
    try:
        locations = get([actor.locate.remote() for actor in actors])
        yield WorkerGroup(actors, [f"device {rank}" for rank in range(count)], locations, "memory")
    finally:
        for actor in actors:
            actor.process.kill()
            actor.process.join()


def job_of(case: Case, text: Path) -> JobSpec:
    """Return the job of a configuration, whose plan is to be chosen."""
    train = {"steps": STEPS, "batch": 8 * MICROBATCH, "optimizer": "adamw", "lr": 0.001, "clip": 1.0, **case.train}
    parallel = {"auto": True, "recompute": "none", **case.parallel}
    data = {"type": "bytes", "path": str(text)}
    return minimal_job(MODEL, data, parallel, **train)


def profile_of(job: JobSpec, data: Path) -> Profile:
    """Measure a profile. Times mean nothing here: given ones make the plan the same each time."""
    from raypipe.cost.profile import LayerProfile, LinkFit, TaskTimes
    from raypipe.models import build_model
    from raypipe.profiling.effort import QUICK
    from raypipe.profiling.layer_times import LayerBench
    from raypipe.profiling.profile_job import profile_by

    def even(layer: LayerProfile) -> LayerProfile:
        s = 1e-3 if layer.name.startswith("block") else 1e-4
        times = TaskTimes(forward=s, input_grad=s, weight_grad=s, joint=2 * s, recompute=s)
        return layer.model_copy(update={"times": dict.fromkeys(layer.times, times)})

    effort = replace(QUICK, least=1, most=1, pairs=1, again=0, repeats=2)
    with group_of(GPUS, profiles=True) as workers:
        bench = LayerBench(job, build_model(job, None), workers, data, bounded=False)
        profile = profile_by(bench, [MICROBATCH], effort, lambda *_: None)
    link = LinkFit(alpha_s=1e-5, beta_s_per_byte=1e-11)
    given = {"inside": link, "between": link, "update_s_per_parameter": 0.0}
    return profile.model_copy(update={**given, "layers": tuple(map(even, profile.layers))})


def decision_of(job: JobSpec, profile: Profile) -> Decision:
    """Choose a plan. Of layers that devices divide, what is kept is computed, for a GPU described as the shim's."""
    from raypipe.job.cluster import cluster_from, load_cluster
    from raypipe.partition.job_costs import SharedProfiles, job_profile
    from raypipe.plan.choose import choose

    if job.parallel.given.get("tensor", 1) == 1:
        return choose(job, profile, GPUS, search_s=0.0)
    described = load_cluster(ROOT / "cluster/devices/h100.yaml").model_dump(exclude_unset=True)
    has, mib = profile.reserved, 1 << 20
    described["device"]["memory_gib"] = profile.memory_bytes / (1 << 30)
    described["device"]["reserved"] = {
        "context_mib": profile.base_bytes / mib,
        "channels": 1,
        "channel_mib": has.edge_bytes / mib,
        "fragmentation": has.fragmentation_bytes / profile.memory_bytes,
    }
    cluster = cluster_from({**described, "hosts": 1, "devices_per_host": GPUS})
    shared = SharedProfiles(job, cluster).get()
    return choose(job, job_profile(job, cluster), GPUS, search_s=0.0, shared=shared)


@contextlib.contextmanager
def most_taken() -> Iterator[memoryview]:
    """The shim's counts of what was taken of each GPU at most."""
    size = struct.calcsize(f"{MOST_GPUS}q")
    with (
        (Path(os.environ["GPU_SHIM_DIR"]) / "memory").open("r+b") as file,
        mmap.mmap(file.fileno(), 2 * size) as both, memoryview(both) as counts, counts[size:].cast("q") as most,
    ):  # fmt: skip
        yield most


def taken(job: JobSpec, plan: Plan, directory: Path) -> list[int]:
    """Run a plan; return what was taken of each device at most."""
    from raypipe.launch.plans import with_plan
    from raypipe.plan.online.better_order import running_of
    from raypipe.runtime.set_up_workers import setups_of

    job = with_plan(job, plan)
    running = running_of(plan, job.train.batch, clips=job.train.clip is not None)
    with most_taken() as most:  # nobody is there who takes any
        for gpu in range(MOST_GPUS):
            most[gpu] = 0
    with group_of(plan.parallel.devices) as workers:
        setups = setups_of(workers, job, running, directory, None, False, 0, False, 0)
        get(workers.call_each("setup", [(one,) for one in setups]))
        if job.train.compile != "none":
            get(workers.call("compile_stages", True))
        queued = workers.call("run_steps", 0)
        for step in range(1, STEPS):  # as a run has it: a step's result is asked for when the next one is queued
            queued += [*workers.call("run_steps", step), *workers.call("result", step - 1)]
        get([*queued, *workers.call("result", STEPS - 1)])
        with most_taken() as most:
            return most[: len(setups)].tolist()


def measure(names: Sequence[str]) -> None:
    """Print a line of JSON for each configuration."""
    from raypipe.data import prepare_data
    from raypipe.models import build_model

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["raypipe.profiling.profiling_worker", "raypipe.runtime.worker.worker"])
    folder = Path(os.environ["GPU_SHIM_DIR"])
    text, profiles = write_text(folder / "text"), dict[str, Any]()
    with mock.patch("ray.get", get):
        for name in names:
            job = job_of(CASES[name], text)
            if not profiles:
                prepare_data(job, build_model(job, None).task, folder / "data")
            measured = job.train.dtype, job.train.compile, job.train.cuda_graphs
            if measured not in profiles:
                profiles[measured] = profile_of(job_of(Case({}, CASES[name].train), text), folder / "data")
            decision = decision_of(job, profiles[measured])
            best = decision.best
            each, tensor = best.memory_bytes, best.candidate.tensor
            planned = [size for size in each for _ in range(tensor)] * best.candidate.replicas
            counted = taken(job, decision.plan, folder)
            print(json.dumps({"name": name, "planned": planned, "counted": counted}), flush=True)


def row(name: str, planned: Sequence[float], counted: Sequence[int]) -> str:
    """Return a row of the table: of each device, what is counted in MiB, and by how much it is off."""
    cells = [f"{p / 2**20:6.0f} {c / 2**20:6.0f} {c / p - 1:+6.1%}" for p, c in zip(planned, counted, strict=True)]
    return f"{name:14}" + "  |".join(cells)


if __name__ == "__main__":
    if "GPU_SHIM_DIR" in os.environ:
        measure(sys.argv[1:])
    else:
        for case in said_by("tests.gpu_shim.memory", *(sys.argv[1:] or CASES), limit_s=LIMIT_S, **SETTINGS):
            print(row(**case))

"""Runs training steps on fake GPUs and on the CPU; prints both losses and norms, and where hosts waited, as JSON.

``python -m tests.runtime.host_waits CASE``: one of ``CASES``, or ``planted``.

A sharded case has two fake GPUs, each in a process of its own and with one data-parallel copy; Gloo carries their
collectives. A wait for one of these is none of the host: as with NCCL, it is the device's stream that would wait.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from raypipe.job import GptSpec
from raypipe.job.spec import load_job
from raypipe.models import DTYPES, GptLayers, host_copies
from raypipe.models.host_copies import runs_behind
from raypipe.runtime.executor.executor import Executor
from raypipe.runtime.executor.step import StepResult
from raypipe.runtime.process import clock
from raypipe.runtime.setup.network import GLOO
from raypipe.runtime.transport.process_groups import create_groups
from raypipe.runtime.update import side_stream
from raypipe.runtime.update.gradients import TiedHolders, groups_of_ties
from raypipe.runtime.update.norm import DeviceShares, Shares
from raypipe.runtime.update.optimizer import learning_rate
from raypipe.schedule.forms.text import from_text
from raypipe.schedule.lowering.programs import Program, programs
from raypipe.schedule.passes import add_updates, place_gradient_sync, replicate, shard
from raypipe.schedule.sharding import sum_groups
from raypipe.schedule.verify import verify
from tests.runtime.fake_gpu import FakeGpu
from tests.runtime.runs.one_device import even_cut, executor_of, order

STEPS = 6
STEADY = 2
"""Steps before the host's waits count: the first ones make optimizer state and meet the sites of dropout."""
BATCH, MICROBATCH = 8, 2
COPIES = 2
"""Data-parallel copies of a sharded case."""


@dataclass
class Noise:
    """Tokens that differ from step to step."""

    model: GptSpec

    def batch(self, split: str, seed: int, step: int, batch: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(step)
        rows = torch.randint(self.model.vocabulary, (batch, self.model.sequence + 1), generator=generator)
        return {"input_ids": rows[:, :-1].contiguous(), "shift_labels": rows[:, 1:].contiguous()}

    def lengths(self, split: str, seed: int, step: int, batch: int) -> dict[str, Any]:
        return {}


CASES: dict[str, dict[str, Any]] = {
    "quickstart": {},
    "no-clipping": {"clip": None},
    "always-clipped": {"clip": 1e-3},
    "split-backward": {"split": True},
    "recomputed-in-pairs": {"recompute": True, "pairs": True},
    "side-stream": {"clip": None, "side": {}},
    "side-stream-held": {"clip": None, "side": {1: 0, 2: 1}},
    "sgd": {"optimizer": "sgd", "lr": 0.1, "clip": 0.5},
    "zero3": {"shard": 3},
    "zero3-gathered-often": {"shard": 3, "gather": "microbatch", "clip": 1e-3},
    "zero2-split-backward": {"shard": 2, "split": True, "clip": None},
}


Found = tuple[list[Any], list[Any], list[Any]]
"""What ``on_gpu`` returns."""


def side_order(stages: int, microbatches: int, held: dict[int, int]) -> str:
    """One micro-batch after the other; a stage's weight gradient runs beside the next input gradient, or is held."""
    tasks = []
    for mb in range(microbatches):
        for s in range(stages):
            tasks += [f"{late}W{mb - 1}" for late, at in held.items() if mb and at == s]
            tasks.append(f"{s}F{mb}")
        for s in reversed(range(stages)):
            tasks += [f"{s}B{mb}"] + [f"{s}W{mb}"] * (s not in held)
    tasks += [f"{late}W{microbatches - 1}" for late in held]
    return "device 0: " + " ".join(tasks)


def executor(
    device: torch.device, how: dict[str, Any], shares: Shares | DeviceShares | None = None, copy: int | None = None
) -> tuple[Executor, Program, Any]:
    """The quickstart job's model and training settings with shorter sequences, in two stages on one device.

    ``shares``: of the norm; None: nobody else has any, and as in training a GPU keeps its own on the device. ``copy``:
    the number of the data-parallel copy that it has; None for the whole mini-batch, and no shards.
    """
    job = load_job("jobs/quickstart.yaml")
    shares = shares or (DeviceShares(None) if runs_behind(device) else Shares(None))
    how = {"batch": BATCH, "steps": STEPS, "sequence": 16, "dtype": "float64", **how}
    shape = {name: how.pop(name) for name in ("split", "recompute", "pairs") if name in how}
    level, gather = how.pop("shard", 0), how.pop("gather", "unit")
    sequence, microbatches = how.pop("sequence"), how["batch"] // MICROBATCH
    train = job.train.model_copy(update=how)
    side = how.pop("side", None)
    dtype, autocast = DTYPES[train.dtype], torch.bfloat16 if train.dtype == "bfloat16" else None
    assert isinstance(job.model, GptSpec)
    spec = job.model.model_copy(update={"sequence": sequence})
    assert spec.dropout > 0
    model = GptLayers(spec, dtype)
    cut = even_cut(model, 2 if side is None else 4)
    own, copies = (0, 1) if copy is None else (copy, COPIES)
    count, split = microbatches // copies, shape.get("split", side is not None)
    text = order(2, count, **{"split": False} | shape) if side is None else side_order(4, count, side)
    schedule = replicate(from_text(text), copies)
    if copy is not None:
        schedule = place_gradient_sync(shard(schedule, level, gather=gather, copies=copies), "lazy")
    schedule = add_updates(schedule)
    verify(schedule)
    holders = tuple(
        TiedHolders(g.name, tuple(name for _, name in g.parameters), tuple(range(copies)), g.parameters[0][0])
        for g in model.tied
    )
    wanted = sum_groups(schedule.placement, schedule.sharding, groups_of_ties(holders, schedule.sharding))
    groups = create_groups(wanted, "gloo") if copy is not None else {}
    made = executor_of(
        model, cut, schedule, Noise(spec), train, batch=train.batch, microbatch=MICROBATCH, dtype=dtype,
        seed=train.seed, device=device, copy=own, split=split, groups=groups, shares=shares, autocast=autocast,
        update="auto" if copy is None else "wait", side_stream=side,
    )  # fmt: skip
    assert bool(made.sync.shards) == (copy is not None)
    return made, programs(schedule)[own], train


def numbers(result: StepResult) -> list[float]:
    return [result.loss_sum, result.norm_squared, result.samples]


def on_gpu(
    how: dict[str, Any], copy: int | None = None, meet: Path | None = None
) -> tuple[list[Any], list[Any], list[Any]]:
    """Per step the numbers of one fake GPU, which come during the next one, and where its host waited; its races."""
    with FakeGpu() as gpu:
        host_copies.pinned, clock.timing_event = gpu.pin, gpu.event
        shares = DeviceShares(None)
        if copy is not None:
            os.environ[GLOO] = "lo"
            dist.init_process_group("gloo", store=dist.FileStore(str(meet), COPIES), rank=copy, world_size=COPIES)
            shares = DeviceShares(dist.group.WORLD, gpu.event)
        side_stream.make_stream, side_stream.make_event, side_stream.use = gpu.new_stream, gpu.event, gpu.use
        side_stream.current_stream = lambda device: gpu.stream
        runner, program, train = executor(gpu.device, how, shares, copy)
        late, counts, before = [], [], None
        for step in range(STEPS):
            gpu.sites.clear()
            started, ends = runner.start(program, step, learning_rate(train, step)), gpu.issued
            if before is not None:
                gpu.advance(before[1])  # the device has come to the end of the last step, and is at work on this one
                late.append(numbers(before[0].result()))
            before = started, ends
            counts.append(list(gpu.sites))
        assert before is not None
        gpu.advance(before[1])
        late.append(numbers(before[0].result()))
    return late, counts, gpu.races


def on_gpus(how: dict[str, Any]) -> list[Found]:
    """What each of a sharded case's fake GPUs has; torch allows one per process."""
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(COPIES, multiprocessing.get_context("fork")) as pool,
    ):
        runs = [pool.submit(on_gpu, how, copy, Path(folder) / "store") for copy in range(COPIES)]
        return [run.result() for run in runs]


def main(how: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    found = on_gpus(how) if "shard" in how else [on_gpu(how)]
    # After the device: autograd starts its threads, one per device, with the first backward.
    runner, program, train = executor(torch.device("cpu"), how, Shares(None))
    plain = [numbers(runner.run(program, step, learning_rate(train, step))) for step in range(STEPS)]
    totals = [
        [sum(parts) for parts in zip(*step, strict=True)] for step in zip(*(late for late, *_ in found), strict=True)
    ]
    waits = [
        [site for sites in step for site in sites] for step in zip(*(counts for _, counts, _ in found), strict=True)
    ]
    runner.close()
    return {"cpu": plain, "gpu": totals, "waits": waits, "races": [race for *_, races in found for race in races]}


def planted_races() -> list[int]:
    """How many races the fake GPU counts: a stream that waits for what it reads, one that does not, and a write."""
    with FakeGpu() as gpu:
        x = torch.zeros(3, device=gpu.device)
        side, made, counts = gpu.new_stream(gpu.device), gpu.event(), []
        made.record()
        with gpu.use(side):
            x.sum()
            counts.append(len(gpu.races))  # 1: it did not wait
            side.wait_event(made)
            x.sum()
            counts.append(len(gpu.races))
        x.view(3, 1)
        x.sum()
        counts.append(len(gpu.races))
        x.add_(1.0)
        counts.append(len(gpu.races))  # 2: the other stream may still read
    return counts


def planted() -> list[str]:
    """What the fake GPU says of the ways to wait that steps once had, and of some that do not wait."""
    with FakeGpu() as gpu:
        host_copies.pinned = gpu.pin
        x = torch.full((3,), 2.0, device=gpu.device)
        said = []
        for way in (
            lambda: float(x.sum()),
            lambda: x.cpu(),
            lambda: torch.tensor([1, 2], device=gpu.device),
            lambda: torch.zeros(3).to(gpu.device, non_blocking=True),  # not pinned
            lambda: x[x > 1],
            lambda: bool((x > 1).all()),
            lambda: host_copies.to_device(torch.zeros(3), gpu.device),
            lambda: host_copies.to_host(x),
            lambda: x.mul(x[0]).sum().double(),
        ):
            gpu.sites.clear()
            way()
            said.append(" and ".join(site.split(" ", 1)[1] for site in gpu.sites))
        early = host_copies.to_host(x)
        said.append(str(early.tolist()))
        gpu.advance(gpu.issued + 1)
        said.append(str(early.tolist()))
    return said


if __name__ == "__main__":
    case = sys.argv[1]
    planted_cases = {"planted": planted, "planted-races": planted_races}
    print(json.dumps(planted_cases[case]() if case in planted_cases else main(CASES[case])))

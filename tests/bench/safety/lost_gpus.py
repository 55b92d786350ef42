"""Kill, stop or stall one of three pipeline devices over the GPU shim, at a random message, and look at the others.

`python -m tests.bench.safety.lost_gpus`: 50 trials, two minutes on two cores; it needs the shim (`make shim`). Each
trial runs the program of a 1F1B pipeline with NCCL channels and a sum a step, as the worker's own runner does, without
a model. The victim's process is killed (SIGKILL) or stopped (SIGSTOP), or its GPU ends no kernel any more. Every other
device has to raise an error that names what it waited for within its timeout + 5 s, to leave its communicators, and to
end; no process may be left. Nothing is lost before all have opened their communicators: a device that is stopped while
others open theirs is not tried here (torch's store waits for a stopped rank 0 for ever).
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from tests.gpu_shim.shim import lacking, run_module

Fault = Literal["killed", "stopped", "stalled"]
FAULTS: tuple[Fault, ...] = get_args(Fault)
DEVICES, MICROBATCHES, STEPS = 3, 6, 4
TIMEOUT_S, LATE_S = 3.0, 5.0
"""The timeout of messages, and how much later an error may come."""
START_S, GONE_S = 60.0, 5.0


def device(
    fault: Fault, victim: int, after: int, folder: str, rank: int, ends: list[Any], heard: list[Any]
) -> None:  # fmt: skip
    """Be one device: train until something is lost, and write down what was said and when."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": str(rank), "GPU_SHIM_DIR": folder}
    import torch
    import torch.distributed as dist

    from raypipe.errors import TransportError
    from raypipe.runtime.executor.runner import ProgramRunner
    from raypipe.runtime.setup.communicators import Communicators
    from raypipe.runtime.transport.channel import StageIOSpec, TensorSpec
    from raypipe.schedule import Shape, generate
    from raypipe.schedule.kinds import KINDS
    from raypipe.schedule.lowering.programs import edges, programs
    from tests.gpu_shim.cases import HERE, meet, topology

    faulthandler.dump_traceback_later(
        START_S if rank == victim else TIMEOUT_S + 2 * LATE_S
    )  # where it hangs, if it does
    here = torch.device("cuda", 0)
    locations = meet(rank, here, ends, heard)
    schedule = generate("1f1b", Shape(devices=DEVICES, microbatches=MICROBATCHES))
    everyone = {"all": tuple(range(DEVICES))}
    opened = Communicators(rank, topology(locations, edges(schedule), everyone, TIMEOUT_S), "nccl", HERE.address)
    tensors = (TensorSpec((1000,), torch.float32),)
    between = {(s, s + 1): StageIOSpec(tensors, (True,)) for s in range(DEVICES - 1)}
    runner = ProgramRunner(MICROBATCHES, TIMEOUT_S, opened.senders, opened.receivers, between, here)
    done = 0
    (Path(folder) / f"ready-{rank}").touch()
    while len(list(Path(folder).glob("ready-*"))) < DEVICES:  # the driver starts no step before
        time.sleep(0.005)

    def compute(runner: ProgramRunner, action: Any) -> None:
        """Use what has come, compute, and leave what is to go."""
        nonlocal done
        done += 1
        if rank == victim and done == after:
            (Path(folder) / "fault").write_text(str(time.time()))
            if fault == "stalled":
                ctypes.CDLL("libcudart.so.13").gpu_shim_stall()
            else:
                os.kill(os.getpid(), signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
        x = torch.ones(1000, device=here)
        for m in action.receives:
            if not m.local:
                (came,) = runner.p2p_buffers.pop((m.direction, m.src_stage, m.dst_stage, runner.base + m.mb))
                x = x + came
        for m in action.sends:
            if not m.local:
                runner.p2p_buffers[m.direction, m.src_stage, m.dst_stage, runner.base + m.mb] = (x * 2,)

    runner.handlers = dict.fromkeys(KINDS, compute)
    program = programs(schedule)[rank]
    result: dict[str, Any] = {"rank": rank}
    try:
        for step in range(STEPS):
            runner.walk(program, step)
            work = dist.all_reduce(torch.ones(4, device=here), group=opened.groups["all"], async_op=True)
            assert work is not None
            work.wait()
    except TransportError as error:
        faulthandler.dump_traceback_later(LATE_S)
        result |= {"said": str(error), "at": time.time()}
    if not (fault == "stalled" and rank == victim):  # a GPU that ends no kernel any more cannot be left
        began = time.monotonic()
        runner.leave()
        opened.leave()
        result["left_s"] = time.monotonic() - began
    (Path(folder) / f"said-{rank}").write_text(json.dumps(result))
    if fault == "stalled" and rank == victim:
        os._exit(0)


def trial(number: int, draw: random.Random) -> str:
    """Run one trial; return what happened.

    Raises:
        AssertionError: something was not as it has to be.
    """
    fault, victim, after = (
        FAULTS[number % len(FAULTS)],
        draw.randrange(DEVICES),
        draw.randrange(1, STEPS * MICROBATCHES),
    )
    if number < len(FAULTS):  # the one in the middle, in the first task of all
        victim, after = 1, 1
    context = multiprocessing.get_context("forkserver")
    table = [[context.Pipe() for _ in range(DEVICES)] for _ in range(DEVICES)]
    processes = []
    with tempfile.TemporaryDirectory(prefix="lost-gpus-") as folder:
        for rank in range(DEVICES):
            ends, heard = [table[rank][k][1] for k in range(DEVICES)], [table[k][rank][0] for k in range(DEVICES)]
            one = context.Process(target=partial(device, fault, victim, after, folder, rank), args=(ends, heard))
            one.start()
            processes.append(one)
        deadline = time.monotonic() + START_S
        try:
            while not (Path(folder) / "fault").exists():
                assert time.monotonic() < deadline, "the victim never came to its task"
                assert not any(one.exitcode for one in processes), "a device ended before"
                time.sleep(0.01)
            for rank, one in enumerate(processes):
                if rank != victim:
                    one.join(TIMEOUT_S + LATE_S + GONE_S)
            left = [rank for rank, one in enumerate(processes) if one.is_alive() and rank != victim]
        finally:
            for one in processes:
                one.kill()
                one.join()
        name = f"device {victim} {fault} at task {after}"
        assert not left, f"{name}: the processes of {left} have not ended"
        assert not (bad := {r: p.exitcode for r, p in enumerate(processes) if p.exitcode and r != victim}), (
            f"{name}: {bad}"
        )
        at = float((Path(folder) / "fault").read_text())
        lasted = []
        for rank in range(DEVICES):
            if rank != victim:
                said = json.loads((Path(folder) / f"said-{rank}").read_text())
                assert "said" in said, f"{name}: device {rank} has heard nothing of it"
                assert "stage" in said["said"] or "this device" in said["said"], f"{name}: {said['said']}"
                lasted.append(said["at"] - at)
                assert lasted[-1] < TIMEOUT_S + LATE_S, f"{name}: device {rank} said so after {lasted[-1]:.1f} s"
                assert said["left_s"] < LATE_S, f"{name}: device {rank} left in {said['left_s']:.1f} s"
        return f"{name}: errors after " + " and ".join(f"{seconds:.1f} s" for seconds in lasted)


def trials(count: int, seed: int) -> int:
    """Run trials, and print each; return how many failed."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch", "tests.gpu_shim.cases"])
    draw, failed = random.Random(seed), 0
    for number in range(count):
        try:
            print(trial(number, draw), flush=True)
        except AssertionError as error:
            failed += 1
            print(f"FAILED: {error}", flush=True)
    print(f"{count - failed} of {count}", flush=True)
    return failed


def main() -> int:
    """Run the trials over the shim, in its environment; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.here:
        return 1 if trials(asked.trials, asked.seed) else 0
    if why := lacking():
        print(f"the GPU shim is not here: {why}")
        return 2
    words = ["--here", "--trials", str(asked.trials), "--seed", str(asked.seed)]
    return run_module("tests.bench.safety.lost_gpus", *words, kernel_us=200, devices=DEVICES)


if __name__ == "__main__":
    sys.exit(main())

"""The sections of the GPU report; each takes the device and returns what it found, or raises."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

from raypipe.cost.analytic import analytic_profile
from raypipe.cost.memory import device_memory
from raypipe.job import GptSpec
from raypipe.job.spec import load_job
from raypipe.models import GptLayers, cross_entropy, random_keys
from raypipe.models.attention import causal_attention
from raypipe.models.current_slice import SliceRun, slice_run
from raypipe.observe.run_log import METRICS, read_rows
from raypipe.runtime.update.optimizer import learning_rate, make_optimizer
from raypipe.schedule.forms.text import from_text
from raypipe.schedule.passes import add_updates
from tests.bench.gpu.graphs import cuda_graphs, losses_of_steps
from tests.cost.test_memory_of_a_step import MACHINE
from tests.runtime.host_waits import MICROBATCH, Noise, executor
from tests.runtime.runs.one_device import order

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
QUICKSTART = "jobs/quickstart.yaml"
LIMIT_S = 420
"""Seconds that a command may take; profiling takes half of it on a busy machine of two cores."""
BRIEF = ("train.batch=8", "model.layers=2", "model.sequence=32")
"""Settings with which a CPU has done the quickstart job soon."""
Found = dict[str, Any]


class SkippedError(Exception):
    """The machine lacks what a section needs."""


def _gpu_only(device: torch.device) -> None:
    if device.type != "cuda":
        raise SkippedError("needs a GPU")


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _command(*words: str) -> str:
    with subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        late = False
        try:
            said, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            late = True
            process.send_signal(signal.SIGINT)  # a run then stops what it has started
            try:
                said, _ = process.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                said, _ = process.communicate()
    if late or process.returncode:
        how = f"took more than {LIMIT_S} s" if late else f"ended with {process.returncode}"
        raise RuntimeError(f"{' '.join(words)} {how}:\n{said[-3000:]}")
    return said


def _quickstart(*settings: str) -> tuple[str, list[Any]]:
    """What the command says as it trains the quickstart job with these settings, and the rows of its steps."""
    with tempfile.TemporaryDirectory() as folder:
        words = [word for setting in settings for word in ("--set", setting)]
        output = _command("-m", "raypipe", "train", QUICKSTART, "--run-dir", folder, *words)
        (metrics,) = Path(folder).rglob(METRICS)
        return output, [row for row in read_rows(metrics) if "loss" in row]


def tests(device: torch.device) -> Found:
    """Every test that needs a GPU: channels through pinned memory, event clocks, the same dropout as on the CPU."""
    _gpu_only(device)
    return {"tests": _command("-m", "pytest", "-m", "gpu", "-v").strip().splitlines()[-1]}


def losses(device: torch.device) -> Found:
    """Losses and norms in float64, with dropout and clipping, are the CPU's to 1e-9."""
    worst = 0.0
    side = {"clip": None, "side": {1: 0, 2: 1}}
    for how in ({}, {"split": True}, {"clip": 1e-3}, {"recompute": True, "pairs": True}, side):
        pairs = []
        for where in (device, CPU):
            runner, program, train = executor(where, how)
            results = [runner.run(program, step, learning_rate(train, step)) for step in range(5)]
            pairs.append([(r.loss_sum, r.norm_squared) for r in results])
        worst = max(worst, *(abs(a - b) for x, y in zip(*pairs, strict=True) for a, b in zip(x, y, strict=True)))
    if worst > 1e-9:
        raise AssertionError(f"losses or norms differ from the CPU's by {worst:.3g}")
    return {"largest_difference": worst}


def bfloat16(device: torch.device) -> Found:
    """Autocast to bfloat16, and bfloat16 weights with float32 masters, train to nearly the losses of float32."""
    curves = []
    for dtype in ("bfloat16", "bfloat16-true", "float32"):
        runner, program, train = executor(device, {"dtype": dtype, "steps": 20})
        curves.append([runner.run(program, step, learning_rate(train, step)).loss_sum for step in range(20)])
    autocast, true = (max(abs(a - b) for a, b in zip(x, curves[-1], strict=True)) for x in curves[:-1])
    if not max(autocast, true) < 0.1:
        raise AssertionError(f"bfloat16's losses differ by {autocast:.3g}, bfloat16-true's by {true:.3g}")
    return {"largest_difference": autocast, "largest_difference_of_true": true}


def host_waits(device: torch.device) -> Found:
    """In steady state torch's sync debug mode finds no wait; step k's result is read after step k + 1 was queued."""
    runner, program, train = executor(device, {"dtype": "float32", "steps": 20})
    before, late = None, []
    try:
        for step in range(20):
            if step == 4 and device.type == "cuda":
                torch.cuda.set_sync_debug_mode("error")
            started = runner.start(program, step, learning_rate(train, step))
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")  # the host may wait for the step before
            if before is not None:
                late.append(before.result().loss_sum)
            before = started
            if step >= 4 and device.type == "cuda":
                torch.cuda.set_sync_debug_mode("error")
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    return {"steps_without_a_wait": 16, "last_loss": late[-1]}


def memory(device: torch.device) -> Found:
    """The memory model's peak of a step beside the allocator's, to 10 %."""
    _gpu_only(device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    runner, program, train = executor(device, {"dtype": "float32", "sequence": 128, "batch": 16})
    for step in range(2):
        runner.run(program, step, 1e-3)
    torch.cuda.reset_peak_memory_stats(device)
    runner.run(program, 2, 1e-3)
    result = torch.cuda.max_memory_allocated(device) - before
    model = load_job(QUICKSTART).model
    assert isinstance(model, GptSpec)
    profile = analytic_profile(model, MACHINE, "float32", [MICROBATCH])
    cut = [list(stage.layers) for _, stage in sorted(runner.modules.items())]
    schedule = add_updates(from_text(order(2, train.batch // MICROBATCH, split=False)))
    (predicted,) = device_memory(profile, cut, schedule, MICROBATCH)
    if abs(predicted.total - result) > 0.1 * result:
        raise AssertionError(f"predicted {predicted.total / 2**20:.1f} MiB, allocated {result / 2**20:.1f} MiB")
    return {"predicted_bytes": predicted.total, "allocated_bytes": result}


def sliced_attention(device: torch.device) -> Found:
    """Attention of four slices is as near to float64's as whole sequences' is, in memory without scores.

    With heads that share keys and without, in the kernel that torch has for the dtype.
    """
    result: Found = {}
    length = 4096 if device.type == "cuda" else 256
    for dtype, keys in ((torch.bfloat16, 2), (torch.bfloat16, 8), (torch.float32, 8)):
        sizes = [(1, n, length, 64) for n in (8, keys, keys, 8)]
        *exact, given = (torch.randn(size, dtype=torch.float64, device=device) for size in sizes)
        errors, peaks = [], []
        for slices in (1, 4):
            own = [x.to(dtype).requires_grad_() for x in exact]
            pieces: list[Any] = []
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
                before = torch.cuda.memory_allocated(device)
            made = []
            for i in range(slices):
                with slice_run(SliceRun(i, slices, pieces) if slices > 1 else None):
                    made.append(causal_attention(*(x.chunk(slices, 2)[i] for x in own), enable_gqa=True))
            for y, g in reversed(list(zip(made, given.to(dtype).chunk(slices, 2), strict=True))):
                y.backward(g)
            if device.type == "cuda":
                peaks.append(torch.cuda.max_memory_allocated(device) - before)
            wide = [x.detach().double().requires_grad_() for x in own]
            expected = F.scaled_dot_product_attention(*wide, is_causal=True, enable_gqa=True)
            expected.backward(given.to(dtype).double())
            pairs = [(torch.cat(made, 2), expected), *((x.grad, y.grad) for x, y in zip(own, wide, strict=True))]
            errors.append(
                max(
                    float((x.detach().double() - y.detach()).abs().max())
                    for x, y in pairs
                    if x is not None and y is not None
                )
            )
        scores = 8 * (length // 4) ** 2 * 4
        found = {"error": errors[1], "error_whole": errors[0], "peak_bytes": peaks, "scores_bytes": scores}
        result[f"{str(dtype).removeprefix('torch.')}, {keys} heads of keys"] = found
        if errors[1] > 3 * errors[0]:
            raise AssertionError(
                f"{dtype}: slices differ from float64 by {errors[1]:.3g}, the whole by {errors[0]:.3g}"
            )
        if peaks and peaks[1] > peaks[0] + scores:
            raise AssertionError(f"{dtype}: slices take {peaks[1]} bytes and the whole {peaks[0]}: scores are made")
    return result


def clocks(device: torch.device) -> Found:
    """The tasks' spans by events cover the kernels that torch's profiler saw, to 5 %."""
    _gpu_only(device)
    runner, program, train = executor(device, {"dtype": "float32", "sequence": 128, "batch": 16, "steps": 8})
    for step in range(4):
        runner.run(program, step, learning_rate(train, step))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        spans = runner.run(program, 4, learning_rate(train, 4)).times
    kernels = [e for e in seen.events() if e.device_type == torch._C._autograd.DeviceType.CUDA]
    first, last = min(e.time_range.start for e in kernels), max(e.time_range.end for e in kernels)
    profiled, clocked = (last - first) * 1e-6, float(spans.max() - spans.min())
    if abs(profiled - clocked) > 0.05 * profiled + 2e-4:
        raise AssertionError(f"spans cover {clocked:.6f} s, kernels {profiled:.6f} s")
    return {"spans_s": clocked, "kernels_s": profiled, "kernels": len(kernels)}


def step_time(device: torch.device) -> Found:
    """Seconds of a step beside a plain torch loop over the same micro-batches, and that loop compiled."""
    large = {"sequence": 128, "batch": 16, "dtype": "float32", "steps": 60}
    count = 40 if device.type == "cuda" else 3
    runner, program, train = executor(device, large)
    for step in range(3):
        runner.run(program, step, 1e-3)
    begin = time.monotonic()
    losses_of_steps(runner, program, range(3, 3 + count), 1e-3)
    result = {"raypipe_s": (time.monotonic() - begin) / count}
    for name in ("plain", "compiled"):
        try:
            result[f"{name}_s"] = _plain_loop(device, train, count, name == "compiled")
        except Exception as error:  # a machine without a compiler still shows the rest
            result[f"{name}_error"] = str(error).strip().splitlines()[0]
    return result


def _plain_loop(device: torch.device, train: Any, count: int, compiled: bool) -> float:
    spec = load_job(QUICKSTART).model.model_copy(update={"sequence": 128})
    layers = GptLayers(spec)
    model: Any = torch.nn.Sequential(*(layers.build(i, train.seed) for i in range(layers.count))).to(device)
    model[-1].project.weight = model[0].token.weight
    optimizer = make_optimizer(train, dict(model.named_parameters()))
    if compiled:
        # Keyed dropout reads Python numbers that change with every step, which torch.compile would compile anew.
        model = torch.compile(model.eval())
    data = Noise(spec)

    def step(number: int) -> torch.Tensor:
        rows = {n: x.to(device) for n, x in data.batch("train", 0, number, train.batch).items()}
        total = torch.zeros((), device=device)
        for first in range(0, train.batch, MICROBATCH):
            part = slice(first, first + MICROBATCH)
            with random_keys(0, number, range(first, first + MICROBATCH), not compiled):
                loss = cross_entropy(model(rows["input_ids"][part]), rows["shift_labels"][part])
            (loss / rows["shift_labels"].numel()).backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    for number in range(3):
        step(number)
    _synchronize(device)
    begin = time.monotonic()
    for number in range(3, 3 + count):
        last = step(number)
    assert math.isfinite(float(last))
    return (time.monotonic() - begin) / count


def train(device: torch.device) -> Found:
    """Profile, plan, train: the quickstart job as a user runs it, for some steps, with its memory forecast."""
    brief = BRIEF if device.type == "cpu" else ()
    output, rows = _quickstart(
        "train.steps=20", "train.eval_every=0", "train.eval_batches=1", "train.checkpoint_every=0", *brief
    )
    if len(rows) != 20 or not rows[-1]["loss"] < rows[0]["loss"]:
        raise AssertionError(f"{len(rows)} steps, the last loss is {rows[-1]['loss'] if rows else None}")
    plan = [line.strip() for line in output.splitlines() if "plan" in line.lower() or "memory" in line.lower()]
    return {"first_loss": rows[0]["loss"], "last_loss": rows[-1]["loss"], "step_s": rows[-1]["step_s"], "said": plan}


def between_gpus(device: torch.device) -> Found:
    """A pipeline of two stages over NCCL."""
    _gpu_only(device)
    if torch.cuda.device_count() < 2:
        raise SkippedError("needs two GPUs")
    return _pipeline("nccl", {})


def inside_one_gpu(device: torch.device) -> Found:
    """A pipeline of two stages whose processes share one GPU, through pinned memory."""
    _gpu_only(device)
    return _pipeline("pinned", {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]})


def _pipeline(transport: str, environment: dict[str, str]) -> Found:
    with patch.dict(os.environ, environment):
        _, rows = _quickstart(
            "train.steps=10", "train.eval_batches=1", "parallel={stages: 2, microbatch: 8}",
            f"parallel.transport={transport}",
        )  # fmt: skip
    return {"last_loss": rows[-1]["loss"], "step_s": rows[-1]["step_s"]}


SECTIONS: dict[str, Callable[[torch.device], Found]] = {
    section.__name__: section
    for section in (
        tests, losses, bfloat16, sliced_attention, host_waits, memory, clocks, step_time, cuda_graphs, train,
        inside_one_gpu, between_gpus,
    )
}  # fmt: skip

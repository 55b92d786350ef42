"""Train the same batches by ``raypipe train`` and through ``raypipe serve``, in turns, and say what a call costs.

    python -m tests.bench.service [--rounds 3] [--steps 40] [--calls 1000] [--limit 1.05] [--json FILE]

A GPT of four layers in two stages, float32. Through the API the unmodified ``tinker`` client sends each batch as a
``forward_backward`` and an ``optim_step``, ``--ahead`` steps before their results; its losses have to be those of the
run to 1e-4. Seconds of a step are the mean after ten; processor seconds are of all processes, the client's with them.

Then, on a GPT of two layers of 32: the time of a call of two sequences of eight tokens one at a time and queued ahead,
and the memory that each process has to itself (USS) before and after ``--calls`` of them with an update every 50.
Exit status 1 if the ratio is over ``--limit``, losses differ, or memory has grown by more than 5 %.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

from raypipe.data import Corpus
from raypipe.job import load_job
from raypipe.observe.run_log import METRICS, read_rows
from tests.bench.command import options, write_rows
from tests.bench.runtime.soak import GROWTH, own_mib
from tests.job_files import write_text
from tests.ray_environment import without_ray
from tests.service.serving import Server, serving

WARM = 10
"""Steps that are not measured."""
POLL_S = 0.05
SMALL_AHEAD = 8
EVERY = 50


def write_bench_job(path: Path, text: Path, steps: int, hidden: int = 256, layers: int = 4) -> Path:
    """Write the job; without dropout, which counts samples over a run and over calls differently."""
    model = {
        "type": "gpt", "layers": layers, "hidden": hidden, "heads": 4, "sequence": 128, "vocabulary": 256,
        "dropout": 0.0, "tie_embeddings": True,
    }  # fmt: skip
    parallel = {"schedule": "1f1b", "stages": 2, "microbatch": 2}
    train = {"steps": steps, "batch": 16, "lr": 0.001, "clip": 1.0}
    job = {"name": "bench", "model": model, "data": {"type": "bytes", "path": str(text)}, "train": train}
    path.write_text(json.dumps({**job, "parallel": parallel}), encoding="utf-8")
    return path


class Meter:
    """Wall and processor seconds of the steps of a process and its children, after the first ``WARM``."""

    def __init__(self, pids: list[int], done: Callable[[], int]) -> None:
        self._pids, self._done = pids, done
        self._marks: list[tuple[int, float, float]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._ended.wait(POLL_S):
            done = self._done()
            if done >= WARM and (not self._marks or done > self._marks[-1][0]):
                self._marks.append((done, time.monotonic(), sum(map(processor_s, self._pids))))

    def end(self) -> tuple[float, float]:
        """Return the wall and the processor seconds of a step."""
        self._ended.set()
        self._thread.join()
        (first, began, used), (last, ended, used_then) = self._marks[0], self._marks[-1]
        return (ended - began) / (last - first), (used_then - used) / (last - first)


def processor_s(pid: int) -> float:
    """Return the processor seconds, user and system, of a process and all below it."""
    total = 0.0
    with suppress(psutil.Error):
        top = psutil.Process(pid)
        for process in [top] if pid == os.getpid() else [top, *top.children(recursive=True)]:
            with suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
    return total


@dataclass(slots=True)
class Turn:
    """Seconds of a step, and the losses."""

    wall_s: float
    processor_s: float
    losses: list[float]


def trained(job: Path, folder: Path, environment: dict[str, str]) -> Turn:
    """Run ``raypipe train``."""
    run, words = folder / "run", [sys.executable, "-m", "raypipe", "train", str(job)]
    rows: Callable[[], list[dict[str, Any]]] = lambda: [r for r in read_rows(run / METRICS) if "loss" in r]  # noqa: E731
    process = subprocess.Popen(
        [*words, "--run-dir", str(run)], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    meter = Meter([process.pid], lambda: len(rows()))
    assert process.wait() == 0, run
    return Turn(*meter.end(), [row["loss"] for row in rows()])


@contextmanager
def client(server: Server) -> Iterator[Any]:
    """Yield the client of a new model; it ends with the block, as it would ask after its session for ever."""
    import tinker

    service = tinker.ServiceClient(base_url=server.url, api_key="tml-local")
    try:
        yield service.create_lora_training_client(base_model="bench", rank=0).result()
    finally:
        service.close("success").result()


def datum(tokens: Any, targets: Any, weight: float) -> Any:
    """Return one sequence as the client sends it."""
    import tinker

    inputs = {"target_tokens": np.asarray(targets, np.int64), "weights": np.full(len(targets), weight, np.float32)}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(list(tokens)), loss_fn_inputs=inputs)


def through_the_api(path: Path, data: Path, folder: Path, environment: dict[str, str], ahead: int) -> Turn:
    """Send the batches of a run, whose data was prepared, to a server."""
    import tinker

    job = load_job(path)
    train = job.train
    adam = tinker.AdamParams(
        learning_rate=train.lr, beta1=train.betas[0], beta2=train.betas[1], eps=train.eps,
        weight_decay=train.weight_decay, grad_clip_norm=train.clip,
    )  # fmt: skip
    corpus = Corpus.open(data)
    losses: list[float] = []
    with serving(path, folder, environment) as server, client(server) as training:
        meter = Meter([server.pid, os.getpid()], lambda: len(losses))
        queued: deque[Any] = deque()
        for step in range(train.steps):
            tokens, targets = corpus.samples("train", train.seed, step, 0, train.batch, train.batch)
            batch = [datum(t, y, 1 / targets.numel()) for t, y in zip(tokens.tolist(), targets.tolist(), strict=True)]
            queued.append((training.forward_backward(batch, "cross_entropy"), training.optim_step(adam)))
            while len(queued) > (ahead if step + 1 < train.steps else 0):
                call, update = queued.popleft()
                update.result()
                losses.append(call.result().metrics["loss:sum"])
        return Turn(*meter.end(), losses)


@dataclass(slots=True)
class Calls:
    """Small calls."""

    one_at_a_time_ms: float
    ahead_ms: float
    processor_ms: float
    """Of all processes, a call that is queued ahead."""
    before_mib: dict[str, float]
    after_mib: dict[str, float]

    @property
    def grown(self) -> list[str]:
        """Return the processes whose memory has grown."""
        return [name for name, before in self.before_mib.items() if self.after_mib[name] > GROWTH * before]


def small_calls(path: Path, folder: Path, environment: dict[str, str], count: int) -> Calls:
    """Make many small calls on a server."""
    import tinker

    with serving(path, folder, environment) as server, client(server) as training:
        batch = [datum(range(8), range(1, 9), 1.0)] * 2
        pids = {"client": os.getpid(), "server": server.pid}
        for process in psutil.Process(server.pid).children(recursive=True):
            if "StageSession" in " ".join(process.cmdline()):
                pids[f"stage {len(pids) - 2}"] = process.pid

        def calls(number: int) -> None:
            queued: deque[Any] = deque()
            for i in range(number):
                queued.append(training.forward_backward(batch, "cross_entropy"))
                if i % EVERY == EVERY - 1:
                    queued.append(training.optim_step(tinker.AdamParams()))
                while len(queued) > SMALL_AHEAD:
                    queued.popleft().result()
            for one in queued:
                one.result()

        def memory() -> dict[str, float]:
            return {name: own_mib(pid) or 0.0 for name, pid in pids.items()}

        calls(max(100, count // 2))
        before, began, used = memory(), time.monotonic(), processor_s(server.pid) + processor_s(os.getpid())
        calls(count)
        took, used = time.monotonic() - began, processor_s(server.pid) + processor_s(os.getpid()) - used
        after, each = memory(), []
        for _ in range(50):
            began = time.monotonic()
            training.forward_backward(batch, "cross_entropy").result()
            each.append(time.monotonic() - began)
        return Calls(1e3 * median(each), 1e3 * took / count, 1e3 * used / count, before, after)


def main() -> int:
    """Run both parts; the exit status says if something was not as it should be."""
    asked = options(__doc__, rounds=3, steps=40, ahead=4, calls=1000, limit=1.05, json=Path)
    turns: list[tuple[Turn, Turn]] = []
    with tempfile.TemporaryDirectory(prefix="raypipe-bench-service-") as name:
        top = Path(name)
        environment = without_ray(RAY_ADDRESS="local", RAYPIPE_CACHE_DIR=str(top / "cache"))
        text = write_text(top / "text")
        job = write_bench_job(top / "job.json", text, asked.steps)
        for number in range(asked.rounds):
            folder = top / str(number)
            folder.mkdir()
            run = trained(job, folder, environment)
            api = through_the_api(job, folder / "run" / "data", folder, environment, asked.ahead)
            turns.append((run, api))
            print(
                f"round {number}: a step of raypipe train {run.wall_s:.3f} s, {run.processor_s:.3f} processor s; "
                f"through the API {api.wall_s:.3f} s, {api.processor_s:.3f} processor s", flush=True
            )  # fmt: skip
        calls = None
        if asked.calls:
            small = write_bench_job(top / "small.json", text, 1, hidden=32, layers=2)
            (folder := top / "small").mkdir()
            calls = small_calls(small, folder, environment, asked.calls)
    apart = max((abs(a - b) for run, api in turns for a, b in zip(run.losses, api.losses, strict=True)), default=0.0)
    ratio = median(api.wall_s / run.wall_s for run, api in turns) if turns else 1.0
    if turns:
        used = median(api.processor_s / run.processor_s for run, api in turns)
        print(
            f"API / train, median of rounds: {ratio:.3f} wall, {used:.3f} processor; losses at most {apart:.1e} apart"
        )
    if calls is not None:
        print(f"a small call: {calls.one_at_a_time_ms:.1f} ms one at a time, {calls.ahead_ms:.1f} ms queued ahead, "
              f"{calls.processor_ms:.1f} ms of processors")  # fmt: skip
        for process, before in calls.before_mib.items():
            print(f"  {process}: {before:.0f} MiB before {asked.calls} calls, {calls.after_mib[process]:.0f} after")
    write_rows(asked.json, {"turns": [[asdict(a), asdict(b)] for a, b in turns], "calls": calls and asdict(calls)})
    return int(ratio > asked.limit or apart > 1e-4 or bool(calls and calls.grown))


if __name__ == "__main__":
    sys.exit(main())

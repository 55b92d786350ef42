"""Kill stage workers of ``raypipe serve``, or the server, at random moments of calls that come through its API.

    python -m tests.bench.service.kills [--kills 20] [--of workers|server] [--seed 4]

Two clients train a model each of a GPT in two stages, float64, with the unmodified ``tinker`` client, four updates
ahead of their results; in every round a random worker is killed (SIGKILL), or the server, which is then started again
with ``--resume`` on its port. Each loss and each gradient norm has to be that of plain PyTorch to 1e-9: an update that
was lost, or made twice, shows in all that follow. Exit status 1 if not.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import tinker

from raypipe.runtime.session.session_worker import AdamW
from tests.bench.command import options
from tests.ray_environment import without_ray
from tests.runtime.runs.plain_training import whole_gpt
from tests.runtime.session.plain_calls import PlainCalls
from tests.runtime.session.test_session import job_of, sampled
from tests.service.serving import Server, serving
from tests.service.test_tinker_client import rounded, sent

UPDATES = 4
"""Of a round, which are sent before any result is asked for."""
CLOSE = 1e-9
LOSS, RATE = "cross_entropy", 0.001
"""With which a rounding error stays one: ``ppo`` on samples of another policy, at 0.01, makes it ten times as large
every round, also between two plain models."""


def workers(server: Server) -> list[int]:
    """Return the process ids of the stage workers."""
    family = psutil.Process(server.pid).children(recursive=True)
    return [process.pid for process in family if "StageSession" in " ".join(process.cmdline())]


def kill_later(server: Server, of: str, rng: random.Random) -> threading.Thread:
    """Kill a random worker, or the server, in up to a tenth of a second, when calls are under way."""
    victim, wait_s = rng.choice(workers(server)) if of == "workers" else 0, rng.uniform(0.0, 0.1)

    def kill() -> None:
        time.sleep(wait_s)
        if victim:
            os.kill(victim, signal.SIGKILL)
        else:
            server.kill()
            server.start("--resume")

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


def apart(server: Server, kills: int, of: str, rng: random.Random) -> float:
    """Train while workers, or the server, are killed; return how far a loss or norm was from plain PyTorch's, relative
    to its size."""
    clients: list[Any] = []
    for _ in range(2):
        service = tinker.ServiceClient(base_url=server.url, api_key="tml-local")
        clients.append(service.create_lora_training_client(base_model="session", rank=0).result())
    plain = [PlainCalls(whole_gpt(job_of({}))) for _ in clients]
    adam = AdamW(lr=RATE, eps=1e-8, weight_decay=0.1, clip=1.0)
    asked = tinker.AdamParams(learning_rate=RATE, eps=1e-8, weight_decay=0.1, grad_clip_norm=1.0)
    worst = 0.0
    for number in range(kills + 1):
        began, queued, killing = time.monotonic(), [], None
        for update in range(UPDATES):
            for which, client in enumerate(clients):
                data = [rounded(sampled(rng, LOSS, rng.randint(1, 6))) for _ in range(2)]
                calls = [client.forward_backward(sent(one), LOSS) for one in data]
                queued.append((which, data, calls, client.optim_step(asked)))
            if update == 1 and number < kills:
                killing = kill_later(server, of, rng)
        for which, data, calls, updated in queued:
            for one, call in zip(data, calls, strict=True):
                expected, _ = plain[which].forward_backward(one, LOSS)
                worst = max(worst, abs(call.result().metrics["loss:sum"] - expected) / max(1.0, abs(expected)))
            norm, metrics = plain[which].optim_step(adam), updated.result().metrics
            worst = max(worst, abs(metrics["grad_norm"] - norm) / max(1.0, norm))
        if killing is not None:
            killing.join()
        print(f"round {number}: {time.monotonic() - began:.1f} s, {worst:.1e} apart at most", flush=True)
    return worst


def main() -> int:
    """Run all rounds; the exit status says if a number was another one."""
    asked = options(__doc__, kills=20, of="workers", seed=4)
    with tempfile.TemporaryDirectory(prefix="raypipe-bench-kills-") as name:
        folder = Path(name)
        job = json.loads(job_of({}).model_dump_json(exclude_unset=True))
        (path := folder / "job.json").write_text(json.dumps(job))
        with serving(path, folder, without_ray(RAY_ADDRESS="local"), "--models", "2") as server:
            worst = apart(server, asked.kills, asked.of, random.Random(asked.seed))
    sound = worst <= CLOSE
    print(f"{asked.kills} kills: {'no update was lost or made twice' if sound else f'a number is {worst:.1e} apart'}")
    return int(not sound)


if __name__ == "__main__":
    sys.exit(main())

"""How much of the way of tokens to experts is hidden: by shared experts, and by the other half of a pair.

    python -m tests.bench.runtime.expert_overlap

One device runs steps of two stages of a DeepSeek-V3 (hidden size 256, shared experts) with the runtime's own runner,
stages and autograd, in real time. Its expert group has a second member that is not there: it sends what this one
sends, and its rows arrive when a link would have brought them, one after another. The link is as fast as makes all
all-to-all of a step take a share of its compute. *Hidden* is the part of that time in which the device computed; *step*
is over that of the same order with nothing hidden. Rounds are interleaved, and figures are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from raypipe.job.spec import JobSpec, job_from
from raypipe.models import build_model, captured
from raypipe.runtime.executor.runner import ProgramRunner
from raypipe.runtime.stage.alternate import Alternation
from raypipe.runtime.stage.stage import MicrobatchState, StageModule
from raypipe.schedule import generate
from raypipe.schedule.lowering.programs import programs
from raypipe.schedule.shape import Shape
from raypipe.tensor import group_of_thread

MICROBATCHES = 12
CONFIG = {
    "vocab_size": 257, "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "num_experts_per_tok": 2,
    "max_position_embeddings": 128, "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 0,
    "q_lora_rank": None, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 48, "v_head_dim": 64,
    "head_dim": 16, "n_group": 1, "topk_group": 1,
}  # fmt: skip


class Link:
    """A group of two whose other member sends what this one does, over a link."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.seconds_per_byte = 0.0
        self.waited_s = self.sent_bytes = self._free_s = 0.0

    def start_all_to_all(
        self, x: Tensor, sends: Sequence[int], receives: Sequence[int]
    ) -> tuple[Tensor, Callable[[], object]]:
        assert list(sends) == list(receives)
        size = x.nbytes if x.dim() > 1 else 0  # counts take no time
        self.sent_bytes += size
        there = self._free_s = max(self._free_s, time.perf_counter()) + size * self.seconds_per_byte

        def wait() -> None:
            left = there - time.perf_counter()
            if left > 0:
                time.sleep(left)
                self.waited_s += left

        return x.clone(), wait


def job() -> JobSpec:
    return job_from(
        {
            "name": "overlap",
            "model": {"hf": "deepseek_v3", "config": CONFIG, "sequence": 64},
            "data": {"type": "bytes", "path": "."},
            "train": {"steps": 1, "batch": 4 * 2 * MICROBATCHES, "dtype": "float32"},
            "parallel": {"schedule": "1f1b", "stages": 1, "replicas": 2, "experts": 2, "microbatch": 4},
        }
    )


class Device:
    """Two stages on one device, in DualPipeV's order."""

    def __init__(self, meanwhile: bool, turns: bool) -> None:
        spread = nullcontext() if meanwhile else mock.patch.object(captured, "compute_meanwhile")
        model = build_model(job(), None, 0)
        self.task, half = model.task, model.count // 2
        with spread:
            parts = [range(half), range(half, model.count)]
            self.stages = [StageModule(model, own, 0, torch.device("cpu"), False) for own in parts]
        shape = Shape(devices=1, microbatches=MICROBATCHES, chunks=2)
        (self.program,) = programs(generate("dualpipev", shape))
        self.runner = ProgramRunner(MICROBATCHES, 60.0, {}, {}, {})
        self.runner.handlers = {"F": self.forward, "BW": self.backward, "B": self.backward, "U": nothing, "AR": nothing}
        self.runner.handlers["W"] = nothing  # its B, as a BW, has computed all
        self.runner.turns = Alternation() if turns else None
        self.saved: dict[tuple[int, int], MicrobatchState] = {}
        self.back: dict[int, tuple[Tensor, ...]] = {}
        ids = torch.randint(0, 257, (MICROBATCHES, 4, 64), generator=torch.Generator().manual_seed(0))
        self.inputs = [{"input_ids": x, "labels": x} for x in ids]

    def forward(self, _: Any, action: Any) -> None:
        stage, mb = action.task.stage, action.task.mbs[0]
        arrived = tuple(x.detach() for x in self.saved[0, mb].outputs) if stage else ()
        module = self.stages[stage]
        module.track(arrived)
        outputs = module(arrived, self.inputs[mb])
        if stage:
            outputs = (self.task.loss(outputs[0], self.inputs[mb]),)
        self.saved[stage, mb] = MicrobatchState(arrived, outputs)

    def backward(self, _: Any, action: Any) -> None:
        stage, mb = action.task.stage, action.task.mbs[0]
        gradients = (torch.ones(()),) if stage else self.back.pop(mb)
        self.back[mb] = self.stages[stage].run_backward(self.saved.pop((stage, mb)), gradients, None, True)

    def step(self, link: Link) -> float:
        """Return the seconds of a step."""
        link.waited_s = link.sent_bytes = 0.0
        with group_of_thread(link, "experts"):
            return float(np.ptp(self.runner.walk(self.program, 0)))


def nothing(*_: Any) -> None:
    pass


CASES = {
    "nothing hidden": (False, False),
    "shared experts": (True, False),
    "pairs": (False, True),
    "pairs and shared experts": (True, True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.15, 0.3, 0.45])
    options = parser.parse_args()
    torch.set_num_threads(1)
    devices, link = {name: Device(*case) for name, case in CASES.items()}, Link()
    for device in devices.values():
        device.step(link)
    print(f"{'all-to-all over compute':<26}{'':<26}{'hidden':>8}{'step':>8}")
    for share in options.shares:
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in devices}
        for _ in range(options.rounds):
            link.seconds_per_byte = 0.0
            compute = devices["nothing hidden"].step(link)
            link.seconds_per_byte = share * compute / link.sent_bytes
            for name, device in devices.items():
                seconds = device.step(link)
                found[name].append((1 - link.waited_s / (share * compute), seconds))
        plain = found["nothing hidden"]
        for name, rounds in found.items():
            hidden = statistics.median(h for h, _ in rounds)
            step = statistics.median(s / first for (_, s), (_, first) in zip(rounds, plain, strict=True))
            print(f"{share:<26.0%}{name:<26}{hidden:>8.0%}{step:>8.2f}")


if __name__ == "__main__":
    main()

"""1F1B on 8 emulated devices whose head has a vocabulary of 128k: whole on the last one, and its rows on all.

Of two models with Llama 3's vocabulary, on A100s: the simulated step, and the step of real actors, programs and
messages with timed waits instead of kernels (not with ``--rounds 0``), all times alike scaled so that an ideal step
takes ``--ideal`` seconds. The whole head's step has the best cut of the blocks. The ideal is 1F1B with the same work in
equal parts on all devices, of the three products that a whole head takes; shares take four. A message to all shares
takes as long as one to each after the other. Exits with 1 where the divided head has less than 90 % of the simulated
ideal, or logits above 1 / 8 of their size.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from raypipe.cost.gpt_work import RAYPIPE, gpt_work
from raypipe.cost.kernels import Kernels
from raypipe.cost.layer_work import LayerWork
from raypipe.job.cluster import load_cluster
from raypipe.job.model_spec import GptSpec
from raypipe.plan.cut.layers import cut_layers, line_of
from raypipe.runtime.emulation.emulated_run import rehearsal
from raypipe.runtime.emulation.links import Links
from raypipe.schedule import Shape, generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.families.vocabulary import graph_of
from raypipe.simulate.engine import simulate
from tests.bench.command import options
from tests.bench.turns import Turns, longer, table, take_turns

STAGES, MICROBATCHES, DTYPE = 8, 32, "bfloat16-true"
VOCABULARY = 128_256
MODELS = {"1b": (16, 2048), "8b": (32, 4096)}
"""Blocks and width."""
SEQUENCE = 4096

Times = tuple[float, float, float]
"""Of F, B and W."""


def times_of(works: Sequence[LayerWork], kernels: Kernels) -> list[Times]:
    return [
        (
            kernels.seconds(work.forward, 1),
            kernels.seconds(work.input_grad, 1, backward=True),
            kernels.seconds(work.weight_grad, 1, backward=True),
        )
        for work in works
    ]


def summed(times: Sequence[Times]) -> Times:
    forward, back, weights = zip(*times, strict=True)
    return sum(forward), sum(back), sum(weights)


def costs_of(stages: Sequence[Times], comm: dict[tuple[int, int], float]) -> CostTable:
    forward, back, weights = zip(*stages, strict=True)
    return CostTable(forward=forward, input_grad=back, weight_grad=weights, comm=comm)


def cut(times: Sequence[Times]) -> list[Times]:
    """Return the times of the stages of the best cut of layers."""
    starts = cut_layers([sum(one) for one in times], line_of(STAGES)).starts
    return [summed(times[a:b]) for a, b in pairwise([*starts, len(times)])]


def steps_of(layers: int, hidden: int) -> tuple[float, dict[str, CostTable]]:
    """Return the ideal step in seconds, and the costs of both ways."""
    machine = load_cluster(Path("cluster/devices/a100.yaml"))
    kernels, link = Kernels.of(machine.device, DTYPE, RAYPIPE), machine.inside
    heads = hidden // 128
    model = GptSpec(layers=layers, hidden=hidden, heads=heads, sequence=SEQUENCE, vocabulary=VOCABULARY)
    share = model.model_copy(update={"vocabulary": -(-VOCABULARY // STAGES)})
    whole = times_of(gpt_work(model, DTYPE), kernels)
    (head,) = times_of(gpt_work(share, DTYPE, loss_chunk=SEQUENCE)[-1:], kernels)
    hop = link.latency_us * 1e-6 + 2.0 * SEQUENCE * hidden / (link.bandwidth_gb_s * 1e9)
    graph = graph_of(STAGES)
    comm = {(a, b): hop * (STAGES - 1 if b >= STAGES > a else b != 2 * STAGES) for a, b in graph.edges}
    chain = {(a, a + 1): hop for a in range(STAGES - 1)}
    ideal = (MICROBATCHES + STAGES - 1) * sum(summed(whole)) / STAGES
    return ideal, {
        "whole": costs_of(cut(whole), chain),
        "split": costs_of([*cut(whole[:-1]), *[head] * STAGES, (0.0, 0.0, 0.0)], comm),
    }


def main() -> int:
    args = options(__doc__, rounds=3, steps=4, ideal=1.0)
    turns = []
    for name, sizes in MODELS.items():
        whole_s, costs = steps_of(*sizes)
        for way, each in costs.items():
            scaled = longer(each, args.ideal / whole_s)
            shape = Shape(devices=STAGES, microbatches=MICROBATCHES, vocabulary=way)  # type: ignore[arg-type]
            turns.append(Turns(rehearsal(generate("1f1b", shape, scaled), scaled, Links(), 1), f"{name} {way}"))
    if args.rounds:
        take_turns(turns, args.rounds, args.steps)
    share = -(-VOCABULARY // STAGES) / VOCABULARY
    shares = {one.name: args.ideal / simulate(one.what.schedule, one.what.costs).makespan for one in turns}
    rows = [
        (
            one.name,
            f"{shares[one.name]:.1%}",
            f"{args.ideal / one.step_s:.1%}" if args.rounds else "-",
            f"{share if 'split' in one.name else 1:.1%}",
        )
        for one in turns
    ]
    table("", ("head", "of the ideal, simulated", "emulated", "of the logits on a device"), rows)
    least = min(shares[one.name] for one in turns if "split" in one.name)
    return int(least < 0.9 or share > 1 / STAGES)


if __name__ == "__main__":
    sys.exit(main())

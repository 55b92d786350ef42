"""Emulated steps against their prediction, over every schedule, in turns.

python -m tests.bench.accuracy.emulated [--rounds 3] [--steps 6] [--only NAME ...] [--json FILE]
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from raypipe.runtime.emulation.emulated_run import Rehearsal, rehearsal
from raypipe.runtime.emulation.links import Links
from raypipe.schedule import SCHEDULES, Shape, generate, stages_of
from raypipe.schedule.costs import CostTable
from raypipe.search import search
from tests.bench.command import options, write_rows
from tests.bench.turns import MS, Turns, table, take_turns

MEDIAN, WORST = 0.03, 0.06
"""Largest share by which measured steps may differ from predicted ones: in the middle, and anywhere."""
COLUMNS = ("schedule", "configuration", "predicted", "measured", "range", "difference")
NO_LIMIT = Links()
GRADIENTS = Links(latency_s=20e-6, bytes_per_s=1e9, message_bytes=2e6, gradient_bytes=10e6)
"""1 GB/s: 2 ms a message, 10 ms to sum a stage's gradients over two holders."""


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration; costs in milliseconds, of a device's share of the model."""

    name: str
    devices: int
    microbatches: int
    replicas: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    forward: float = 10.0
    input_grad: float = 10.0
    weight_grad: float = 10.0
    recompute: float = 0.0
    travel: float = 0.0
    """Of ``forward``, and of ``input_grad``: tokens on their way to experts; their results take as long."""
    uneven: float = 0.0
    """Share by which the stages' times differ, from the first to the last."""
    comm: float = 0.0
    links: Links = NO_LIMIT

    @property
    def label(self) -> str:
        """For the table."""
        words = [f"D={self.devices} N={self.microbatches}"]
        words += [f"W={self.replicas}"] if self.replicas > 1 else []
        words += [f"{key} {value}" for key, value in self.options.items()]
        words += [f"all-to-all {2 * self.travel / self.forward:.0%}"] if self.travel else []
        words += [f"uneven {self.uneven:.0%}"] if self.uneven else []
        words += [f"latency {self.comm:g} ms"] if self.comm else []
        words += ["1 GB/s"] if self.links.bytes_per_s < float("inf") else []
        return ", ".join(words)

    def rehearsal(self) -> Rehearsal:
        """The whole step over all devices."""
        if self.name == "auto":
            costs = self._costs(self.devices)
            base = search((tuple(range(self.devices)),), self.microbatches, costs, budget_s=2.0).schedule
        else:
            shape = Shape(devices=self.devices, microbatches=self.microbatches, **self.options)
            costs = self._costs(stages_of(self.name, shape))
            base = generate(self.name, shape, costs)
        return rehearsal(base, costs, self.links, self.replicas)

    def _costs(self, stages: int) -> CostTable:
        share = self.devices / stages * MS
        scale = [share * (1 + self.uneven * (s / (stages - 1) - 0.5)) if stages > 1 else share for s in range(stages)]
        return CostTable(
            forward=tuple(k * self.forward for k in scale), input_grad=tuple(k * self.input_grad for k in scale),
            weight_grad=tuple(k * self.weight_grad for k in scale), recompute=tuple(k * self.recompute for k in scale),
            dispatch=tuple(k * self.travel for k in scale), combine=tuple(k * self.travel for k in scale),
            comm=self.comm * MS,
        )  # fmt: skip


CASES = (
    Case("gpipe", 2, 8),
    Case("gpipe", 4, 8, comm=2.0),
    Case("gpipe", 2, 4, 2, links=GRADIENTS),
    Case("1f1b", 2, 8, uneven=0.6),
    Case("1f1b", 4, 8, 2),
    Case("1f1b", 8, 16),
    Case("1f1b", 8, 8, 2, comm=1.0),
    Case("dapple", 4, 8, uneven=0.5, comm=1.0),
    Case("interleaved-1f1b", 2, 8, options={"chunks": 2}),
    Case("interleaved-1f1b", 4, 8, options={"chunks": 2}, forward=20, input_grad=20, weight_grad=20, comm=1.0),
    Case("bfs", 4, 8, options={"chunks": 2}, forward=20, input_grad=20, weight_grad=20),
    Case("chimera", 4, 8),
    Case("chimera", 8, 8, comm=1.0),
    Case("chimera", 4, 8, options={"concat": "doubling"}, recompute=10.0),
    Case("chimera", 4, 8, options={"concat": "halving"}, forward=20, input_grad=20, weight_grad=20),
    Case("chimera", 4, 4, 2, links=GRADIENTS),
    Case("chimera-tight", 4, 8),
    Case("gems", 4, 4),
    Case("pipedream", 4, 8, uneven=0.4),
    Case("pipedream-2bw", 4, 8, 2, links=GRADIENTS),
    Case("zb-h1", 4, 8),
    Case("zb-h1", 8, 16, uneven=0.4, comm=1.0),
    Case("zb-h2", 4, 12),
    Case("zb-h2", 8, 16, comm=1.0),
    Case("zb-v", 4, 8, forward=20, input_grad=20, weight_grad=20),
    Case("zeropp", 4, 8, options={"chunks": 2, "unit": 4}, forward=20, input_grad=20, weight_grad=20),
    Case("zeropp", 2, 8, 2, options={"chunks": 2, "unit": 4}, forward=20, input_grad=20, weight_grad=20),
    Case("early-recompute", 4, 8, recompute=10.0),
    Case("shifted-critical-path", 4, 8, recompute=10.0, comm=1.0),
    Case("model-parallel", 4, 4),
    Case("fast-forward", 4, 8, options={"chunks": 2}, forward=20, input_grad=20, weight_grad=20),
    Case("modulo", 4, 8, options={"chunks": 2}, forward=20, input_grad=20, weight_grad=20, comm=1.0),
    Case("dualpipe", 4, 8, travel=2.0, forward=20, input_grad=20),
    Case("dualpipev", 4, 8, travel=4.0, forward=40, input_grad=40, weight_grad=20),
    Case("interleaved-overlap", 4, 8, options={"chunks": 2}, travel=4.0, forward=40, input_grad=40, weight_grad=20),
    Case("auto", 4, 8, uneven=0.6, comm=2.0),
    Case("auto", 8, 16, uneven=0.4),
)


def main() -> int:
    """Run every configuration in turns; exit status 1 beyond a limit."""
    args = options(__doc__, rounds=3, steps=6, only=dict.fromkeys([*SCHEDULES, "auto"]), json=Path)
    cases = [case for case in CASES if case.name in args.only]
    if missing := set(args.only) - {case.name for case in cases}:
        print(f"no configuration of {', '.join(sorted(missing))}")
        return 1
    result = [Turns(case.rehearsal(), case.label) for case in cases]
    take_turns(result, args.rounds, args.steps)
    rows = [
        (case.name, one.name, f"{one.predicted_s / MS:.1f}", f"{one.step_s / MS:.1f}",
         f"{min(one.measured_s) / MS:.1f} - {max(one.measured_s) / MS:.1f}", f"{one.error:+.1%}")
        for case, one in zip(cases, result, strict=True)
    ]  # fmt: skip
    table("emulated steps, milliseconds", COLUMNS, rows, words=2)
    errors = [abs(one.error) for one in result]
    middle, worst = median(errors), max(errors)
    print(f"{len(result)} configurations of {len({case.name for case in cases})} schedules: median {middle:.1%} "
          f"(at most {MEDIAN:.0%}), worst {worst:.1%} (at most {WORST:.0%})")  # fmt: skip
    write_rows(args.json, [
        {"schedule": case.name, "configuration": one.name, "predicted_s": one.predicted_s,
         "measured_s": one.measured_s, "difference": one.error}
        for case, one in zip(cases, result, strict=True)
    ])  # fmt: skip
    return 0 if middle <= MEDIAN and worst <= WORST else 1


if __name__ == "__main__":
    sys.exit(main())

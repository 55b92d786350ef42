"""Lines that a user writes for three jobs beside the model: ``python -m tests.bench.head_to_head.lines``.

Those of the rivals are the ones that ``make bench`` runs, without docstrings and without what measures; of raypipe, the
job file's.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from typing import Any

import yaml

from tests.bench.head_to_head import peers_side, torch_side
from tests.bench.head_to_head.cases import CASES, DATA_PARALLEL

MEASURES = re.compile(r"\b(ends|cpu|begin|clock|trace|ran|same)\b")
"""Names of what times a step, notes its order or checks it."""
BOTH: tuple[Any, ...] = (torch_side.adamw, torch_side.whole_model)
FEEDS: tuple[Any, ...] = (peers_side.mean_loss, peers_side.Samples)
SIDES: dict[str, dict[str, tuple[Any, ...]]] = {
    "1f1b": {
        "torch": (torch_side.adamw, torch_side.pipeline_steps),
        "deepspeed": (torch_side.adamw, *FEEDS, peers_side.StageModule, peers_side.deepspeed_config,
                      peers_side.deepspeed_pipeline),
    },
    DATA_PARALLEL: {
        "torch": (*BOTH, torch_side.data_parallel_steps, torch_side._steps),
        "deepspeed": (*BOTH, *FEEDS, peers_side.deepspeed_config, peers_side.deepspeed_copies),
        "accelerate": (*BOTH, *FEEDS, peers_side.accelerate_steps),
    },
    "zero3": {
        "torch": (*BOTH, torch_side.sharded_steps, torch_side._steps),
        "deepspeed": (*BOTH, *FEEDS, peers_side.deepspeed_config, peers_side.deepspeed_copies),
    },
}  # fmt: skip


def lines_of(thing: Any) -> int:
    """Count the lines of a function or class that neither document nor measure."""
    source = textwrap.dedent(inspect.getsource(thing))
    for node in ast.walk(tree := ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            node.body = node.body[1:]
    return sum(bool(line.strip()) and not MEASURES.search(line) for line in ast.unparse(tree).splitlines())


def main() -> None:
    """Print a row for each job."""
    for schedule, sides in SIDES.items():
        job = CASES["compute" if schedule == "1f1b" else DATA_PARALLEL].job(schedule, 5)
        asked = job.model_dump(mode="json", exclude_unset=True, exclude={"model"})
        counts = {"raypipe": len(yaml.safe_dump(asked).splitlines())}
        counts |= {side: sum(map(lines_of, things)) for side, things in sides.items()}
        print(f"{schedule:15}", *(f"{side} {count:3}" for side, count in counts.items()))


if __name__ == "__main__":
    main()

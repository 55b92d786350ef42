"""Adds a kind of task and runs it. Not a test file: test_new_kind.py runs it, in a process of its own.

What is done here is all that a new kind takes: a row of ``TRAITS``, which everything else reads when it is imported,
and a handler of the executor.
"""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

KINDS = "raypipe.schedule.kinds"
ROW = '    "PEEK": Traits("look at kept activations", (), 0.5),\n'


def add_row() -> None:
    """Import the table of kinds with one row more, before anything else imports it."""
    import raypipe

    source = (Path(raypipe.__file__).parent / "schedule" / "kinds.py").read_text(encoding="utf-8")
    last = '    "U": Traits('
    assert source.count(last) == 1
    spec = spec_from_loader(KINDS, None)
    assert spec is not None
    module = sys.modules[KINDS] = module_from_spec(spec)
    exec(compile(source.replace(last, ROW + last), KINDS, "exec"), module.__dict__)


def main() -> None:
    """Train a step with a task of the new kind between each forward and its backward, and one without."""
    add_row()
    import torch

    from raypipe.job import GptSpec
    from raypipe.models import GptLayers
    from raypipe.schedule.costs import CostTable
    from raypipe.schedule.forms.json_form import from_json, to_json
    from raypipe.schedule.forms.text import from_text, to_text
    from raypipe.schedule.passes import add_updates
    from raypipe.schedule.verify import verify
    from raypipe.simulate.engine import simulate
    from tests.runtime.runs.one_device import LR, even_cut, one_device

    text = "device 0: 0F0 1F0 0PEEK0 1PEEK0 1BW0 0BW0 0F1 1F1 1PEEK1 1BW1 0BW1"
    schedule = from_text(text)
    verify(add_updates(schedule))
    costs = CostTable.even(2)
    assert from_text(to_text(schedule)) == from_json(to_json(schedule, costs))[0] == schedule
    plain = from_text(" ".join(word for word in text.split() if "PEEK" not in word))
    assert simulate(schedule, costs).makespan == simulate(plain, costs).makespan, "its cost is the sum of no fields"

    model = GptLayers(GptSpec(layers=2, hidden=8, heads=2, sequence=4, vocabulary=16), torch.float64)
    tokens = torch.arange(16).view(4, 4)
    rows = {"input_ids": tokens, "shift_labels": tokens}
    losses, seen = [], []

    def peek(executor: Any, action: Any) -> None:
        stage, (mb,) = action.task.stage, action.task.mbs
        kept = executor.kept(stage, mb)
        seen.append((str(action.task), [tuple(x.shape) for x in kept.inputs]))

    for order in (to_text(plain), text):
        made = one_device(model, even_cut(model, 2), rows, torch.float64, 2, text=order)
        made.executor.handlers["PEEK"] = peek
        result = made.executor.run(made.program, 0, LR)
        losses.append((result.loss_sum, result.norm_squared))
        assert len(result.times) == len(made.program.actions)
    assert losses[0] == losses[1]
    assert seen == [("0PEEK0", []), ("1PEEK0", [(2, 4, 8)]), ("1PEEK1", [(2, 4, 8)])]
    print("ran")


if __name__ == "__main__":
    main()

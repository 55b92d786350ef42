"""What a family says of itself, against what it makes."""

from __future__ import annotations

import pytest

from raypipe.schedule import SCHEDULES, generate
from raypipe.schedule.shape import Shape


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, family in SCHEDULES.items() if family.fills])
def test_all_forwards_of_a_unit_come_before_its_first_weight_gradient(name: str) -> None:
    chunked, united = ({"chunks", "unit"} & SCHEDULES[name].options == {*o} for o in (("chunks",), ("chunks", "unit")))
    for devices in (2, 3, 4, 7):
        for chunks in (1, 2, 3, 8) if chunked or united else (1,):
            for count in (1, 2, 3, 5, 8, 15, 31):
                for unit in (count, 2, 2 * devices - 1) if united else (None,):
                    if unit is not None and unit > count:
                        continue
                    made = generate(name, Shape(devices=devices, microbatches=count, chunks=chunks, unit=unit))
                    for order in made.orders:
                        first = next(i for i, task in enumerate(order) if task.kind in ("W", "BW"))
                        own = {t.stage for t in order}
                        before = {(t.stage, t.mbs[0]) for t in order[:first] if t.kind == "F"}
                        assert before >= {(s, m) for s in own for m in range(unit or count)}

"""Check ``train.groups`` against the parameters of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from raypipe.errors import SpecError
from raypipe.job.train_spec import TrainSpec

if TYPE_CHECKING:
    from raypipe.models import LayeredModel


def check_groups(train: TrainSpec, model: LayeredModel, say: Callable[[str], None]) -> None:
    """Say which names no layer has: a parameter that forward does not read is not trained.

    Raises:
        SpecError: a tied parameter has several names, and a group has not got all of them.
    """
    group_of = {name: number for number, group in enumerate(train.groups) for name in group.parameters}
    if not group_of:
        return
    for tie in model.tied:
        names = dict.fromkeys(name for _, name in tie.parameters)
        if len({group_of.get(name) for name in names}) > 1:
            why = f"{' and '.join(names)} are one parameter, and not in one group"
            raise SpecError("train.groups", why, "name all of them in the same group")
    known = {name for i in range(model.count) for name in model.parameter_names(i)}
    if unknown := [name for name in group_of if name not in known]:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        say(f"note: train.groups: no layer of the model has a parameter {unknown[0]}{more}")

"""The form of a schedule family on so many devices, whatever the number of micro-batches: read off its smallest
schedule, so that the family's own rules decide what exists.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cache
from operator import attrgetter
from typing import Any

from raypipe.errors import ScheduleError
from raypipe.schedule import SCHEDULES, generate, stages_of
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule, Versions
from raypipe.schedule.kinds import GRADIENTS, JOINT
from raypipe.schedule.shape import ParallelShape, ScheduleOptions, Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A family's placement and kinds of task."""

    placement: tuple[tuple[int, ...], ...]
    """Per replica of the family's own, the device of each stage."""
    joint: bool
    """Every backward is joint (BW); where only some are, a BW is timed as a B and a W."""
    recomputes: frozenset[int]
    """Stages that recompute by themselves."""
    versions: Versions
    size: Fraction
    """Share of a micro-batch that one id stands for."""
    slices: int
    """Slices of a micro-batch along the sequence."""
    skips_first_b: bool
    """The first stage with trained parameters has no B."""
    alias: str
    """The first family in ``SCHEDULES`` that makes the same schedules."""

    @staticmethod
    def of(schedule: Schedule, alias: str) -> Form:
        """The form of a schedule."""
        tasks = list(schedule.tasks())
        backwards = schedule.backwards
        kinds = {t.kind for t in tasks if backwards[t.stage].weight_grad}
        return Form(
            placement=schedule.placement,
            joint=kinds & GRADIENTS == JOINT,
            recomputes=frozenset(t.stage for t in tasks if t.kind == "R"),
            versions=schedule.versions,
            size=schedule.size,
            slices=schedule.rules.slices,
            skips_first_b=schedule.rules.skip_first_b,
            alias=alias,
        )

    @property
    def stages(self) -> int:
        """Stages of one replica."""
        return len(self.placement[0])

    @property
    def share_of_samples(self) -> Fraction:
        """Share of a micro-batch's samples that one id runs on."""
        return self.size * self.slices

    @property
    def replicas(self) -> int:
        """Copies of each stage inside one data-parallel copy."""
        return len(self.placement)


CHUNKS = 3
"""Two families that make the same of so many chunks make the same of more."""
FORM_OPTIONS = tuple(f.name for f in fields(ScheduleOptions) if not f.metadata["order_only"])
"""Options that a form depends on."""
Values = tuple[Any, ...]
"""A value for each of ``FORM_OPTIONS``."""
options_of: attrgetter[Values] = attrgetter(*FORM_OPTIONS)
"""The values that a shape has."""


def form_of(shape: ParallelShape) -> Form | ScheduleError:
    """The form, from the family's smallest schedule; the error with which the family refuses, if it does."""
    return _form(shape.schedule, shape.stages, options_of(shape))


@cache
def _form(name: str, devices: int, options: Values) -> Form | ScheduleError:
    placement = SCHEDULES[name].placement
    try:
        if placement is None:
            form = Form.of(_smallest(name, devices, options), name)
        else:
            shape = _shape(devices, 1, options)
            SCHEDULES[name].check(name, shape)
            form = replace(_like(name, shape.slices), placement=(placement(shape),))
    except ScheduleError as error:
        return error
    few = (min(v, CHUNKS) if key == "chunks" else v for key, v in zip(FORM_OPTIONS, options, strict=True))
    return replace(form, alias=_alias(name, tuple(few)))


def _shape(devices: int, microbatches: int, options: Values) -> Shape:
    return Shape(devices=devices, microbatches=microbatches, **dict(zip(FORM_OPTIONS, options, strict=True)))


@cache
def _like(name: str, slices: int) -> Form:
    """A form of the family, for all that does not depend on the number of stages."""
    return Form.of(_smallest(name, 2, options_of(ScheduleOptions(slices=slices))), name)


def _smallest(name: str, devices: int, options: Values) -> Schedule:
    """One micro-batch, or as many as the family needs on so many devices: D, or 2D."""

    def make(count: int) -> Schedule:
        shape = _shape(devices, count, options)
        # Weight gradients without a cost: families that search for an order find the best one at once.
        return generate(name, shape, CostTable.even(stages_of(name, shape), weight_grad=0.0))

    for count in (1, devices):
        try:
            return make(count)
        except ScheduleError as error:
            if error.where != "microbatches":
                raise
    return make(2 * devices)


@cache
def _alias(name: str, options: Values) -> str:
    """Compared on four devices and several micro-batches, where different orders differ."""
    own = _looks(name, options)
    return next(other for other in SCHEDULES if other == name or (own and _looks(other, options) == own))


@cache
def _looks(name: str, options: Values) -> object:
    try:
        s = generate(name, _shape(4, 14, options))
    except ScheduleError:
        return None
    return s.placement, s.orders, s.rules, s.size, s.versions

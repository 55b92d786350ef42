"""Make schedules and cost tables from the options of ``raypipe schedule``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from typing_extensions import get_type_hints

from raypipe.cli._shared.options import comma_list
from raypipe.errors import RequestError, ScheduleError, check_known
from raypipe.files import short
from raypipe.schedule import SCHEDULES, Shape, generate, stages_of
from raypipe.schedule.costs import LONGEST, CostTable
from raypipe.schedule.ir import Schedule
from raypipe.schedule.passes import divide_experts, shard
from raypipe.schedule.passes.shard import Gather
from raypipe.schedule.shape import MOST

if TYPE_CHECKING:
    from raypipe.search import Found

AUTO = "auto"
SHAPE_KINDS: dict[str, Callable[[str], Any]] = {
    key: next((kind for kind in get_args(hint) or [hint] if kind in (int, float)), str)
    for key, hint in get_type_hints(Shape).items()
}
"""What reads the text of each of a shape's options: words, where they are no numbers."""
DEFAULT_SHAPE = {"devices": 4, "microbatches": 8}
DEFAULT_COSTS = {
    "forward": 1.0,
    "input_grad": 1.0,
    "weight_grad": 1.0,
    "recompute": 0.0,
    "comm": 0.0,
    "gather_time": 0.0,
    "reduce_scatter_time": 0.0,
    "attention": 0.0,
    "attention_grad": 0.0,
    "dispatch": 0.0,
    "combine": 0.0,
}
"""Default of each option that is a cost; ``COLUMN`` says where one is in the table if its name is another."""
COLUMN = {"gather_time": "gather", "reduce_scatter_time": "reduce_scatter"}


def described() -> dict[str, str]:
    """Return every schedule's name and its description."""
    searched = "the shortest order that a search finds for a placement, costs and memory, with a proven bound"
    return {name: family.about for name, family in SCHEDULES.items()} | {AUTO: searched}


@dataclass(frozen=True, slots=True)
class Made:
    """A schedule and the costs to simulate it with."""

    schedule: Schedule
    costs: CostTable
    found: Found | None = None
    """The result of the search, if the schedule was searched."""


def make(
    names: Sequence[str],
    shape: Mapping[str, str | None],
    costs: Mapping[str, str | None],
    compare: bool,
    search: Mapping[str, str | None] | None = None,
) -> list[Made]:
    """Make the named schedules; the mappings hold the texts of the options, None if an option is not given.

    With ``compare``, all schedules do the same work: a cost given as one number is that of a device's share of the
    model, which is divided among its stages. A shape option may then list one value per schedule, and families ignore
    options that they do not have.

    Raises:
        RequestError: an option, a name or a shape is invalid.
    """
    wishes = {key: text for key, text in (search or {}).items() if text is not None}
    if wishes and AUTO not in names:
        raise RequestError(flag(next(iter(wishes))), "applies to auto only", "name auto, or leave it out")
    values = {key: comma_list(flag(key), text, SHAPE_KINDS[key]) for key, text in shape.items() if text is not None}
    for key, given in values.items():
        if len(given) > 1 and (not compare or len(given) != len(names)):
            why = f"{len(given)} values for {len(names)} schedule{'s' * (len(names) != 1)}"
            raise RequestError(flag(key), why, "give one" + (" or as many as schedules" if compare else ""))
    for name in names:
        check_known(ScheduleError, "schedule", name, described())
    made = []
    for n, name in enumerate(names):
        own = {key: given[n if len(given) > 1 else 0] for key, given in values.items()}
        if compare:
            useful = {*DEFAULT_SHAPE, "memory_limit", *_own_options(name, wishes)}
            own = {key: value for key, value in own.items() if key in useful}
        try:
            if name == AUTO:
                made.append(_searched(own, costs, wishes, compare))
                continue
            wanted = Shape(**{**DEFAULT_SHAPE, **own})
            stages = stages_of(name, wanted)
            table = cost_table(stages, costs, share=stages // wanted.devices if compare else 1)
            made.append(Made(generate(name, wanted, table), table))
        except ScheduleError as error:  # name the option instead of the field
            where = flag(error.where) if error.where in {*SHAPE_KINDS, *wishes} else error.where
            raise ScheduleError(where, error.why, error.fix) from error
    return made


def _own_options(name: str, search: Mapping[str, str]) -> frozenset[str]:
    """The shape options that a schedule has besides devices, micro-batches and the memory limit."""
    if name != AUTO:
        return SCHEDULES[name].options
    from raypipe.search.placements import OPTIONS

    return OPTIONS.get(search.get("placement", "line"), frozenset())


def _searched(
    own: Mapping[str, Any], costs: Mapping[str, str | None], search: Mapping[str, str], compare: bool
) -> Made:
    from raypipe.cli._shared.auto import search_auto

    chunks = 2 if search.get("placement") in ("ring", "v") else 1  # with one chunk, both would be a line
    wanted = Shape(**{**DEFAULT_SHAPE, "chunks": chunks, **own})
    result, table = search_auto(
        wanted, search, lambda stages: cost_table(stages, costs, share=stages // wanted.devices if compare else 1)
    )
    return Made(result.schedule, table, result)


def load_one(path: Path, costs: Mapping[str, str | None], memory_limit: str | None) -> Made:
    """Read and verify a schedule file; costs that are given as options replace the file's.

    Raises:
        RequestError: the file is not a schedule, or its schedule cannot run.
    """
    from raypipe.schedule.forms.json_form import load
    from raypipe.schedule.live_activations import check_memory
    from raypipe.schedule.verify import verify

    schedule, own = load(path)
    verify(schedule)
    if memory_limit is not None:
        check_memory(schedule, comma_list("--memory-limit", memory_limit, float)[0])
    if own is None:
        return Made(schedule, cost_table(schedule.stages, costs))
    table = cost_table(schedule.stages, costs)
    columns = [COLUMN.get(key, key) for key, text in costs.items() if text is not None]
    given = {column: getattr(table, column) for column in columns}
    return Made(schedule, replace(own, **given))


def with_shards(made: list[Made], given: Mapping[str, str | None], unit: str | None) -> list[Made]:
    """Shard the schedules over their data-parallel copies if ``--zero`` says so (``passes.shard``).

    Raises:
        RequestError: an option is invalid, or one of the others is given without ``--zero``.
    """
    texts = {key: text for key, text in given.items() if text is not None}
    if "zero" not in texts:
        if texts:
            raise RequestError(flag(next(iter(texts))), "applies to --zero only", "add --zero, or leave it out")
        return made
    levels = comma_list("--zero", texts["zero"], int)
    ahead = comma_list("--ahead", texts.get("ahead", "1"), int)
    if len(ahead) != 1 or not 0 <= ahead[0] <= MOST:
        raise RequestError("--ahead", f"{short(texts['ahead'])} tasks", f"use one whole number from 0 to {MOST}")
    units = [None] if unit is None else comma_list("--unit", unit, int)
    result = []
    for n, one in enumerate(made):
        each = units[n if len(units) == len(made) else 0]
        try:
            schedule = shard(
                one.schedule,
                levels if len(levels) > 1 else levels[0],
                gather=cast(Gather, texts.get("gather", "unit")),
                unit=each,
                ahead=ahead[0],
            )
        except ScheduleError as error:
            where = {"gather": "--gather", "zero": "--zero"}.get(error.where, error.where)
            raise RequestError(where, error.why, error.fix) from error
        result.append(replace(one, schedule=schedule))
    return result


def with_experts(made: Made, parts: int) -> Made:
    """Make the dispatch and combine of a schedule tasks of their own (``passes.divide_experts``).

    Raises:
        RequestError: no stage has any, or the schedule has a kind of task that cannot be divided.
    """
    try:
        schedule, costs = divide_experts(made.schedule, made.costs, parts=parts)
    except ScheduleError as error:
        raise RequestError("--expert-parts", error.why, error.fix) from error
    return replace(made, schedule=schedule, costs=costs)


def cost_table(stages: int, given: Mapping[str, str | None], share: int = 1) -> CostTable:
    """Build the costs per stage from the texts of the options; a single number is divided by ``share``.

    Raises:
        RequestError: a value is not a finite number >= 0, or a list has not one value per stage (or, for ``comm``, per
            link between stages).
    """
    table: dict[str, tuple[float, ...]] = {}
    for key, default in DEFAULT_COSTS.items():
        text = given.get(key)
        values = [default] if text is None else comma_list(flag(key), text, float)
        if len(values) not in (1, stages, stages - (key == "comm")):
            raise RequestError(flag(key), f"{len(values)} values for {stages} stages", f"give 1 or {stages} values")
        if (wrong := next((v for v in values if not 0 <= v < math.inf), None)) is not None:
            raise RequestError(flag(key), f"{wrong:g} is not a valid time", "use finite numbers >= 0")
        if (wrong := next((v for v in values if v > LONGEST), None)) is not None:
            why = f"{wrong:g} is too long: times of a step could not be added up"
            raise RequestError(flag(key), why, f"use at most {LONGEST:g}")
        each = values[0] / (share if key != "comm" else 1)
        table[COLUMN.get(key, key)] = (each,) * stages if len(values) == 1 else tuple(values)
    return CostTable(**cast(dict[str, Any], table))


def flag(key: str) -> str:
    """Return the option that sets ``key``."""
    return "--" + key.replace("_", "-")

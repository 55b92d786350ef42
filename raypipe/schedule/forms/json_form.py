"""The JSON form of a schedule and its costs, for other programs (``raypipe schedule --json``).

``to_json`` and ``from_json`` are inverse to each other. A time is a number or a list with one value per stage; value s
of ``comm`` is the latency between stages s and s+1 (see ``latency``). A task has ``dur`` if its time is not
``durations[kind]``: a pair of forwards, half a micro-batch, or a slice of one. A task with ``joined`` runs together
with the one before it, and both have the time of the pair. ``recompute``, ``w_dep``,
``skip_first_B`` and ``frozen`` occur if a rule differs from the default; ``slices`` if ids are slices of micro-batches,
with the parts of F and B that grow along them (``attention``, ``attention_grad``); ``edges``, ``size`` and ``versions``
if the stage graph is not a chain, an id is a part of a micro-batch, or weights have several versions; ``zero``,
``copies`` and ``shard_group`` if data-parallel copies divide anything (``Sharding``); ``dispatch``,
``combine`` and ``overlap`` if tokens travel to experts (``CostTable``), with ``experts`` and ``exchange`` where
that takes tasks of its own.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path, PurePath
from typing import Any, NoReturn, TypeVar

from raypipe.errors import ScheduleError, nearest
from raypipe.files import parse_json, read_regular, short
from raypipe.schedule.costs import LONGEST, Comm, CostTable
from raypipe.schedule.forms.text import RECOMPUTE, VERSIONS, W_DEP, built, from_text, parse_task, unusual
from raypipe.schedule.ir import Schedule, Task
from raypipe.schedule.kinds import BOOKKEEPING, BW, EXCHANGES, JOINT, KINDS, TRAITS, Kind

RESULTS = (
    "makespan",
    "span",
    "period",
    "bubble_ratio",
    "peak_activations",
    "weight_versions",
    "lower_bound",
    "critical_path",
    "critical_forwards",
    "critical_backwards",
    "objective",
    "objective_value",
    "objective_bound",
    "gap",
    "search_seconds",
    "recompute_stages",
)
"""Keys that a simulation or a search adds; a reader ignores them."""


def to_json(
    schedule: Schedule, costs: CostTable, times: Iterable[Iterable[tuple[Task, float, float]]] | None = None
) -> dict[str, Any]:
    """Return the JSON object of ``schedule``; with ``times`` (a Timeline's spans), tasks have a start and an end.

    Raises:
        ScheduleError: ``costs`` has another number of stages than ``schedule``.
    """
    durations = {kind: _one_if_even(costs.by_kind(kind)) for kind in KINDS}
    for kind in BOOKKEEPING | EXCHANGES:
        if durations[kind] == 0 or kind in EXCHANGES:
            del durations[kind]
    lengths = iter(costs.durations(schedule, list(schedule.tasks())))
    clock = None if times is None else [_clock(device) for device in times]
    orders: list[list[dict[str, Any]]] = []
    for d, order in enumerate(schedule.orders):
        orders.append([])
        for task in order:
            kind, stage, mbs, replica = task
            entry: dict[str, Any] = {
                "kind": kind,
                "stage": stage,
                "mb": mbs[0] if len(mbs) == 1 else list(mbs),
                "replica": replica,
            }
            if clock is not None:
                entry["start"], entry["end"] = clock[d][task].popleft()
            length = next(lengths)
            if length != costs.by_kind(kind)[stage] or kind in EXCHANGES:
                entry["dur"] = _whole(length)
            if task in schedule.joined:
                entry["joined"] = True
            orders[-1].append(entry)
    result: dict[str, Any] = {
        "name": schedule.name,
        "placement": [list(p) for p in schedule.placement],
        "orders": orders,
        "durations": durations,
        "comm": _one_if_even(costs.links),
        "microbatches": schedule.microbatches,
    }
    for key, value in unusual(schedule).items():
        listed = [list(each) if key == "edges" else each for each in value] if isinstance(value, tuple) else value
        result[key] = str(value) if isinstance(value, Fraction) else listed
    if schedule.rules.slices != 1:
        parts = (("attention", costs.attention), ("attention_grad", costs.attention_grad))
        result |= {name: _one_if_even(part) for name, part in parts if any(part)}
    if any(costs.dispatch) or any(costs.combine):
        result |= {"dispatch": _one_if_even(costs.dispatch), "combine": _one_if_even(costs.combine)}
        result |= {"overlap": costs.overlap} if costs.overlap != 1 else {}
    return result


def _clock(spans: Iterable[tuple[Task, float, float]]) -> dict[Task, deque[tuple[float, float]]]:
    """Times by task, since spans are sorted by start and orders are not; equal tasks (AG) run in the order they are."""
    result: dict[Task, deque[tuple[float, float]]] = {}
    for task, start, end in spans:
        result.setdefault(task, deque()).append((start, end))
    return result


def from_json(data: object, source: str = "schedule") -> tuple[Schedule, CostTable]:
    """Read the decoded JSON form; ``verify`` checks whether the schedule can run.

    A hand-written file may omit ``name``, ``placement``, ``durations``, ``comm`` and ``microbatches``: they follow from
    the orders, and times default to 1 (R and bookkeeping to 0). A task may be written as text, ``"2F0"``.

    Raises:
        ScheduleError: the data are not in this form or contradict themselves; it names the field's path.
    """
    top = JsonField(data, source, "")
    top.only((*KEYS, *RESULTS))
    orders = tuple(tuple(_task(t) for t in order.items("tasks")) for order in top.need("orders").items("devices"))
    given = {key: read(field) for key, read in _READERS.items() if (field := top.get(key)) is not None}
    given["joined"] = [
        task
        for row, order in zip(top.need("orders").items("devices"), orders, strict=True)
        for entry, task in zip(row.items("tasks"), order, strict=True)
        if isinstance(entry.value, dict) and (flag := entry.get("joined")) is not None and flag.flag()
    ]
    if "zero" not in given:
        for other in filter(None, map(top.get, ("copies", "shard_group"))):
            other.fail("belongs to a sharded schedule", 'state the ZeRO level of each stage: "zero": [3, 3]')
    schedule = built(given.pop("name", PurePath(source).stem), orders, given, source)
    if "edges" in given:
        for item, ends in zip(top.need("edges").items("edges"), given["edges"], strict=True):
            if len(ends) != 2 or not ends[0] < ends[1] < schedule.stages:
                why = f"{item.value} is not an edge between {schedule.stages} stages"
                item.fail(why, "write [earlier stage, later stage]")
    costs = _costs(top, schedule.stages)
    _check_lengths(top, schedule, costs)
    return schedule, costs


def _task(field: JsonField) -> Task:
    if isinstance(field.value, str):
        return parse_task(field.value, field.where)
    field.only(("kind", "stage", "mb", "replica", "start", "end", "dur", "joined"))
    kind = field.need("kind").choice(KINDS)
    mb, replica = field.get("mb"), field.get("replica")
    if mb is None:
        mbs: tuple[int, ...] = ()
    else:
        mbs = mb.wholes("micro-batches") if isinstance(mb.value, list) else (mb.whole(),)
    if (kind in BOOKKEEPING) == bool(mbs):
        field.fail(f"{kind} {'carries no' if mbs else 'needs a'} micro-batch", '"mb" is a number or a list of numbers')
    return Task(kind, field.need("stage").whole(), mbs, 0 if replica is None else replica.whole())


def _placement(field: JsonField) -> list[tuple[int, ...]]:
    rows = [replica.wholes("devices") for replica in field.items("replicas")]
    if len({len(row) for row in rows}) != 1 or not rows[0]:
        field.fail("replicas of different or no stages", "give every replica one device per stage")
    return rows


def _exchange(field: JsonField) -> tuple[int, ...]:
    result = field.wholes("numbers")
    return (
        result
        if len(result) == 2
        else field.fail(f"{len(result)} numbers", 'give copies and a group: "exchange": [4, 2]')
    )


def _slices(field: JsonField) -> int:
    return field.whole() or field.fail("0 slices", 'leave it out, or write for example "slices": 4')


def _costs(top: JsonField, stages: int) -> CostTable:
    given = top.get("durations")
    times: dict[Kind, tuple[float, ...]] = {}
    if given is not None:
        given.only([kind for kind in KINDS if kind not in EXCHANGES])
        times = {k: given.need(k).per_stage(stages) for k in KINDS if given.get(k) is not None}
    joint = times.pop(BW, None)
    if joint is not None and "B" not in times and "W" not in times:  # only the sum is used, so split it evenly
        times["B"] = times["W"] = tuple(bw / 2 for bw in joint)
    for kind, traits in TRAITS.items():
        if kind not in JOINT:
            times.setdefault(kind, (traits.default_time,) * stages)
    if joint is not None and given is not None:
        for bw, b, w in zip(joint, times["B"], times["W"], strict=True):
            if abs(bw - b - w) > 1e-9 * max(1.0, bw):
                given.need(BW).fail(f"BW is {bw:g} where B + W is {b + w:g}", "leave BW out, or make it B + W")
    comm = top.get("comm")
    return CostTable(
        forward=times["F"],
        input_grad=times["B"],
        weight_grad=times["W"],
        recompute=times["R"],
        all_reduce=times["AR"],
        update=times["U"],
        gather=times["AG"],
        reduce_scatter=times["RS"],
        attention=_part(top, "attention", times["F"]),
        attention_grad=_part(top, "attention_grad", times["B"]),
        dispatch=_per_stage(top, "dispatch", stages),
        combine=_per_stage(top, "combine", stages),
        overlap=1.0 if (overlap := top.get("overlap")) is None else overlap.number(),
        comm=0.0 if comm is None else _links(comm, stages),
    )


def _per_stage(top: JsonField, key: str, stages: int) -> tuple[float, ...]:
    given = top.get(key)
    return (0.0,) * stages if given is None else given.per_stage(stages)


def _part(top: JsonField, key: str, whole: tuple[float, ...]) -> tuple[float, ...]:
    """A part of the times of a kind that grows along the slices."""
    given = top.get(key)
    part = (0.0,) * len(whole) if given is None else given.per_stage(len(whole))
    if given is not None and any(p > w for p, w in zip(part, whole, strict=True)):
        given.fail("it is longer than the task that it is a part of", 'use at most "F", or "B" for the gradient')
    return part


def _links(field: JsonField, stages: int) -> Comm:
    if not isinstance(field.value, list):
        return field.number()
    result = tuple(item.number() for item in field.items("numbers"))
    if len(result) not in (stages, stages - 1) or not result:
        field.fail(f"{len(result)} values for {stages} stages", f"give 1 or {stages} values; the last one has no use")
    return result


def _check_lengths(top: JsonField, schedule: Schedule, costs: CostTable) -> None:
    """Check that every ``dur`` agrees with the costs, the number of micro-batches and ``size``."""
    entries = [entry for order in top.need("orders").items("devices") for entry in order.items("tasks")]
    tasks = list(schedule.tasks())
    for entry, task in zip(entries, tasks, strict=True):
        if task.stage >= schedule.stages:
            entry.fail(f"stage {task.stage} of {schedule.stages}", "the placement has fewer stages; lengthen it")
    for entry, task, due in zip(entries, tasks, costs.durations(schedule, tasks), strict=True):
        stated = None if isinstance(entry.value, str) else entry.get("dur")
        if stated is not None and abs(stated.number() - due) > 1e-9 * max(1.0, due):
            why = f"{task} has dur {stated.number():g}, but its costs give {due:g}"
            stated.fail(why, 'set "durations" (a value or a list per stage) and "size", and leave "dur" out')


def _whole(value: float) -> float:
    return int(value) if value == int(value) else value


def _one_if_even(values: Sequence[float]) -> float | list[float]:
    """Return one number if all stages are equal, otherwise one per stage."""
    return _whole(values[0]) if len(set(values)) == 1 else [_whole(v) for v in values]


Word = TypeVar("Word", bound=str)


@dataclass(frozen=True, slots=True)
class JsonField:
    """The value at ``path`` (such as ``orders[0][3].kind``) of the document ``source``."""

    value: Any
    source: str
    path: str

    @property
    def where(self) -> str:
        """The location for error messages."""
        return f"{self.source}: {self.path}" if self.path else self.source

    def fail(self, why: str, fix: str) -> NoReturn:
        """Raise an error about this value.

        Raises:
            ScheduleError: always.
        """
        raise ScheduleError(self.where, why, fix)

    def _object(self) -> dict[str, Any]:
        if not isinstance(self.value, dict):
            self.fail(f"expected an object, found {_short(self.value)}", 'write {"key": value, ...}')
        return self.value

    def only(self, known: Sequence[str]) -> None:
        """Check that all keys are ``known``."""
        for key in self._object():
            if key not in known:
                self.fail(f'unknown key "{short(key)}"', nearest(key, known))

    def get(self, key: str) -> JsonField | None:
        """Return the value of ``key``; None if it is missing or null."""
        value = self._object().get(key)
        return None if value is None else JsonField(value, self.source, f"{self.path}.{key}" if self.path else key)

    def need(self, key: str) -> JsonField:
        """Return the value of a required ``key``."""
        result = self.get(key)
        return self.fail(f'"{key}" is missing', f'add "{key}"') if result is None else result

    def items(self, what: str) -> list[JsonField]:
        """Return the elements of a list."""
        if not isinstance(self.value, list):
            self.fail(f"expected a list of {what}, found {_short(self.value)}", "write [ ... ]")
        return [JsonField(v, self.source, f"{self.path}[{i}]") for i, v in enumerate(self.value)]

    def whole(self) -> int:
        """Return a whole number from 0 to 999999; larger ones are typing errors."""
        if isinstance(self.value, bool) or not isinstance(self.value, int) or not 0 <= self.value < 1_000_000:
            self.fail(f"{_short(self.value)} is not a whole number from 0 to 999999", "write for example 3")
        return self.value

    def wholes(self, what: str) -> tuple[int, ...]:
        """Return a list of whole numbers."""
        return tuple(item.whole() for item in self.items(what))

    def number(self) -> float:
        """Return a finite number >= 0 that is small enough to be summed."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            self.fail(f"{_short(value)} is not a number >= 0", "write for example 1.5")
        if value > 1e3 * LONGEST:  # a task of several micro-batches may take a multiple of LONGEST
            self.fail(f"{_short(value)} is too long: times of a step could not be added up", f"use at most {LONGEST:g}")
        return float(value)

    def per_stage(self, stages: int) -> tuple[float, ...]:
        """Return one number per stage, from a number for all stages or a list."""
        if not isinstance(self.value, list):
            return (self.number(),) * stages
        if len(self.value) != stages:
            self.fail(f"{len(self.value)} values for {stages} stages", f"give 1 or {stages} values")
        return tuple(item.number() for item in self.items("numbers"))

    def text(self) -> str:
        """Return a string."""
        if not isinstance(self.value, str):
            self.fail(f"{_short(self.value)} is not text", 'write "..."')
        return self.value

    def flag(self) -> bool:
        """Return a boolean."""
        if not isinstance(self.value, bool):
            self.fail(f"{_short(self.value)} is neither true nor false", "write true or false")
        return self.value

    def choice(self, known: tuple[Word, ...]) -> Word:
        """Return one of the ``known`` strings."""
        for each in known:
            if each == self.value:
                return each
        return self.fail(f"unknown value {_short(self.value)}", nearest(str(self.value), known))

    def fraction(self) -> Fraction:
        """Return a share above 0 and at most 1, given as text such as ``"1/2"`` or as a number."""
        try:
            # Exponents in text are refused, because they may be huge; those of a float are bounded.
            result = Fraction(str(self.value)) if _plain(self.value) else Fraction(0)
        except (ValueError, ZeroDivisionError):
            self.fail(f"{_short(self.value)} is not a fraction", 'write for example "1/2"')
        if not 0 < result <= 1:
            self.fail(f"{_short(self.value)} is not a share", 'use more than 0 and at most 1, as in "1/2"')
        return result


_READERS: dict[str, Callable[[JsonField], Any]] = {
    "name": JsonField.text,
    "placement": _placement,
    "microbatches": JsonField.whole,
    "edges": lambda field: tuple(edge.wholes("stages") for edge in field.items("edges")),
    "size": JsonField.fraction,
    "versions": lambda field: field.choice(VERSIONS),
    "recompute": lambda field: field.choice(RECOMPUTE),
    "w_dep": lambda field: field.choice(W_DEP),
    "skip_first_B": JsonField.flag,
    "experts": lambda field: field.wholes("stages"),
    "exchange": _exchange,
    "frozen": lambda field: field.wholes("stages"),
    "slices": _slices,
    "zero": lambda field: field.wholes("levels"),
    "copies": JsonField.whole,
    "shard_group": JsonField.whole,
}
"""What reads a key of the schedule itself."""
KEYS = (*_READERS, "orders", "durations", "comm", "attention", "attention_grad", "dispatch", "combine", "overlap")


def _plain(value: object) -> bool:
    return not isinstance(value, str) or (len(value) <= 40 and "e" not in value.lower())


def _short(value: object) -> str:
    if isinstance(value, int) and abs(value) >= 10**40:
        return "a number of more than 40 digits"  # Python refuses to write out very long ones
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def load(path: Path) -> tuple[Schedule, CostTable | None]:
    """Read a schedule from the file ``path``, and its costs if it is JSON (the text form has none).

    Raises:
        ScheduleError: the file cannot be read, or is not a schedule.
    """
    source = str(path)
    try:
        text = read_regular(path).decode("utf-8")
    except OSError as error:
        raise ScheduleError(source, error.strerror or str(error), "name a readable schedule file") from error
    except UnicodeDecodeError as error:
        raise ScheduleError(source, f"not text at byte {error.start}", "give JSON or the text form") from error
    if not text.lstrip().startswith(("{", "[")):
        return from_text(text, source), None
    try:
        data = parse_json(text)
    except ValueError as error:
        place = f"{source}:{error.lineno}:{error.colno}" if isinstance(error, json.JSONDecodeError) else source
        why = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise ScheduleError(place, f"not JSON: {why}", "correct the file at that place") from error
    schedule, costs = from_json(data, source)
    return schedule, costs

"""The text form of a schedule, for people to read and write by hand.

    schedule 1f1b
    microbatches 2
    placement 0 1            # one line per replica: the device of stage 0, 1, ...
    device 0: 0F0 0F1 0BW0 0BW1
    device 1: 1F0 1BW0 1F1 1BW1

``0F3|0BW1`` is a pair: both tasks run together. Further lines are present only if they differ from the default:
``edges 0>1 0>2 1>2`` (the stage graph is not a chain), ``size 1/2``, ``versions stash``, ``recompute late``, ``w_dep
grad``, ``skip_first_B``, ``experts 1 4`` (stages of experts alone), ``exchange 4 2`` (copies, and how many of them
divide the experts), ``frozen 0 1`` (stages without a trained parameter), ``slices 4`` (ids are slices of micro-batches;
``size`` may be left out then); ``zero 3 3`` (the ZeRO level of each stage), with ``copies 4`` and ``shard_group 2``
(``Sharding``).
A hand-written file may omit ``schedule``, ``microbatches`` and ``placement``, which follow from the tasks. ``#`` starts
a comment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal, NoReturn, TypeVar, get_args

from raypipe.errors import ScheduleError, nearest
from raypipe.files import short
from raypipe.schedule.garbage_collection import no_collection
from raypipe.schedule.ir import Rules, Schedule, Sharding, StageGraph, Task, Versions
from raypipe.schedule.kinds import BOOKKEEPING, BW, KINDS, TRAITS, Kind

VERSIONS: tuple[Versions, ...] = get_args(Versions)
RECOMPUTE: tuple[Literal["early", "late"], ...] = ("early", "late")
W_DEP: tuple[Literal["B", "grad"], ...] = ("B", "grad")
Word = TypeVar("Word", bound=str)
_KINDS: dict[str, Kind] = {kind: kind for kind in KINDS}
_TASK = re.compile(r"([0-9]{1,6})([A-Za-z]+)((?:[0-9]{1,6}(?:,[0-9]{1,6})*)?)(?:@([0-9]{1,6}))?")
_NUMBER = re.compile(r"[0-9]{1,6}")  # more than six digits is a typing error, not a device
_SHARE = re.compile(r"[0-9]{1,9}(/[0-9]{1,9}|\.[0-9]{0,18})?|\.[0-9]{1,18}")
_PLAIN_NAME = re.compile(r"[\w.+-]+")
_COMMENT = re.compile(r"(?:^|\s)#.*")


def to_text(schedule: Schedule) -> str:
    """Return ``schedule`` as text; ``from_text`` is the exact inverse.

    >>> print(to_text(from_text("device 0: 0F0 0BW0\\n", "example")), end="")
    schedule example
    microbatches 1
    placement 0
    device 0: 0F0 0BW0
    """
    name = schedule.name
    lines = [f"schedule {name if _PLAIN_NAME.fullmatch(name) else json.dumps(name)}"]
    lines.append(f"microbatches {schedule.microbatches}")
    lines += [_words("placement", places) for places in schedule.placement]
    for key, value in unusual(schedule).items():
        words = [f"{src}>{dst}" for src, dst in value] if key == "edges" else value
        words = () if words is True else words if isinstance(words, tuple | list) else (words,)
        lines.append(_words(key, words))
    for d, order in enumerate(schedule.orders):
        words = "".join(f"{'|' if task in schedule.joined else ' '}{task}" for task in order)
        lines.append(f"device {d}:{words}")
    return "\n".join(lines) + "\n"


def unusual(schedule: Schedule) -> dict[str, Any]:
    """Return what of a schedule differs from the default, by its name in files, in the order of their lines."""
    rules, sharding = schedule.rules, schedule.sharding
    result: dict[str, tuple[Any, Any]] = {
        "edges": (schedule.graph.edges, StageGraph.chain(schedule.stages).edges),
        "size": (schedule.size, 1),
        "versions": (schedule.versions, "flush"),
        "recompute": (rules.recompute, "early"),
        "w_dep": (rules.w_dep, "B"),
        "skip_first_B": (rules.skip_first_b, False),
        "experts": (rules.experts, ()),
        "exchange": (schedule.exchange, (1, 1)),
        "frozen": (rules.frozen, ()),
        "slices": (rules.slices, 1),
    }
    if sharding is not None:
        result["zero"], result["copies"] = (sharding.levels, None), (sharding.copies, 1)
        result["shard_group"] = sharding.group, None
    return {key: value for key, (value, usual) in result.items() if value != usual}


def parse_task(text: str, where: str = "task") -> Task:
    """Read one task such as ``2F0``, ``2F0,1``, ``2F0@1`` or ``2AR``.

    Raises:
        ScheduleError: ``text`` is not a task; the message begins with ``where``.

    >>> parse_task("2F0,1@3")
    Task(kind='F', stage=2, mbs=(0, 1), replica=3)
    """
    match = _TASK.fullmatch(text)
    if not match:
        raise ScheduleError(
            where, f'"{short(text)}" is not a task', "write stage, kind, micro-batch, as in 2F0, 2BW0,1 or 2F0@1"
        )
    stage, letters, mbs, replica = match.groups()
    kind = _KINDS.get(letters)
    if kind is None:
        raise ScheduleError(
            where, f'"{short(text)}" has the unknown kind "{short(letters)}"', f"kinds are {' '.join(KINDS)}"
        )
    if (kind in BOOKKEEPING) == bool(mbs):
        why = "carries no micro-batch" if mbs else "lacks its micro-batch"
        raise ScheduleError(where, f'"{text}" {why}', f"write {stage}{kind}" + ("" if mbs else "0"))
    return Task(kind, int(stage), tuple(map(int, mbs.split(","))) if mbs else (), int(replica or 0))


def read_share(text: str) -> Fraction | None:
    """Parse a number such as ``1/2`` or ``0.5``; else None. Exponents are refused, as they may be huge.

    >>> read_share("1/2"), read_share("1e-999999999")
    (Fraction(1, 2), None)
    """
    try:
        return Fraction(text) if _SHARE.fullmatch(text) else None
    except ZeroDivisionError:
        return None


@no_collection()
def from_text(text: str, source: str = "schedule") -> Schedule:
    """Read the text form; ``source`` (a file name) begins the location in every error.

    ``verify`` checks whether the schedule can run.

    Raises:
        ScheduleError: the text is not in this form; it names line and column.
    """
    return _TextReader(source).read(text)


def built(name: str, orders: Sequence[tuple[Task, ...]], given: Mapping[str, Any], source: str) -> Schedule:
    """Return the schedule of a file; what it leaves out follows from its tasks, or is the default.

    Args:
        name: of the schedule.
        orders: per device; those of further devices of the placement are empty.
        given: what else the file states, by its name there (``unusual``, ``placement``, ``microbatches``).
        source: the file's name, for errors.

    Raises:
        ScheduleError: as ``infer_placement``.
    """
    placement = tuple(given.get("placement", ())) or infer_placement(orders, source)
    stages, devices = len(placement[0]), 1 + max(d for places in placement for d in places)
    skip, options = given.get("skip_first_B", False), ("recompute", "w_dep", "experts", "frozen", "slices")
    rules = Rules(skip_first_b=skip, **{key: given[key] for key in options if key in given})
    sharding = None
    if "zero" in given:
        sharding = Sharding(levels=given["zero"], copies=given.get("copies", 1), group=given.get("shard_group"))
    seen = 1 + max((mb for order in orders for task in order for mb in task.mbs), default=-1)
    return Schedule(
        name=name,
        placement=placement,
        orders=(*orders, *[()] * (devices - len(orders))),
        microbatches=given.get("microbatches", seen),
        graph=StageGraph(stages, given.get("edges", StageGraph.chain(stages).edges)),
        rules=rules,
        size=given.get("size", Fraction(1, rules.slices)),
        versions=given.get("versions", "flush"),
        sharding=sharding,
        joined=frozenset(given.get("joined", ())),
        exchange=given.get("exchange", (1, 1)),
    )


def infer_placement(orders: Sequence[Sequence[Task]], source: str) -> tuple[tuple[int, ...], ...]:
    """Return the placement that follows from the orders of a hand-written schedule: per replica, each stage's device.

    Raises:
        ScheduleError: a stage of a replica is on no device or on two.
    """
    result: dict[tuple[int, int], int] = {}
    for device, order in enumerate(orders):
        for task in order:
            other = result.setdefault((task.replica, task.stage), device)
            if other != device:
                why = f"stage {task.stage} of replica {task.replica} has tasks on device {other} and on device {device}"
                raise ScheduleError(source, why, "move them to one device, or mark the second copy's tasks: 2F0@1")
    if not result:
        raise ScheduleError(source, "there is no task on any device", "add lines such as: device 0: 0F0 0BW0")
    replicas, stages = (1 + max(key[i] for key in result) for i in (0, 1))
    for replica in range(replicas):
        for stage in range(stages):
            if (replica, stage) not in result:
                why = f"stage {stage} of replica {replica} has no task"
                raise ScheduleError(source, why, "number stages and replicas from 0, or state the placement")
    return tuple(tuple(result[r, s] for s in range(stages)) for r in range(replicas))


def _words(head: str, items: Iterable[object]) -> str:
    return " ".join([head, *map(str, items)])


class _TextReader:
    """Parses a text line by line and keeps the line number for messages."""

    def __init__(self, source: str) -> None:
        self.source, self.line = source, 0
        self.orders: dict[int, tuple[Task, ...]] = {}
        self.given: dict[str, Any] = {}
        self.joined: set[Task] = set()

    def fail(self, why: str, fix: str) -> NoReturn:
        raise ScheduleError(f"{self.source}:{self.line}", why, fix)

    def read(self, text: str) -> Schedule:
        for self.line, raw in enumerate(text.splitlines(), 1):
            line = (raw if raw.startswith('schedule "') else _COMMENT.sub("", raw)).rstrip()
            if line.strip():
                self.one(line)
        if not self.orders:
            self.fail("no device has tasks", "add lines such as: device 0: 0F0 0BW0")
        if "zero" not in self.given and {"copies", "shard_group"} & self.given.keys():
            self.fail("copies and shard_group belong to a sharded schedule", "state the level of each stage: zero 3 3")
        name = self.given.pop("schedule", re.split(r"[/\\]", self.source)[-1].split(".")[0] or "schedule")
        orders = [self.orders.get(d, ()) for d in range(1 + max(self.orders))]
        return built(name, orders, {**self.given, "joined": self.joined}, self.source)

    def one(self, line: str) -> None:
        key, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        if key == "device":
            self.device(line)
            return
        if key not in _LINES:
            self.fail(f'unknown key "{short(key)}"', nearest(key, (*_LINES, "device")))
        if key in self.given and key != "placement":
            self.fail(f'"{key}" is given twice', "keep one of the two lines")
        self.given[key] = _LINES[key](self, rest)

    def placement(self, rest: str) -> list[tuple[int, ...]]:
        """Return the placement so far, with a replica more."""
        rows = [*self.given.get("placement", ()), self.wholes(rest, "a device")]
        if len(rows[-1]) != len(rows[0]) or not rest:
            self.fail(f"{len(rows[-1])} stages here", "give every replica the same stages, at least one")
        return rows

    def share(self, rest: str) -> Fraction:
        result = read_share(rest)
        if result is None or not 0 < result <= 1:
            self.fail(f'"{short(rest)}" is not a share', "write the share of a micro-batch that one id is: size 1/2")
        return result

    def slices(self, rest: str) -> int:
        return self.whole(rest, "a number of slices") or self.fail(
            "0 slices", "leave the line out, or write for example: slices 4"
        )

    def exchange(self, rest: str) -> tuple[int, ...]:
        result = self.wholes(rest, "a number of copies")
        return (
            result if len(result) == 2 else self.fail(f"{len(result)} numbers", "give copies and a group: exchange 4 2")
        )

    def wholes(self, rest: str, what: str) -> tuple[int, ...]:
        return tuple(self.whole(word, what) for word in rest.split())

    def device(self, line: str) -> None:
        head, colon, _ = line.partition(":")
        number = head.split(maxsplit=1)[1] if colon and len(head.split()) == 2 else None
        if number is None or not _NUMBER.fullmatch(number):
            self.fail("a device line needs a number and a colon", "write for example: device 0: 0F0 0BW0")
        if int(number) in self.orders:
            self.fail(f"device {number} is given twice", "put its tasks on one line")
        tasks = []
        for word in re.finditer(r"(\|?)([^\s|]+|(?<=\|))", line[len(head) + 1 :]):
            try:
                tasks.append(parse_task(word.group(2)))
            except ScheduleError as error:
                at = f"{self.source}:{self.line}:{len(head) + 2 + word.start(2)}"
                raise ScheduleError(at, error.why, error.fix) from None
            if word.group(1):
                self.joined.add(tasks[-1])
        self.orders[int(number)] = tuple(tasks)

    def name(self, text: str) -> str:
        if not text.startswith('"'):
            return text
        try:
            return str(json.loads(text))
        except ValueError:
            return self.fail("the quoted name does not end", 'write: schedule "a name"')

    def whole(self, word: str, what: str) -> int:
        if not _NUMBER.fullmatch(word):
            self.fail(f'"{short(word)}" is not {what}', "write a whole number from 0 to 999999")
        return int(word)

    def edge(self, word: str) -> tuple[int, int]:
        src, _, dst = word.partition(">")
        if not (_NUMBER.fullmatch(src) and _NUMBER.fullmatch(dst) and int(src) < int(dst)):
            self.fail(f'"{short(word)}" is not an edge', "write an earlier stage, >, a later stage: 0>1")
        return int(src), int(dst)

    def choice(self, word: str, known: tuple[Word, ...]) -> Word:
        for each in known:
            if each == word:
                return each
        return self.fail(f'unknown value "{short(word)}"', nearest(word, known))


_LINES: dict[str, Callable[[_TextReader, str], Any]] = {
    "schedule": _TextReader.name,
    "microbatches": lambda reader, rest: reader.whole(rest, "microbatches"),
    "placement": _TextReader.placement,
    "edges": lambda reader, rest: tuple(map(reader.edge, rest.split())),
    "size": _TextReader.share,
    "versions": lambda reader, rest: reader.choice(rest, VERSIONS),
    "recompute": lambda reader, rest: reader.choice(rest, RECOMPUTE),
    "w_dep": lambda reader, rest: reader.choice(rest, W_DEP),
    "skip_first_B": lambda reader, rest: True,
    "experts": lambda reader, rest: reader.wholes(rest, "a stage"),
    "exchange": lambda reader, rest: reader.exchange(rest),
    "frozen": lambda reader, rest: reader.wholes(rest, "a stage"),
    "slices": _TextReader.slices,
    "zero": lambda reader, rest: reader.wholes(rest, "a ZeRO level"),
    "copies": lambda reader, rest: reader.whole(rest, "a number of copies"),
    "shard_group": lambda reader, rest: reader.whole(rest, "a number of copies"),
}
"""What reads the rest of a line, by its first word."""


# Export to the compute-only CSV that ``torch.distributed.pipelining`` loads (``_PipelineScheduleRuntime._load_csv``).
#
# The CSV has one row per device and one action per cell: ``2F0``, ``2I0`` (our B), ``2W0``, ``2B0`` (our BW), and
# ``(2F3;1B0)OVERLAP_F_B`` for the pair ``2F3|1BW0``. PyTorch
# adds messages, gathers and gradient reductions itself. It supports chains of stages on one device each, and plain
# micro-batches; everything else is refused rather than silently changed.
#
# Source: ``torch/distributed/pipelining/schedules.py``, ``_Action.from_str`` and ``_validate_schedule`` (2.13).


def to_torch_csv(schedule: Schedule) -> str:
    """Return the CSV text, without trailing all-reduces and updates, which PyTorch and the caller's optimizer do.

    Raises:
        ScheduleError: PyTorch's loader cannot express the schedule; it names the task or rule.
    """
    if schedule.replicas > 1:
        first, second = schedule.placement[0][0], schedule.placement[1][0]
        _refuse(
            schedule, f"{schedule.replicas} replicas put stage 0 on devices {first} and {second}; torch supports one"
        )
    if schedule.graph != StageGraph.chain(schedule.stages):
        _refuse(schedule, "its stage graph is not a chain")
    if schedule.versions != "flush":
        _refuse(schedule, f'it keeps weight versions ("{schedule.versions}"), torch updates once, after the step')
    if schedule.rules.slices > 1:
        _refuse(schedule, f"its micro-batches are cut into {schedule.rules.slices} slices, which torch would mix up")
    lines = []
    for device, order in enumerate(schedule.orders):
        end = len(order)
        while end and order[end - 1].kind in BOOKKEEPING:
            end -= 1
        had_b: set[tuple[int, int]] = set()
        cells: list[str] = []
        for task in order[:end]:
            cell = _cell(schedule, device, task, had_b)
            if task in schedule.joined:
                if task.kind != BW:
                    _refuse(
                        schedule, f"{task} on device {device} is half of a pair; torch pairs F with joint backwards"
                    )
                cell = f"({cells.pop()};{cell})OVERLAP_F_B"
            cells.append(cell)
        if not cells:
            _refuse(schedule, f"device {device} has no task")
        lines.append(",".join(cells))
    return "\n".join(lines) + "\n"


def _cell(schedule: Schedule, device: int, task: Task, had_b: set[tuple[int, int]]) -> str:
    if task.kind in BOOKKEEPING:
        _refuse(schedule, f"{task} on device {device} comes before the end of the step")
    traits = TRAITS[task.kind]
    if traits.torch_letter is None:
        _refuse(schedule, f"{task} on device {device} is a {traits.what} task; torch has none")
    if len(task.mbs) > 1:
        _refuse(schedule, f"{task} on device {device} carries {len(task.mbs)} micro-batches")
    key = (task.stage, task.mbs[0])
    if task.kind == "B":
        had_b.add(key)
    elif task.kind == "W" and key not in had_b:
        _refuse(schedule, f"{task} on device {device} runs with no B of its own before it; torch's W needs one")
    return f"{task.stage}{traits.torch_letter}{task.mbs[0]}"


def from_torch_csv(text: str, source: str = "csv") -> Schedule:
    """Read a CSV of compute actions: one that ``to_torch_csv`` has written, or one that PyTorch prints.

    Raises:
        ScheduleError: a cell is no compute action; it names the row and the cell.
    """
    kinds: dict[str, Kind] = {traits.torch_letter: kind for kind, traits in TRAITS.items() if traits.torch_letter}
    orders: list[tuple[Task, ...]] = []
    joined: set[Task] = set()
    for row, line in enumerate(text.splitlines(), 1):
        order: list[Task] = []
        for cell in filter(None, map(str.strip, line.split(","))):
            pair = _OVERLAP.fullmatch(cell)
            for n, word in enumerate(pair.groups() if pair else (cell,)):
                match = _ACTION.fullmatch(word)
                if match is None:
                    fix = "give actions such as 2F0, 2I0, 2W0, 2B0 or (2F1;0B0)OVERLAP_F_B"
                    raise ScheduleError(f"{source}:{row}", f'"{short(cell)}" is not a compute action', fix)
                order.append(Task(kinds[match[2]], int(match[1]), (int(match[3]),)))
                if n:
                    joined.add(order[-1])
        orders.append(tuple(order))
    return built(re.split(r"[/\\]", source)[-1].split(".")[0] or "csv", orders, {"joined": joined}, source)


_ACTION = re.compile(r"([0-9]{1,6})([FIWB])([0-9]{1,6})")
_OVERLAP = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")


def _refuse(schedule: Schedule, why: str) -> NoReturn:
    raise ScheduleError(
        f'schedule "{schedule.name}" as torch CSV',
        why,
        "choose another schedule for --csv, or use --json, which supports all",
    )

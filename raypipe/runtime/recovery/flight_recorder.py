"""A flight recorder: where each device is in its step, readable after its process was killed, stopped or hangs.

A device writes its place, 40 bytes, into a file that it has mapped into memory: before it waits for a message, and
before a task. Nothing is written to a disk meanwhile, and the kernel keeps the page whatever becomes of the process.
When something fails, the driver has each node read what its devices have left there, and names the first stuck task:
from the device that failed along those that each waits for, to the one that waits for nobody.
"""

from __future__ import annotations

import json
import mmap
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypipe.runtime.hosts.node_files import node_folder, run_key
from raypipe.runtime.setup.communicators import Location
from raypipe.schedule.kinds import NETWORK
from raypipe.schedule.lowering.programs import Message, Program

FOLDER = "flight"
"""In the directory of the run, or where a node does not share that, beside its data."""
_PLACE = struct.Struct("=qqqdq")
"""Step from 0, position in the program, message waited for (from 1; 0: none), time, bytes of the program's text."""
_PAGE = mmap.PAGESIZE
READ_S = 20.0
"""Time that other nodes have to read theirs: a process may have to start there."""
STOPPED = "is stopped"
"""What became of a process that was sent SIGSTOP, and not SIGCONT yet."""


class FlightRecorder:
    """Writes one device's place.

    Args:
        folder: of the run's places; made if it is not there.
        rank: the process's.
        device: its number in the schedule.
        title: how errors call the device.
        pid: the process's id.

    Raises:
        OSError: there is no room for a page and the text of a program.
    """

    def __init__(self, folder: Path, rank: int, device: int, title: str, pid: int) -> None:
        folder.mkdir(exist_ok=True)
        self._about = {"rank": rank, "device": device, "title": title, "pid": pid}
        self._program: Program | None = None
        self._bytes, self._step = 0, -1
        # Another inode than that of a process which had this rank before, and may still have it mapped.
        path = _path(folder, rank)
        path.unlink(missing_ok=True)
        self._file = path.open("w+b", buffering=0)
        self._file.write(bytes(_PAGE))  # blocks of its own: on a full disk, a page without would end the process
        self._map = mmap.mmap(self._file.fileno(), _PAGE)
        self._write([])
        self.at(0)

    def _write(self, tasks: Sequence[tuple[str, str, list[tuple[int, str]]]]) -> None:
        text = json.dumps(self._about | {"tasks": tasks}).encode()
        self._file.seek(_PAGE)
        self._file.write(text)
        self._bytes = len(text)

    def begin(self, program: Program, step: int) -> None:
        """Begin a step, from 0, or a validation batch; ``program`` is what ``at`` counts positions in."""
        if program is not self._program:
            self._program = program
            self._write(
                [(str(a.task), a.task.kind, [(m.src_device, _named(m)) for m in a.receives]) for a in program.actions]
            )
        self._step = step
        self.at(0)

    def at(self, position: int, awaits: int = 0) -> None:
        """Note the task at ``position``: it runs, or waits for the message of its receives that ``awaits`` counts."""
        _PLACE.pack_into(self._map, 0, self._step, position, awaits, time.time(), self._bytes)


def _named(message: Message) -> str:
    what = "activation" if message.direction == "act" else "gradient"
    return f"{what} of micro-batch {message.mb}, stage {message.src_stage} -> {message.dst_stage}"


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}"


@dataclass(frozen=True, slots=True)
class DevicePlace:
    """Where a device is, or was when its process ended."""

    rank: int
    device: int
    title: str
    step: int
    """From 1; of a validation, the batch."""
    task: str
    """The task that it runs or waits to run; "" where it has done all of the step."""
    collective: bool
    """Whether the task waits for other devices by itself: a collective, or the update."""
    finished: str
    """The last task that it has finished in the step; "" where there is none."""
    awaits: str
    """The message that the task waits for; "" if none."""
    peer: int
    """The device that is to send it; -1 if none."""
    seconds: float
    """Since when, by the clocks of two hosts."""
    process: str = ""
    """What became of the process: ``is gone``, ``is stopped``; "" if it lives."""

    def __str__(self) -> str:
        if not self.task:
            doing = f"is between steps, after step {self.step}" if self.step else "has not begun a step"
        elif self.awaits:
            doing = f"waits with {self.task} of step {self.step} for device {self.peer} ({self.awaits})"
        else:
            doing = f"is in {self.task} of step {self.step}"
        last = f"; finished last: {self.finished}" if self.finished and self.task else ""
        process = f"; its process {self.process}" if self.process else ""
        return f"{self.title} · device {self.device} {doing}, for {max(0.0, self.seconds):.1f} s{last}{process}"


def read_places(folder: Path, pids: Mapping[int, int]) -> list[DevicePlace]:
    """Read the places of some ranks on the node where they are; those that have left none are not there.

    ``pids``: by rank, the processes that are to have them; what others have left is not read.
    """
    result = []
    for rank, pid in sorted(pids.items()):
        try:
            held = _path(folder, rank).read_bytes()
            step, position, awaits, since, size = _PLACE.unpack_from(held)
            left = json.loads(held[_PAGE : _PAGE + size])
        except (OSError, ValueError, struct.error):
            continue  # it has not come so far, or was writing when it was killed
        if left["pid"] != pid:
            continue
        tasks = left["tasks"]
        task, kind, receives = tasks[position] if position < len(tasks) else ("", "", [])
        peer, message = receives[awaits - 1] if awaits else (-1, "")
        finished = tasks[position - 1][0] if position else ""
        collective = not awaits and (kind == "U" or kind in NETWORK)
        seconds = time.time() - since
        title, device = left["title"], left["device"]
        result.append(
            DevicePlace(
                rank, device, title, step + 1, task, collective, finished, message, peer, seconds, _process(pid)
            )
        )
    return result


def _process(pid: int) -> str:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "is gone"
    return {"T": STOPPED, "t": STOPPED, "Z": "is gone"}.get(state, "")


def read_left(folder: Path | str, pids: Mapping[int, int]) -> list[DevicePlace]:
    """Read as ``read_places`` does; ``folder``: or a run's key, on a node that does not share the run's directory."""
    return read_places(folder if isinstance(folder, Path) else node_folder(folder) / FOLDER, pids)


@dataclass(frozen=True, slots=True)
class AskedPlaces:
    """The places of a run's devices, of which other nodes have been asked to read theirs."""

    here: list[DevicePlace]
    """Those of this node."""
    asked: list[Any]

    def told(self, timeout_s: float = READ_S) -> list[DevicePlace]:
        """Return all places by rank, but those of nodes that do not answer within ``timeout_s``."""
        result = list(self.here)
        answered, late = (
            ray.wait(self.asked, num_returns=len(self.asked), timeout=timeout_s) if self.asked else ([], [])
        )
        for ref in answered:
            try:
                result += ray.get(ref)
            except RayError:
                continue  # the node is gone
        for ref in late:
            ray.cancel(ref)
        return sorted(result, key=lambda one: one.rank)


def ask_places(
    directory: Path, locations: Sequence[Location], apart: Mapping[str, str], idle: Mapping[int, Any]
) -> AskedPlaces:
    """Have all nodes read the places of their devices.

    Args:
        directory: of the run.
        locations: of the workers, by rank.
        apart: the nodes that do not share the directory.
        idle: workers by rank that can read them, as they run nothing; on a node without one, a process has to start.
    """
    of_nodes: dict[str, dict[int, int]] = {}
    reads: dict[str, Any] = {}
    for at in locations:
        of_nodes.setdefault(at.peer.node, {})[at.peer.rank] = at.pid
        if at.peer.rank in idle:
            reads[at.peer.node] = idle[at.peer.rank].read_left
    here = ray.get_runtime_context().get_node_id()
    own = read_places(directory / FOLDER, of_nodes.pop(here, {}))
    asked = []
    for node, pids in of_nodes.items():
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        task = ray.remote(read_left).options(num_cpus=0, scheduling_strategy=there, max_retries=0)
        folder = run_key(directory) if node in apart else directory / FOLDER
        asked.append(reads.get(node, task).remote(folder, pids))
    return AskedPlaces(own, asked)


def places_of(directory: Path, locations: Sequence[Location], apart: Mapping[str, str]) -> list[DevicePlace]:
    """Return where all devices of a run are, by rank; those of nodes that do not answer are not there.

    The arguments are those of ``ask_places``.
    """
    return ask_places(directory, locations, apart, {}).told()


def first_stuck(places: Sequence[DevicePlace]) -> DevicePlace | None:
    """Return the device that the others wait for, directly or through one another; None if that cannot be told.

    One that waits for a message waits for its sender, one in a collective for those that are not in theirs. Of several
    at the end of such a chain, those whose process does not run come first, then the one that is furthest behind.

    >>> behind = DevicePlace(1, 1, "stage 1", 4, "1F0", False, "", "", -1, 9.0)
    >>> waits = DevicePlace(0, 0, "stage 0", 4, "0BW0", False, "0F3", "grad 1->0 of 0", 1, 8.0)
    >>> first_stuck([waits, behind]).title
    'stage 1'
    """
    known = {one.device for one in places}
    last = [one for one in places if not (one.awaits and one.peer in known) and not one.collective]
    ends = last or [one for one in places if one.collective] or list(places)  # else: each waits for another
    return min(ends, key=lambda one: (not one.process, one.step, -one.seconds), default=None)


def stuck_message(places: Sequence[DevicePlace]) -> str:
    """Return what the places say: a sentence about the first stuck task, then one about each other device."""
    first = first_stuck(places)
    if first is None or not any(one.task or one.process for one in places):  # all have done what they were asked for
        return ""
    deadlock = first.awaits and not first.process and first.peer in {one.device for one in places}
    lines = [f"all devices wait for one another: {first}" if deadlock else f"first stuck: {first}"]
    return "\n  ".join([*lines, *(str(one) for one in places if one is not first)])

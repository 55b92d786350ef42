"""Say what the server's own layer costs a small call, in processor time: no Ray, no HTTP, workers that need no time.

    python -m tests.bench.service.layer [--calls 1000] [--rounds 4]

Calls of two sequences of eight tokens are accepted, written down, started, ended and fetched, with an update every 50
and a snapshot every 64, as a session makes it. What is kept of earlier calls grows from round to round: a call must not
cost more for it.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from raypipe.runtime.session.call_data import Limits
from raypipe.runtime.session.session import KEPT_NAME, NOTE, SNAPSHOT, Call, Outputs, Updated
from raypipe.service.server import CreateModel, OptimStep
from raypipe.service.service import Service
from raypipe.service.wire import _CLASSES
from tests.bench.command import options

EVERY, AHEAD = 50, 8
T = TypeVar("T")


class Done(Generic[T]):
    """A call that has ended; its result is made when it is asked for."""

    def __init__(self, read: Callable[[], T]) -> None:
        self.result = read


class NoWorkers:
    """A session whose calls take no time; it has what ``Service`` asks of one."""

    limits, mixes = Limits(256, 128), True

    def __init__(self, directory: Path) -> None:
        self.directory, self._calls, self._updates = directory, 0, 0
        self._snapshots: deque[Callable[[], None]] = deque()
        directory.mkdir()

    def save(self, folder: Path, slot: int = 0) -> Done[Path]:
        folder.mkdir(parents=True)
        return Done(lambda: folder)

    def load(self, *_: Any, **__: Any) -> Done[None]:
        return Done(lambda: None)

    def wait_for_room(self, most: int = 0) -> None:
        while self._snapshots:
            self._snapshots.popleft()()

    def together(self, kind: str, calls: Sequence[Call]) -> list[Done[Outputs]]:
        self._calls += len(calls)
        return [Done(lambda one=one: Outputs(1.0, [np.zeros(len(d.tokens)) for d in one.data])) for one in calls]

    def optim_step(self, adam: Any, slot: int, note: Callable[[int], bytes]) -> Done[Updated]:
        self._updates += 1
        updates = self._updates
        if self._calls >= SNAPSHOT:
            self._calls = 0
            self._snapshots.append(lambda: self._snapshot(updates, note))
        return Done(lambda: Updated(updates, 1.0, 0.0, 0.0))

    def _snapshot(self, number: int, note: Callable[[int], bytes]) -> None:
        old = list(self.directory.glob(KEPT_NAME.format(slot=0, number="*")))
        (partial := self.directory / ".partial").mkdir()
        (partial / NOTE).write_bytes(note(number))
        partial.rename(self.directory / KEPT_NAME.format(slot=0, number=number))
        for folder in old:
            (folder / NOTE).unlink()
            folder.rmdir()


def message(model: str, number: int) -> bytes:
    """Return a ``forward_backward`` request."""
    request = _CLASSES["ForwardBackwardRequest"](model_id=model, seq_id=number, loss_fn="cross_entropy")
    for _ in range(2):
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = np.arange(8, dtype="<i4").tobytes()
        for name, dtype, kind in (("target_tokens", "<i8", 2), ("weights", "<f4", 1)):
            tensor = datum.loss_fn_inputs[name]
            tensor.dense, tensor.dtype = np.ones(8, dtype).tobytes(), kind
            tensor.shape.append(8)
    return request.SerializeToString()


def main() -> int:
    """Run all rounds."""
    asked = options(__doc__, calls=1000, rounds=4)
    with tempfile.TemporaryDirectory(prefix="raypipe-bench-layer-") as name:
        service = Service(NoWorkers(Path(name) / "session"), "bench", Path(name))
        service.begin()
        model = CreateModel(session_id=service.create_session(), model_seq_id=0, base_model="bench")
        _, trained = service.create_model(model, model.model_dump_json().encode())
        number, queued = 1, deque[str]()

        def fetch(most: int) -> None:
            while len(queued) > most:
                found = service.requests.find(queued.popleft())
                found.future.result()
                found.fetched_at = time.monotonic()

        for turn in range(asked.rounds):
            began = time.process_time()
            for call in range(asked.calls):
                queued.append(service.forward_backward(message(trained, number))[0])
                if call % EVERY == EVERY - 1:
                    number += 1
                    step = OptimStep(model_id=trained, adam_params={}, seq_id=number)
                    queued.append(service.optim_step(step, step.model_dump_json().encode())[0])
                number += 1
                fetch(AHEAD)
            fetch(0)
            each_ms = 1e3 * (time.process_time() - began) / asked.calls
            print(f"after {turn * asked.calls} calls: {each_ms:.2f} ms of a processor each", flush=True)
        service.requests.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A session as a named actor, for other code on the same Ray, such as a loop of reinforcement learning.

    RemoteSession.start(load_job("job.yaml"), name="trainer")

and in any other process of the cluster::

    session = RemoteSession.find("trainer")
    outputs = session.forward_backward([arrays(tokens, target_tokens=targets, weights=weights)])
    update = session.optim_step(AdamW(lr=1e-4))
    print(ray.get(outputs).loss_sum, ray.get(update).grad_norm)

Calls return references at once. Those of one ``RemoteSession`` run in its order; several may use one session, with a
slot each. Workers that die are started anew as in ``Session``; if the actor dies, its workers and slots go with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import ray

from raypipe.errors import RunError
from raypipe.job.data_spec import DataSpec
from raypipe.job.spec import JobSpec
from raypipe.observe.run_dir import RECORD
from raypipe.observe.run_log import log_event
from raypipe.runtime.cluster.connect import connect
from raypipe.runtime.hosts.rank_order import kinds_of
from raypipe.runtime.hosts.reserve import reserve
from raypipe.runtime.session.call_data import Datum, Kind
from raypipe.runtime.session.session import Call, Session
from raypipe.runtime.session.session_job import check_job
from raypipe.runtime.session.session_worker import AdamW, StageSession
from raypipe.runtime.session.slots import Adapters
from raypipe.runtime.session.token_losses import NO_OPTIONS, Options
from raypipe.runtime.worker.worker_group import start_worker_group, titles_of
from raypipe.service.run_files import check_served
from raypipe.train import Prepared, prepare_run

SERVED = {"tensor": 1, "experts": 1, "context": 1, "slices": 1, "shard": "none"}
"""Of a plan's keys, those that sessions have no other values of (``check_job``)."""
Say = Callable[[str], None]


@contextlib.contextmanager
def opened(job: JobSpec, directory: Path | None, say: Say, resume: bool = False) -> Iterator[tuple[Prepared, Session]]:
    """Open a session of a job, whose workers are stopped when the block ends.

    Args:
        job: the job; its data and most of ``train`` are those of ``raypipe train`` and count for nothing here.
        directory: of the run, for the plan and snapshots; None for a new one.
        say: called with what there is to say, line by line.
        resume: whether to go on with the plan of the server that ran in ``directory``, if one did.

    Raises:
        SpecError: sessions cannot run the job.
        DevicesError: the devices were not free within ``train.wait_for_devices_s``.
    """
    resume = resume and (directory is None or (directory / RECORD).exists())
    prepared = prepare_run(of_calls(job), directory, resume, say=say, check=check_served)
    check_job(prepared.job, prepared.plan)
    tensor, train = prepared.plan.parallel.tensor, prepared.job.train
    count = prepared.schedule.devices * tensor
    request = connect(count, together=tensor)
    reservation = reserve(count, request, train.wait_for_devices_s, say, tensor, kinds_of(prepared.plan))
    try:
        workers = start_worker_group(
            titles_of(prepared.schedule, prepared.plan.parallel.replicas, tensor),
            reservation,
            StageSession,
            train.wait_for_devices_s,
            say,
            numbering=prepared.plan.numbering(),
        )
    except BaseException:
        reservation.give_back()
        raise
    try:
        session = Session(prepared.job, prepared.plan, prepared.directory / "session", workers)
        counts = session.set_up()
        devices = [
            {"name": title, "node": at.peer.node, "device": at.peer.device, "pid": at.pid, "parameters": count}
            for title, at, count in zip(workers.titles, workers.locations, counts, strict=True)
        ]
        log_event(prepared.directory, "started", devices=devices, resumed_from=None)
        yield prepared, session
    finally:
        workers.stop()


def of_calls(job: JobSpec) -> JobSpec:
    """Return the job as it is planned: for what sessions have, where the planner chooses, and with text as its data.

    The model is then built for tokens alone, whatever arrays the job names. Keys that the job gives stay, and are
    refused by name where sessions do not have them.
    """
    parallel = job.parallel
    if parallel.auto:
        rest = {key: value for key, value in SERVED.items() if key not in parallel.given}
        parallel = parallel.model_copy(update=rest)
    return job.model_copy(update={"data": DataSpec(type="bytes", path="stdlib"), "parallel": parallel})


TURN_S = 60.0
"""A call whose predecessor has not come for so long fails: it was lost on the way."""
AT_ONCE = 256
"""Calls that the actor takes before the first of them has ended."""


class SessionActor:
    """The process of the actor; ``RemoteSession`` calls it.

    Ray may deliver calls to an asynchronous actor in another order than they were made in, as large arguments travel by
    themselves. So they are numbered.
    """

    def __init__(self, job: JobSpec, directory: Path | None) -> None:
        self._job, self._directory = job, directory
        self._stack = ExitStack()
        self._session: Session | None = None
        self._run = ""
        self._next: defaultdict[str, int] = defaultdict(int)
        self._turns = asyncio.Condition()

    async def open(self) -> str:
        """Start the workers, and return the directory of the run."""

        def start() -> str:
            prepared, self._session = self._stack.enter_context(opened(self._job, self._directory, print))
            return str(prepared.directory)

        self._run = await asyncio.to_thread(start)
        return self._run

    async def directory(self) -> str:
        """Return the directory of the run."""
        return self._run

    async def call(self, caller: str, number: int, method: str, *arguments: Any) -> Any:
        """Call a method of the session when its turn has come, and return its result."""
        async with self._turns:
            try:
                await asyncio.wait_for(self._turns.wait_for(lambda: self._next[caller] == number), TURN_S)
            except asyncio.TimeoutError:
                raise RunError(
                    method, f"call {self._next[caller]} has not come in {TURN_S:g} s", "call again"
                ) from None
            try:
                queued = await asyncio.to_thread(getattr(self._session, method), *arguments)
            finally:
                self._next[caller] += 1
                self._turns.notify_all()
        if not isinstance(queued, list):
            return await asyncio.to_thread(queued.result)
        results = [await asyncio.to_thread(one.result) for one in queued]
        return results if len(results) > 1 else results[0]  # Ray takes the values of several references as a list

    async def close(self) -> None:
        """Stop the workers."""
        await asyncio.to_thread(self._stack.close)


class RemoteSession:
    """Calls on a session in an actor. Every method returns a reference, whose value ``ray.get`` waits for.

    Args:
        actor: of ``find`` or ``ray.get_actor``; may be sent to other processes, which make a ``RemoteSession`` of it.
    """

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self._caller, self._numbers = uuid.uuid4().hex, itertools.count()

    @classmethod
    def start(
        cls, job: JobSpec, name: str, directory: Path | None = None, lifetime: Literal["detached"] | None = None
    ) -> RemoteSession:
        """Start a session of a job in an actor of this name, and wait until its workers are ready.

        Args:
            job: as for ``raypipe serve``.
            name: of the actor, unique in the namespace.
            directory: of the run, on the actor's node; None for a new one.
            lifetime: ``detached`` to outlive this process, until ``stop``.

        Raises:
            ray.exceptions.RayTaskError: the job cannot be run; its cause is what ``raypipe serve`` raises.
            ValueError: there is an actor of this name.
        """
        made = ray.remote(SessionActor).options(name=name, num_cpus=0, max_concurrency=AT_ONCE, lifetime=lifetime)
        session = cls(made.remote(job, directory))
        try:
            ray.get(session.actor.open.remote())
        except BaseException:
            ray.kill(session.actor)
            raise
        return session

    @classmethod
    def find(cls, name: str, namespace: str | None = None) -> RemoteSession:
        """Return the session of an actor that ``start`` started, here or elsewhere.

        Raises:
            ValueError: there is none.
        """
        return cls(ray.get_actor(name, namespace))

    def directory(self) -> Path:
        """Return the directory of the session's run, on the actor's node."""
        return Path(ray.get(self.actor.directory.remote()))

    def forward(
        self, data: Sequence[Datum], loss: str = "cross_entropy", options: Options = NO_OPTIONS, slot: int = 0
    ) -> ray.ObjectRef[Any]:
        """See ``Session.forward``; of ``Outputs``."""
        return self._call("forward", data, loss, dict(options), slot)

    def forward_backward(
        self, data: Sequence[Datum], loss: str = "cross_entropy", options: Options = NO_OPTIONS, slot: int = 0
    ) -> ray.ObjectRef[Any]:
        """See ``Session.forward_backward``; of ``Outputs``."""
        return self._call("forward_backward", data, loss, dict(options), slot)

    def together(self, kind: Kind, calls: Sequence[Call]) -> list[ray.ObjectRef[Any]]:
        """See ``Session.together``; of ``Outputs``, each."""
        plain = [one._replace(options=dict(one.options)) for one in calls]
        made = self._call("together", kind, plain, returns=len(calls))
        return made if isinstance(made, list) else [made]

    def optim_step(self, adam: AdamW, slot: int = 0) -> ray.ObjectRef[Any]:
        """See ``Session.optim_step``; of ``Updated``. There is no ``note``: the session makes its snapshots itself."""
        return self._call("optim_step", adam, slot)

    def save(self, folder: Path, slot: int = 0) -> ray.ObjectRef[Any]:
        """See ``Session.save``; of the folder."""
        return self._call("save", folder, slot)

    def load(
        self,
        folder: Path,
        with_optimizer: bool,
        slot: int = 0,
        lasting: bool = False,
        updates: int | None = None,
        adapters: Adapters | None = None,
    ) -> ray.ObjectRef[Any]:
        """See ``Session.load``."""
        return self._call("load", folder, with_optimizer, slot, lasting, updates, adapters)

    def free(self, slot: int) -> ray.ObjectRef[Any]:
        """See ``Session.free``."""
        return self._call("free", slot)

    def stop(self) -> None:
        """Stop the workers and the actor."""
        ray.get(self.actor.close.remote())
        ray.kill(self.actor)

    def _call(self, method: str, *arguments: Any, returns: int = 1) -> Any:
        """Return the reference of a call's result, or a list of several."""
        call = self.actor.call.options(num_returns=returns)
        return call.remote(self._caller, next(self._numbers), method, *arguments)

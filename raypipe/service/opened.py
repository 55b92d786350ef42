"""From a job to a session: plan, reserve devices, start the workers, and stop them in the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from raypipe.job.data_spec import DataSpec
from raypipe.job.spec import JobSpec
from raypipe.observe.run_log import log_event
from raypipe.runtime.cluster.connect import connect
from raypipe.runtime.group.worker_group import start_worker_group
from raypipe.runtime.hosts.rank_order import kinds_of
from raypipe.runtime.hosts.reserve import reserve
from raypipe.runtime.session.session import Session, check_job
from raypipe.runtime.session.session_worker import StageSession
from raypipe.train import Prepared, prepare_run

SERVED = {"tensor": 1, "experts": 1, "slices": 1, "shard": "none"}
"""Of a plan's keys, those that sessions have no other values of (``check_job``)."""
Say = Callable[[str], None]


@contextlib.contextmanager
def opened(job: JobSpec, directory: Path | None, say: Say) -> Iterator[tuple[Prepared, Session]]:
    """Open a session of a job, whose workers are stopped when the block ends.

    Args:
        job: the job; its data and most of ``train`` are those of ``raypipe train`` and count for nothing here.
        directory: of the run, for the plan and snapshots; None for a new one.
        say: called with what there is to say, line by line.

    Raises:
        SpecError: sessions cannot run the job.
        DevicesError: the devices were not free within ``train.wait_for_devices_s``.
    """
    prepared = prepare_run(of_calls(job), directory, resume=False, say=say)
    check_job(prepared.job, prepared.plan)
    tensor, train = prepared.plan.parallel.tensor, prepared.job.train
    count = prepared.schedule.devices * tensor
    request = connect(count, together=tensor)
    reservation = reserve(count, request, train.wait_for_devices_s, say, tensor, kinds_of(prepared.plan))
    try:
        workers = start_worker_group(
            prepared.schedule,
            prepared.plan.parallel.replicas,
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

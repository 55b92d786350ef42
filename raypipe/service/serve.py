"""From a job file to a server: plan, reserve devices, start the workers of a session, and answer until it is ended."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from raypipe.errors import SpecError
from raypipe.job.data_spec import DataSpec
from raypipe.job.model_spec import HfSpec
from raypipe.job.spec import JobSpec
from raypipe.runtime.cluster.connect import connect
from raypipe.runtime.group.worker_group import WorkerGroup, start_worker_group
from raypipe.runtime.hosts.rank_order import kinds_of
from raypipe.runtime.hosts.reserve import reserve
from raypipe.runtime.session.session import Session, check_job
from raypipe.runtime.session.session_worker import StageSession
from raypipe.service.sampling import Sampler
from raypipe.service.service import Service
from raypipe.train import Prepared, prepare_run

TOKEN = "RAYPIPE_SERVE_TOKEN"
"""Environment variable with the secret that clients send as their API key; a command line can be read by others."""
ADAPTERS = 16
"""Models at once where each has only adapters of its own; all weights take as much memory for each as for the first."""
SERVED = {"tensor": 1, "experts": 1, "slices": 1, "shard": "none"}
"""Of a plan's keys, those that sessions have no other values of (``check_job``)."""
Say = Callable[[str], None]


def serve(job: JobSpec, directory: Path | None, host: str, port: int, models: int | None, say: Say) -> None:
    """Serve a job's model until SIGINT or SIGTERM.

    Args:
        job: the job; its data and most of ``train`` are those of ``raypipe train`` and count for nothing here.
        directory: of the run, for the plan and checkpoints; None for a new one.
        host: the address to listen on.
        port: the port.
        models: that clients may have at once; None for ``ADAPTERS`` of them where adapters are trained, or else one.
        say: called with what there is to say, line by line.

    Raises:
        SpecError: the job or the address cannot be served.
        DevicesError: the devices were not free within ``train.wait_for_devices_s``.
    """
    try:
        import uvicorn

        from raypipe.service.server import is_loopback, make_app
    except ImportError as error:
        raise SpecError(
            "raypipe serve", f"needs a package that is not there: {error.name}", "pip install 'raypipe[serve]'"
        ) from None

    token = os.environ.get(TOKEN) or None
    if not is_loopback(host) and token is None:
        why = f"{host} can be reached from other machines, and no token is set"
        raise SpecError("--host", why, f"set {TOKEN} to a secret that clients send, or use 127.0.0.1")
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
        service = started(prepared, workers, models)
        app = make_app(service, host, token, tokenizer_of(job))
        server = uvicorn.Server(uvicorn.Config(app, host=host, port=port, log_level="warning", access_log=False))
        at = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        say(f"serving {service.base} at {at}; checkpoints in {prepared.directory}")
        say(f"  clients: TINKER_BASE_URL={at} TINKER_API_KEY={'the value of ' + TOKEN if token else 'tml-local'}")
        server.run()
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


def started(prepared: Prepared, workers: WorkerGroup, models: int | None) -> Service:
    """Return the service of a prepared job on running workers."""
    session = Session(prepared.job, prepared.plan, prepared.directory / "session", workers)
    session.set_up()
    lora = prepared.job.model.lora if isinstance(prepared.job.model, HfSpec) else None
    rank, usual = (0, 1) if lora is None else (lora.r, ADAPTERS)
    limits = session.limits
    whole = isinstance(prepared.job.model, HfSpec)
    sampler = Sampler(prepared.job, limits.longest, limits.vocabulary) if whole else None
    service = Service(session, name_of(prepared.job), prepared.directory, rank, models or usual, sampler)
    service.begin()
    return service


def name_of(job: JobSpec) -> str:
    """Return the name of the base model: what ``model.hf`` says, or else the job's."""
    return job.model.hf if isinstance(job.model, HfSpec) else job.name


def tokenizer_of(job: JobSpec) -> str | None:
    """Return the directory that clients load the tokenizer from; None where the model comes without."""
    hf = job.model.hf if isinstance(job.model, HfSpec) else ""
    return str(Path(hf).resolve()) if Path(hf).is_dir() else None

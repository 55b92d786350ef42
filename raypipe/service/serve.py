"""From a job file to a server: plan, reserve devices, start the workers of a session, and answer until it is ended."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from raypipe.errors import SpecError
from raypipe.job.model_spec import HfSpec
from raypipe.job.spec import JobSpec
from raypipe.observe.metrics import session_readings
from raypipe.observe.run_log import log_event
from raypipe.runtime.run_metrics import EVERY_S, exported
from raypipe.runtime.session.session import Session
from raypipe.service.actor import Say, opened
from raypipe.service.sampling import Sampler
from raypipe.service.service import Service
from raypipe.train import Prepared

TOKEN = "RAYPIPE_SERVE_TOKEN"
"""Environment variable with the secret that clients send as their API key; a command line can be read by others."""
ADAPTERS = 16
"""Models at once where each has only adapters of its own; all weights take as much memory for each as for the first."""


def serve(
    job: JobSpec, directory: Path | None, host: str, port: int, models: int | None, say: Say, resume: bool = False
) -> None:
    """Serve a job's model until SIGINT or SIGTERM.

    Args:
        job: the job; its data and most of ``train`` are those of ``raypipe train`` and count for nothing here.
        directory: of the run, for the plan and checkpoints; None for a new one.
        host: the address to listen on.
        port: the port.
        models: that clients may have at once; None for ``ADAPTERS`` of them where adapters are trained, or else one.
        say: called with what there is to say, line by line.
        resume: whether to bring back the models of the server that ran in ``directory``, if one did.

    Raises:
        SpecError: the job or the address cannot be served.
        DevicesError: the devices were not free within ``train.wait_for_devices_s``.
    """
    try:
        import uvicorn

        from raypipe.service.server import come_back, is_loopback, make_app
    except ImportError as error:
        raise SpecError(
            "raypipe serve", f"needs a package that is not there: {error.name}", "pip install 'raypipe[serve]'"
        ) from None

    token = os.environ.get(TOKEN) or None
    if not is_loopback(host) and token is None:
        why = f"{host} can be reached from other machines, and no token is set"
        raise SpecError("--host", why, f"set {TOKEN} to a secret that clients send, or use 127.0.0.1")
    with opened(job, directory, say, resume) as (prepared, session):
        service = started(prepared, session, models)
        if prepared.resume:
            come_back(service, say)
        app = make_app(service, host, token, tokenizer_of(job))
        server = uvicorn.Server(uvicorn.Config(app, host=host, port=port, log_level="warning", access_log=False))
        at = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        log_event(prepared.directory, "serving", base=service.base, url=at)
        say(f"serving {service.base} at {at}; checkpoints in {prepared.directory}")
        say(f"  clients: TINKER_BASE_URL={at} TINKER_API_KEY={'the value of ' + TOKEN if token else 'tml-local'}")
        ends = threading.Event()
        threading.Thread(target=look_after, args=(service, session.workers.run_id, ends), daemon=True).start()
        try:
            server.run()
        finally:
            ends.set()
            log_event(prepared.directory, "interrupted", message="the end of raypipe serve")


def look_after(service: Service, run_id: str, ends: threading.Event) -> None:
    """Until it ends, free what clients that are gone had, and set the metrics of the others' models, again and again:
    Ray drops a gauge that nobody has set for a while."""
    gauges = exported(service.directory, run_id)
    while not ends.wait(EVERY_S):
        service.expire()
        for metric, value, tags in session_readings(service.rows.newest()):
            gauges[metric.name].set(value, tags)


def started(prepared: Prepared, session: Session, models: int | None) -> Service:
    """Return the service of a prepared job on its session."""
    lora = prepared.job.model.lora if isinstance(prepared.job.model, HfSpec) else None
    rank, usual = (0, 1) if lora is None else (lora.r, ADAPTERS)
    limits = session.limits
    whole = isinstance(prepared.job.model, HfSpec)
    sampler = Sampler(prepared.job, limits.longest, limits.vocabulary) if whole else None
    service = Service(session, name_of(prepared.job), prepared.directory, rank, models or usual, sampler)
    service.begin(prepared.resume)
    return service


def name_of(job: JobSpec) -> str:
    """Return the name of the base model: what ``model.hf`` says, or else the job's."""
    return job.model.hf if isinstance(job.model, HfSpec) else job.name


def tokenizer_of(job: JobSpec) -> str | None:
    """Return the directory that clients load the tokenizer from; None where the model comes without."""
    hf = job.model.hf if isinstance(job.model, HfSpec) else ""
    return str(Path(hf).resolve()) if Path(hf).is_dir() else None

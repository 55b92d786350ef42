"""The metrics of a run, declared once: what Ray exports, what ``dashboards/`` may query, and how a step fills them.

Ray puts ``ray_`` before the names when it exports them. Every metric carries ``RUN_TAGS``.
"""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import yaml

from raypipe.errors import SpecError
from raypipe.files import shipped, write_whole
from raypipe.job.reading import parse_yaml
from raypipe.schedule.kinds import COMPUTE, NETWORK
from raypipe.simulate.timeline import Span, Timeline

RUN_TAGS: Final = ("run_name", "run_id", "ray_train_run_name")
"""``ray_train_run_name`` is the tag of Ray Train's own metrics, with the same value as ``run_name``: one filter in a
dashboard selects both."""


class Metric(NamedTuple):
    """One declared metric."""

    name: str
    """With its unit; a ratio is a share, 0 to 1."""
    help: str
    tags: tuple[str, ...] = ()
    """Beside ``RUN_TAGS``."""
    kind: Literal["gauge", "histogram"] = "gauge"

    @property
    def exported(self) -> str:
        """Its name in Prometheus."""
        return f"ray_{self.name}"


STEP = Metric("raypipe_step", "Optimizer steps done.")
STEP_SECONDS = Metric("raypipe_step_seconds", "Wall time of the newest step.")
STEP_PREDICTED = Metric("raypipe_step_predicted_seconds", "What the plan, then the calibration, says a step takes.")
STEP_DURATION = Metric("raypipe_step_duration_seconds", "Wall time of steps, as a histogram.", kind="histogram")
TOKENS = Metric(
    "raypipe_tokens_per_second", "Tokens of the mini-batch by wall time; samples where data have no tokens."
)
SAMPLES = Metric("raypipe_samples_per_second", "Samples of the mini-batch by wall time.")
MFU = Metric("raypipe_mfu_ratio", "Model FLOP/s over the devices' peak; absent where the peak is unknown.")
LOSS = Metric("raypipe_loss", "Training loss of the newest step; not a number once training has diverged.")
VALIDATION_LOSS = Metric("raypipe_validation_loss", "Loss of the newest validation.")
GRAD_NORM = Metric("raypipe_grad_norm", "Global gradient norm before clipping.")
LEARNING_RATE = Metric("raypipe_learning_rate", "Learning rate of the newest step.")
BUBBLE = Metric("raypipe_bubble_ratio", "Share of the newest step in which devices computed nothing.")
BUBBLE_PREDICTED = Metric("raypipe_bubble_ratio_predicted", "The same as the plan, then the calibration, predicts it.")
TASK_SECONDS = Metric(
    "raypipe_task_seconds",
    "Time in tasks of one kind (F, B, W, BW, R) in the newest step.",
    ("stage", "replica", "device", "task"),
)
WAIT = Metric("raypipe_wait_seconds", "Time in which a device computed nothing in the newest step.", ("device",))
ALL_REDUCE_EXPOSED = Metric(
    "raypipe_all_reduce_exposed_seconds", "Time of gradient all-reduces that no compute overlapped.", ("device",)
)
MEMORY = Metric("raypipe_memory_bytes", "Peak memory of a device's process so far.", ("device",))
MEMORY_PLANNED = Metric("raypipe_memory_planned_bytes", "Peak memory as planned; absent without a plan.", ("device",))
MEMORY_LIMIT = Metric(
    "raypipe_memory_limit_bytes", "A GPU's memory; of a host's CPU devices, an equal share of its memory.", ("device",)
)
DATA_WAIT = Metric(
    "raypipe_data_wait_ratio", "Share of the newest step for which the device that waited longest waited for samples."
)
EXPERT_LOAD = Metric(
    "raypipe_expert_load_ratio",
    "Tokens of a layer's busiest expert as a multiple of the mean in the newest step; absent without divided experts.",
    ("layer",),
)
LOST = Metric(
    "raypipe_lost_seconds",
    "Seconds of a step above the ideal one, by cause, as `raypipe explain` finds them.",
    ("cause",),
)
SLOWDOWN = Metric(
    "raypipe_slowdown_ratio",
    "How many times as long as they should a device's tasks take; absent for one that was never slow, 1 when it is as "
    "fast as it should be again.",
    ("device",),
)
RECOVERIES = Metric("raypipe_recoveries", "Restarts, and workers replaced in place, since the run began.")
REPLANS = Metric("raypipe_replans", "Plans changed while the run went on, since it began.")
SKIPPED = Metric("raypipe_skipped_steps", "Steps without an update, for a number that was not finite, in this run.")
REWINDS = Metric("raypipe_rewinds", "Times the run went back to a checkpoint for a number that was not finite.")
CHECKPOINT_STALL = Metric(
    "raypipe_checkpoint_stall_seconds", "Time for which training waited for the newest checkpoint."
)

SESSION_LOSS = Metric(
    "raypipe_session_loss",
    "Of `raypipe serve`: sum of the losses of a model's calls between its two newest updates.",
    ("model",),
)
SESSION_CALLS = Metric(
    "raypipe_session_calls", "Calls on data between a served model's two newest updates.", ("model",)
)
SESSION_TOKENS = Metric("raypipe_session_tokens_per_second", "Tokens of these calls by wall time.", ("model",))
SESSION_QUEUE = Metric("raypipe_session_queue", "Requests of a served model that waited or ran then.", ("model",))
SESSION_BETWEEN_CALLS = Metric(
    "raypipe_session_between_calls_ratio", "Share of the time before the newest update in which devices had no call."
)

METRICS: Final = tuple(one for one in list(globals().values()) if isinstance(one, Metric))
"""All of them. Counts are gauges, too: a driver that is started again goes on with the run's counts, where a counter
of its process would begin at zero."""

DURATION_BUCKETS: Final = tuple(round(m * 10.0**e, 6) for e in range(-3, 3) for m in (1.0, 1.5, 2.0, 3.0, 5.0, 7.0))
"""Upper ends of the histogram's buckets, in seconds."""

Reading = tuple[Metric, float, dict[str, str]]
"""A value of a metric and its tags beside the run's."""


def step_readings(row: dict[str, Any], batch: int) -> Iterator[Reading]:
    """The metrics of the whole run that follow from a step's row of metrics.jsonl; ``batch`` is in samples."""
    yield STEP, row["step"], {}
    yield STEP_SECONDS, row["step_s"], {}
    yield TOKENS, row["tokens_per_s"], {}
    yield SAMPLES, batch / row["step_s"], {}
    yield LOSS, row["loss"], {}
    yield GRAD_NORM, row["grad_norm"], {}
    yield LEARNING_RATE, row["lr"], {}
    yield BUBBLE, row["bubble_ratio"], {}
    if "data_wait_share" in row:
        yield DATA_WAIT, row["data_wait_share"], {}
    for layer, load in row.get("expert_load", {}).items():
        yield EXPERT_LOAD, load, {"layer": layer}


def session_readings(rows: Mapping[str, dict[str, Any]]) -> Iterator[Reading]:
    """The metrics of a served run that follow from each model's newest row, by its name."""
    for name, row in rows.items():
        tags = {"model": name}
        yield SESSION_LOSS, row["loss"], tags
        yield SESSION_CALLS, row["calls"], tags
        yield SESSION_TOKENS, row["tokens_per_s"], tags
        yield SESSION_QUEUE, row["queue"], tags
    if rows:
        newest = max(rows.values(), key=itemgetter("step"))
        yield STEP, newest["step"], {}
        yield BUBBLE, newest["bubble_ratio"], {}
        yield SESSION_BETWEEN_CALLS, newest["between_calls"], {}


def device_readings(timeline: Timeline, step_s: float, copies: int) -> Iterator[Reading]:
    """The metrics of single devices that follow from a measured step.

    ``copies`` is ``parallel.replicas``: a copy of the pipeline may hold several replicas of a stage (Chimera), and the
    tag counts copies.
    """
    per_copy = timeline.schedule.replicas // copies
    for device, (spans, busy) in enumerate(zip(timeline.spans, timeline.busy, strict=True)):
        total: dict[tuple[int, int, str], float] = defaultdict(float)
        for task, start, end in spans:
            if task.kind in COMPUTE:
                total[task.stage, task.replica // per_copy, task.kind] += end - start
        for (stage, replica, kind), seconds in total.items():
            tags = {"stage": str(stage), "replica": str(replica), "device": str(device), "task": kind}
            yield TASK_SECONDS, seconds, tags
        yield WAIT, max(0.0, step_s - busy), {"device": str(device)}
        yield ALL_REDUCE_EXPOSED, exposed_s(spans), {"device": str(device)}


def exposed_s(spans: Sequence[Span]) -> float:
    """Seconds in which a device's collectives (AG, RS, AR) were under way and it computed nothing.

    >>> from raypipe.schedule.ir import Task
    >>> f, ar = Task("F", 0, (0,)), Task("AR", 0, ())
    >>> exposed_s([Span(f, 0.0, 2.0), Span(ar, 1.0, 5.0), Span(f, 4.0, 4.5)])
    2.5
    """
    # A sweep over the moments at which something begins or ends.
    moments = sorted(
        (at, kind, change)
        for task, start, end in spans
        for kind in (("compute",) if task.kind in COMPUTE else ("sum",) if task.kind in NETWORK else ())
        for at, change in ((start, 1), (end, -1))
    )
    under_way = {"compute": 0, "sum": 0}
    exposed = 0.0
    for (at, kind, change), (then, _, _) in pairwise(moments):
        under_way[kind] += change
        if under_way["sum"] and not under_way["compute"]:
            exposed += then - at
    return exposed


# Put ``dashboards/`` where the Grafana and the Prometheus of a Ray cluster find it.
#
# Ray's dashboard writes their configuration at head start, below ``SESSION/metrics``, and removes its ``grafana``
# folder before it does; so ours is installed after a head has started, beside Ray's own files and with a provider of
# its own.


OPTION = "--to"
OURS = "raypipe"
"""Folder of our dashboards below ``grafana``: not below Ray's own, which its provider reads with all that is in it."""
RULES = "raypipe-rules.yaml"
NO_HEAD = "start a head with a dashboard (ray start --head), or name a folder"


def session_metrics() -> Path:
    """The folder in which the Ray that was last started on this machine keeps such files."""
    if given := os.environ.get("RAY_METRICS_OUTPUT_ROOT"):
        return Path(given)
    temporary = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    return Path(temporary) / "ray" / "session_latest" / "metrics"


def install_dashboards(to: Path | None = None) -> list[str]:
    """Copy the dashboards and the rules below ``to``, by default where Ray's Grafana and Prometheus look.

    Returns lines that say what was written and what is left to do.

    Raises:
        SpecError: no Ray session has such a folder, or it cannot be written.
    """
    root = (to or session_metrics()).absolute()
    if to is None and not root.is_dir():
        raise SpecError(OPTION, f"no Ray on this machine has written {root}", NO_HEAD)
    boards, provider = root / "grafana" / OURS, root / "grafana" / "provisioning" / "dashboards" / f"{OURS}.yml"
    rules, config = root / "prometheus" / RULES, root / "prometheus" / "prometheus.yml"
    source = shipped("dashboards")
    lines = []
    try:
        for folder in (boards, provider.parent, rules.parent):
            folder.mkdir(parents=True, exist_ok=True)
        for board in sorted((source / "grafana").glob("*.json")):
            shutil.copyfile(board, boards / board.name)
            lines.append(f"wrote {boards / board.name}")
        write_whole(provider, _provider(boards))
        lines.append(f"wrote {provider}")
        shutil.copyfile(source / "prometheus" / "rules.yaml", rules)
        lines.append(f"wrote {rules}")
        lines.append(_name_rules(config))
    except OSError as error:
        why = f"{error.filename or root}: {error.strerror or error}"
        raise SpecError(OPTION, why, "give a folder that can be written") from None
    lines.append("Grafana reads provisioning/ when it starts: restart it if it runs")
    lines.append("Prometheus reads rules when it starts, or is told to: curl -X POST localhost:9090/-/reload")
    return lines


def _provider(boards: Path) -> str:
    """Grafana's provisioning file for a folder of dashboards."""
    one = {"name": OURS, "folder": OURS, "type": "file", "options": {"path": str(boards)}}
    return yaml.safe_dump({"apiVersion": 1, "providers": [one]}, sort_keys=False)


def _name_rules(config: Path) -> str:
    """Name the rules in Prometheus's configuration, where there is one; returns what was done."""
    if not config.is_file():
        return f'name them in your prometheus.yml: rule_files: ["{config.with_name(RULES)}"]'
    text = config.read_text(encoding="utf-8")
    known = parse_yaml(text, str(config))
    named = known.get("rule_files") if isinstance(known, dict) else None
    if named and RULES in named:
        return f"{config} names them already"
    if named is not None:
        return f"add {RULES} to the rule_files of {config}"
    write_whole(config, f'{text.rstrip()}\n\nrule_files: ["{RULES}"]\n'.encode())
    return f"named them in {config}"

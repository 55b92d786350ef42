"""Run directories whose files hold anything, as ``raypipe report`` and ``raypipe watch`` read them."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from raypipe.cli import run
from tests.bench.safety.files import changed, right_job, torn
from tests.bench.safety.trial import expect

ROWS = [
    {"step": 1, "loss": 2.5, "grad_norm": 1.0, "lr": 0.1, "step_s": 0.5, "tokens_per_s": 10.0, "bubble_ratio": 0.2},
    {"step": 2, "loss": 2.4, "grad_norm": 1.0, "lr": 0.1, "step_s": 0.5, "tokens_per_s": 10.0, "bubble_ratio": 0.2},
    {"step": 2, "val_loss": 2.3},
]
DEVICES = [{"name": "stage 0", "node": "n", "device": "cpu", "pid": 1, "parameters": 10}]
EVENTS = [
    {"event": "run", "time": 1.0, "resume": False, "devices": 1, "cores": 2},
    {"event": "started", "time": 2.0, "devices": DEVICES, "resumed_from": None, "process_groups": 1},
    {"event": "checkpoint", "time": 3.0, "step": 2, "path": "x", "best": False},
    {"event": "recovered", "time": 3.5, "step": 2, "ranks": [0], "seconds": 1.0, "steps_repeated": 1, "message": "x"},
    {"event": "finished", "time": 4.0, "counts": {"p2p": 2}, "memory_bytes": [100]},
]  # fmt: skip
SPANS = [[{"task": "0F0", "start": 0.0, "end": 1.0}, {"task": "0BW0", "start": 1.0, "end": 2.0}]]
TIMELINE = {"makespan": 2.0, "bubble_ratio": 0.0, "spans": SPANS}
RIGHT: dict[str, Any] = {
    "plan": {"format": 1, "parallel": {"schedule": "1f1b", "stages": 1, "replicas": 1, "microbatch": 4},
             "cut": [[0, 1]], "predicted_step_s": 0.4,
             "made_for": {"device": "cpu", "model": {}, "train": {}, "decision": "x"}},
    "timeline": {"predicted": TIMELINE, "measured": TIMELINE}, "metrics": ROWS, "events": EVENTS,
}  # fmt: skip


@st.composite
def directories(draw: Any) -> dict[str, str]:
    """The text of each file of a run directory."""
    data = draw(changed({**RIGHT, "job": right_job()}, most=4))
    files = {}
    for name in ("job", "plan", "timeline"):
        files[f"{name}.json"] = json.dumps(data.get(name))
    for name in ("metrics", "events"):
        rows = data.get(name)
        files[f"{name}.jsonl"] = "".join(json.dumps(row) + "\n" for row in (rows if isinstance(rows, list) else [rows]))
    if draw(st.integers(0, 3)) == 0:
        name = draw(st.sampled_from(sorted(files)))
        files[name] = draw(torn(files[name]))
    return files


def try_directory(scratch: Path, files: dict[str, str]) -> None:
    """Report on a run directory with these files."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    (scratch / ".running").touch()
    for name, text in files.items():
        (scratch / name).write_bytes(text.encode(errors="surrogatepass"))
    for verb in ("report", "watch"):
        said = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            status = run([verb, str(scratch)])
        expect(status == 0 or (status == 2 and "\n  fix: " in said.getvalue()), f"{status}: {said.getvalue()[:200]}")

"""Ray Train's note of the checkpoints it was told of, which it reads when a run begins in a directory that has one.

It serves to delete old checkpoints; a run goes on from raypipe's own manifests. So a damaged note is set aside.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raypipe.files import read_regular
from raypipe.observe.run_dir import set_aside

NAME = "checkpoint_manager_snapshot.json"


def check_snapshot(directory: Path, say: Callable[[str], None]) -> None:
    """Set the note aside if Ray Train could not begin with it; ``say`` is told.

    Raises:
        OSError: it cannot be renamed.
    """
    path = directory / NAME
    if path.exists() and (wrong := _wrong(path)) is not None:
        say(f"note: {path}: {wrong}; it is now {set_aside(path).name}, and the run goes on from its own checkpoints")


def _wrong(path: Path) -> str | None:
    """Why Ray Train would refuse the note; None if it would not."""
    try:
        note = json.loads(read_regular(path))
        _read_by_ray(note)
        named = [one["checkpoint_dir_name"] for one in note["checkpoint_results"]]
        known = set(named)
        latest = note.get("latest_checkpoint_result")
        also = [
            one["checkpoint_dir_name"] for one in (*note["pending_training_results"], *([latest] if latest else []))
        ]
        whole = len(named) == len(note["checkpoint_report_indices"]) and known.issuperset(also)
        whole = whole and len(note["pending_training_results"]) == len(note["pending_validation_specs"])
    except Exception:  # whatever a damaged file makes of these; pydantic's errors are Ray's business
        return "is damaged"
    if not whole:
        return "contradicts itself"
    lost = next((name for name in named if not (path.parent / name).is_dir()), None)
    return None if lost is None else f"names {lost}, which is gone"


def _read_by_ray(note: Any) -> None:
    """Ray's own reading, where this version of Ray has it under this name."""
    try:
        from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import _CheckpointManagerState
    except ImportError:
        return
    _CheckpointManagerState.model_validate(note)

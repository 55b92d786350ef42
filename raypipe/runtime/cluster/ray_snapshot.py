"""Check Ray Train's snapshot: its list of reported checkpoints, which it reads when a run begins in its directory.

Ray Train needs the list only to delete old checkpoints; a run resumes from raypipe's own manifests. A damaged snapshot
is therefore renamed, so that Ray Train does not fail on it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from raypipe.files import read_json
from raypipe.observe.run_dir import set_aside

NAME = "checkpoint_manager_snapshot.json"


def check_snapshot(directory: Path, say: Callable[[str], None]) -> None:
    """Rename the snapshot if Ray Train could not read it, and report that through ``say``.

    Raises:
        OSError: it cannot be renamed.
    """
    path = directory / NAME
    if path.exists() and (wrong := _wrong(path)) is not None:
        say(f"note: {path}: {wrong}; it is now {set_aside(path).name}, and the run resumes from its own checkpoints")


def _wrong(path: Path) -> str | None:
    """Say why Ray Train would reject the snapshot; None if it would accept it."""
    try:
        snapshot = read_json(path)
        _validate_with_ray(snapshot)
        listed = [one["checkpoint_dir_name"] for one in snapshot["checkpoint_results"]]
        latest = snapshot.get("latest_checkpoint_result")
        pending = snapshot["pending_training_results"]
        mentioned = [one["checkpoint_dir_name"] for one in (*pending, *([latest] if latest else []))]
        consistent = len(listed) == len(snapshot["checkpoint_report_indices"]) and set(listed).issuperset(mentioned)
        consistent = consistent and len(pending) == len(snapshot["pending_validation_specs"])
    except Exception:  # a damaged file may raise anything here, pydantic's errors included
        return "is damaged"
    if not consistent:
        return "contradicts itself"
    lost = next((name for name in listed if not (path.parent / name).is_dir()), None)
    return None if lost is None else f"names {lost}, which is gone"


def _validate_with_ray(snapshot: Any) -> None:
    """Validate the snapshot as Ray Train does, if this version of Ray still has that class."""
    try:
        from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import _CheckpointManagerState
    except ImportError:
        return
    _CheckpointManagerState.model_validate(snapshot)

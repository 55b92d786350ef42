"""Metrics and state of a trainer, printed and written as the Hugging Face Trainer's scripts have them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any


class Figures:
    """Prints and writes figures."""

    directory: Path
    state: Any

    def log_metrics(self, split: str, metrics: dict[str, float]) -> None:
        """Print metrics as the Trainer's scripts do."""
        from transformers.trainer_pt_utils import log_metrics

        log_metrics(self, split, metrics)

    def save_metrics(self, split: str, metrics: dict[str, float], combined: bool = True) -> None:
        """Write metrics to ``SPLIT_results.json`` in ``output_dir``, and with ``combined`` to ``all_results.json``."""
        from transformers.trainer_pt_utils import save_metrics

        save_metrics(_Saves(self), split, metrics, combined)

    def save_state(self) -> None:
        """Write ``state`` to ``trainer_state.json`` in ``output_dir``."""
        self.state.save_to_json(str(self.directory / "trainer_state.json"))

    def is_world_process_zero(self) -> bool:
        """Return True: the process that calls ``train`` is the only one that runs the script."""
        return True

    is_local_process_zero = is_world_process_zero


class _Saves:
    """The part of a Trainer that ``transformers.trainer_pt_utils`` needs to write its files."""

    def __init__(self, trainer: Figures) -> None:
        self.args = SimpleNamespace(output_dir=str(trainer.directory))
        self.is_world_process_zero = trainer.is_world_process_zero

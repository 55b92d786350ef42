"""Nodes of a run that will go: what to do where the run cannot change its devices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from raypipe.observe.run_dir import SAVE, ask
from raypipe.observe.run_log import RunLog

if TYPE_CHECKING:
    from raypipe.runtime.hosts.reserve import Reservation


class DrainedNodes:
    """Asks a run for a checkpoint when nodes that it uses are drained, so that little is lost when they go."""

    def __init__(self, directory: Path, reservation: Reservation) -> None:
        self._directory, self._reservation = directory, reservation
        self._known: set[str] = set()

    def look(self) -> None:
        """See whether there are more of them; call it now and then."""
        from ray.exceptions import RayError

        from raypipe.runtime.hosts.autoscaler import drained_nodes

        try:
            found = drained_nodes() - self._known
            new = found & self._reservation.nodes() if found else found
        except RayError:  # it does not answer now: the run need not end for that
            return
        if not new:
            return
        self._known |= new
        ask(self._directory, SAVE)
        log = RunLog(self._directory)
        names = ", ".join(sorted(new))
        log.event("notice", message=f"{len(new)} of its nodes will go, so a checkpoint is saved now: {names}")
        log.close()

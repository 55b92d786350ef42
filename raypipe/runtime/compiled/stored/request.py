"""The request of a worker to the process that compiles a stage for it."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from pathlib import Path

from raypipe.runtime.compiled.needs import StageNeeds
from raypipe.runtime.setup.setup import Setup


@dataclass(frozen=True)
class Request:
    """A stage to compile. It goes through a pipe from the worker to the process, never through a file."""

    setup: Setup
    stage: int
    needs: StageNeeds
    folder: Path
    """Where the compiled stage is to be written."""
    cache: Path
    """The directory of torch's cache."""

    def packed(self) -> bytes:
        """Return the request as bytes, without what only a worker uses.

        Raises:
            Exception: what the loss consists of cannot be sent.
        """
        return pickle.dumps(replace(self, setup=replace(self.setup, samples=None)))

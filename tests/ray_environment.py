"""The environment of processes that tests start: it leads to no Ray of anybody else's."""

from __future__ import annotations

import os

LEAN = {
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "0",
}
"""Ray starts a worker per CPU before anybody asks; an actor with environment variables of its own, as raypipe's have,
takes none of them. And nobody looks at the dashboard's Train page, for which a process keeps the state of runs."""


def without_ray(**settings: str) -> dict[str, str]:
    """This process's environment, but for Ray's own variables; ``settings`` are added."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    return ours | LEAN | settings

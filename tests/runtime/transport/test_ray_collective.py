"""The shared properties of channels for the transports that work only inside Ray actors, between two small actors."""

from __future__ import annotations

import os
import runpy
import tempfile
import uuid
from pathlib import Path

import pytest
import ray

from tests.runtime.transport.kinds import IN_ACTORS

SCRIPT = Path(__file__).with_name("scenarios.py")
NAMES = runpy.run_path(str(SCRIPT))["NAMES"]
ROOT = str(Path(__file__).parents[3])

pytestmark = pytest.mark.runs


class Rank:
    """One side; joins torch's world first, as stage actors do, so that Ray's groups must live beside it."""

    def run(self, kind: str, what: str, script: str, rank: int, store: str, run_id: str) -> dict[str, str]:
        scenarios = runpy.run_path(script)
        scenarios["join_world"](rank, store)
        outcome: dict[str, str] = scenarios[what](kind, rank, run_id)
        return outcome


def pair(kind: str, what: str, survivors: int) -> list[dict[str, str]]:
    """What the first ranks report."""
    env = {"PYTHONPATH": os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")]), "GLOO_SOCKET_IFNAME": "lo"}
    actor = ray.remote(num_cpus=0, runtime_env={"env_vars": env})(Rank)
    ranks = [actor.remote() for _ in range(2)]
    run_id = f"test-{uuid.uuid4().hex[:8]}"
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        calls = [r.run.remote(kind, what, str(SCRIPT), rank, store, run_id) for rank, r in enumerate(ranks)]
        try:
            reports: list[dict[str, str]] = ray.get(calls[:survivors], timeout=120)
            return reports
        finally:
            for r in ranks:
                ray.kill(r)


@pytest.fixture(scope="module", params=sorted(IN_ACTORS))
def outcomes(request: pytest.FixtureRequest, local_ray: None) -> list[dict[str, str]]:
    return pair(request.param, "run_all", survivors=2)


@pytest.mark.parametrize("name", NAMES)
def test_channel(outcomes: list[dict[str, str]], name: str) -> None:
    for rank, report in enumerate(outcomes):
        assert report[name] == "ok", f"rank {rank}:\n{report[name]}"


@pytest.mark.parametrize("kind", sorted(IN_ACTORS))
def test_death_of_the_peer_is_noticed_at_once(kind: str, local_ray: None) -> None:
    assert pair(kind, "dies", survivors=1) == [{"dies": "ok"}]


def test_outside_an_actor_says_what_to_do() -> None:
    from raypipe.errors import TransportError
    from raypipe.runtime.transport.framed.ray_collective import open_gloo_group

    with pytest.raises(TransportError, match="inside a Ray actor"):
        open_gloo_group(2, 0, "none")

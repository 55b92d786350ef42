"""Every job in jobs/ is one, and says at its top what it shows and how to run it."""

from pathlib import Path

import pytest
import yaml

from raypipe.job import load_job

JOBS = Path(__file__).parents[2] / "jobs"
NO_JOBS = ("epochs-", "runtime_env")
"""Tables of `raypipe hybrid`, and what travels with a Ray job."""
FILES = sorted(p for p in JOBS.glob("*.yaml") if not p.name.startswith(NO_JOBS))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_it_loads_and_says_what_it_shows(path):
    job = load_job(path)
    assert job.name == path.stem
    comment = "".join(line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#"))
    assert f"jobs/{path.name}" in comment
    assert len(comment) > 100


def test_the_runtime_environment_is_one_that_ray_takes():
    from ray.runtime_env import RuntimeEnv

    asked = yaml.safe_load((JOBS / "runtime_env.yaml").read_text(encoding="utf-8"))
    assert RuntimeEnv(**asked).env_vars()["PYTHONUNBUFFERED"] == "1"
    assert ".venv" in asked["excludes"]

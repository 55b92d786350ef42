"""Workers of the session's Ray are forks of one process, and otherwise what Ray would have started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import ray


class Tells:
    def facts(self) -> dict[str, object]:
        parent = Path(f"/proc/{os.getppid()}/cmdline").read_text()
        return {
            "pid": os.getpid(), "group": os.getpgid(0), "parent": parent, "given": os.environ.get("GIVEN"),
            "job": os.environ["RAY_JOB_ID"], "title": Path("/proc/self/cmdline").read_text(),
        }  # fmt: skip


@pytest.mark.runs
def test_a_worker_is_a_fork_with_its_own_environment(local_ray: None) -> None:
    first, second = (ray.remote(Tells).options(num_cpus=0, runtime_env=env).remote() for env in ({}, VARIABLES))
    facts, others = ray.get([first.facts.remote(), second.facts.remote()])
    assert "tests.forked_workers.fork_server" in facts["parent"] == others["parent"]
    assert facts["pid"] == facts["group"] != others["pid"] == others["group"]
    assert (facts["given"], others["given"]) == (None, "7")
    assert facts["job"] == ray.get_runtime_context().get_job_id()
    assert facts["title"].startswith("ray::Tells.facts")
    for actor in (first, second):
        ray.kill(actor)


VARIABLES = {"env_vars": {"GIVEN": "7"}}

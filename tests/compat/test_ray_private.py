"""Private names of Ray: each is there, in one module, and nothing stops where one is gone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray
import yaml

from raypipe.compat import PrivateName, ray_private
from raypipe.compat.ray_private import CHECKED, JOB_CONFIG, NAMES, find
from raypipe.launch.run_directory import check_snapshot
from raypipe.runtime.hosts import reserve
from raypipe.runtime.hosts.devices import DeviceRequest

CPU = DeviceRequest(1.0, 0.0)
GONE = """
import sys
from pathlib import Path
from raypipe.compat import PrivateName, ray_private
from tests.forked_workers.command import main

ray_private.find = lambda module, name: None
sys.argv = ["raypipe", "train", *sys.argv[1:]]
main()
"""


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


@pytest.mark.parametrize("one", NAMES, ids=lambda one: one.name)
def test_the_installed_ray_has_it(one: PrivateName) -> None:
    if find(one.where, one.name) is None and version(ray.__version__) < version(CHECKED):
        pytest.skip(f"Ray {ray.__version__} is older, and has it not yet: {one.without}")
    assert find(one.where, one.name) is not None, f"Ray {ray.__version__}, checked with {CHECKED}: {one.without}"


def test_what_has_no_name_in_a_module_is_as_it_was() -> None:
    assert find("ray._private.runtime_env.constants", "RAY_JOB_CONFIG_JSON_ENV_VAR") == JOB_CONFIG
    assert ray_private.NODE_ADDRESS in (ray.init.__doc__ or "")


def test_without_them_ray_is_asked_in_public(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ray_private, "find", lambda module, name: None)
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 3.0})
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "NodeID": "a", "Labels": {"ray.io/node-group": "w"}}])
    monkeypatch.setattr(ray, "get_runtime_context", lambda: type("Context", (), {"gcs_address": ""}))
    assert ray_private.draining_nodes() == set()
    assert reserve.free_workers(CPU) == 3
    assert reserve._by_node(1, CPU.bundle(), "0123abcd") is None  # the caller reserves one group instead
    assert not reserve.autoscales()
    with ray_private.on_loopback(), ray_private.no_signal_handlers():
        pass
    snapshot = tmp_path / "checkpoint_manager_snapshot.json"
    snapshot.write_text("{}")
    check_snapshot(tmp_path, lambda _: None)
    assert not snapshot.exists()


@pytest.mark.runs
@pytest.mark.own_ray
def test_a_run_goes_to_its_end_without_them(tmp_path: Path) -> None:
    """In a process of its own, whose own calls find none of them; Ray itself has what it needs."""
    (tmp_path / "text.txt").write_text("to be or not to be " * 400)
    job = {
        "name": "without",
        "model": {"type": "gpt", "layers": 2, "hidden": 16, "heads": 2, "sequence": 8},
        "data": {"type": "bytes", "path": str(tmp_path / "text.txt")},
        "train": {"steps": 2, "batch": 4, "lr": 0.001},
        "parallel": {"schedule": "1f1b", "stages": 2, "microbatch": 2},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    command = [sys.executable, "-c", GONE, str(tmp_path / "job.yaml"), "--run-dir", str(tmp_path / "run")]
    env = {**os.environ, "RAY_ADDRESS": "local"}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count('"loss"') == 2

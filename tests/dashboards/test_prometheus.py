"""A real Prometheus beside a running job: the query of every panel finds data, and every alert can be evaluated."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.dashboards.test_dashboards import ROOT, RULES, queries
from tests.exhaustive import ONLY
from tests.ray_environment import without_ray
from tests.ray_head import Head, free_ports, ray_head

PROMETHEUS = shutil.which("prometheus")
ALL_S = 300.0
"""Time in which every panel must have shown data; the planner measures the model first."""
VARIABLES = {"$run": ".*", "$SessionName": ".*", "$__rate_interval": "30s"}


@contextmanager
def prometheus(head: Head, folder: Path) -> Iterator[str]:
    """A Prometheus on loopback that scrapes a head and knows the alerts; yields where it answers."""
    (port,) = free_ports(1)
    target = head.metrics.removeprefix("http://").removesuffix("/metrics")
    config = {
        "global": {"scrape_interval": "2s", "evaluation_interval": "2s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {
                "job_name": "ray",
                "authorization": {"credentials": head.token["RAY_AUTH_TOKEN"]},
                "static_configs": [{"targets": [target]}],
            }
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    words = [str(PROMETHEUS), f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen([*words, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}/api/v1"
    finally:
        process.terminate()
        process.wait(10)


def asked(server: str, what: str, **words: str) -> dict[str, Any]:
    """What the server answers; nothing while it starts."""
    try:
        with urllib.request.urlopen(f"{server}/{what}?{urllib.parse.urlencode(words)}", timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)["data"]
            return found
    except urllib.error.HTTPError as error:
        raise AssertionError(error.read().decode()) from None
    except OSError:
        return {}


def filled(expr: str) -> str:
    """A panel's query, for all runs."""
    for name, value in VARIABLES.items():
        expr = expr.replace(name, value)
    return expr


@ONLY
@pytest.mark.runs
@pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed (Debian: prometheus)")
def test_every_panel_shows_data_while_a_job_runs(tmp_path: Path) -> None:
    wanted = {where: filled(expr) for where, expr in queries() if ": " in where and "$" not in where}
    words = [
        sys.executable, "-m", "raypipe", "train", "jobs/documents.yaml", "--run-dir", str(tmp_path / "run"),
        "--set", "train.steps=100000", "--set", "train.eval_every=20", "--set", "train.checkpoint_every=20",
        "--set", "parallel={auto: true, schedule: zb-h1, stages: 2}",
    ]  # fmt: skip
    with (
        ray_head(RAY_metrics_report_interval_ms="2000", RAYPIPE_PEAK_TFLOPS="0.1") as head,
        prometheus(head, tmp_path) as server,
    ):
        log = (tmp_path / "run.log").open("w")
        job = subprocess.Popen(
            words,
            cwd=ROOT,
            env=without_ray(**head.token, RAY_ADDRESS=head.address),
            stdout=log,
            stderr=log,
        )
        try:
            deadline = time.monotonic() + ALL_S
            while wanted and time.monotonic() < deadline and job.poll() is None:
                time.sleep(1)
                wanted = {
                    where: expr
                    for where, expr in wanted.items()
                    if not asked(server, "query", query=expr).get("result")
                }
            rules = [rule for group in asked(server, "rules")["groups"] for rule in group["rules"]]
        finally:
            job.terminate()
            job.wait(60)
            log.close()
    assert not wanted, f"{(tmp_path / 'run.log').read_text()[-2000:]}\nno data: {wanted}"
    assert len(rules) == sum(len(group["rules"]) for group in yaml.safe_load(RULES.read_text())["groups"])
    assert {rule["health"] for rule in rules} == {"ok"}

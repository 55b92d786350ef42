"""Dashboards and alerts ask for metrics that exist, also beside a running job, and files of others stay whole."""

import json
import re
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

from raypipe.cli import run
from raypipe.observe.metrics import METRICS, RUN_TAGS
from tests.exhaustive import ONLY
from tests.ray_environment import without_ray
from tests.ray_head import Head, free_ports, ray_head

ROOT = Path(__file__).parents[2]
BOARDS = sorted((ROOT / "dashboards" / "grafana").glob("*.json"))
RULES = ROOT / "dashboards" / "prometheus" / "rules.yaml"
EXPORTED = {m.exported: m for m in METRICS if m.kind == "gauge"} | {
    f"{m.exported}_{end}": m for m in METRICS if m.kind == "histogram" for end in ("bucket", "sum", "count")
}
OF_RAY = {"SessionName", "le"}
"""Labels that Ray and Prometheus add."""


def queries() -> list[tuple[str, str]]:
    """Every expression, with where it stands."""
    result = []
    for board in BOARDS:
        data = json.loads(board.read_text(encoding="utf-8"))
        for panel in data["panels"]:
            result += [(f"{board.stem}: {panel['title']}", target["expr"]) for target in panel["targets"]]
        result += [
            (f"{board.stem}: ${v['name']}", v["definition"]) for v in data["templating"]["list"] if "definition" in v
        ]
    rules = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    return result + [(rule["alert"], rule["expr"]) for group in rules["groups"] for rule in group["rules"]]


@pytest.mark.parametrize(("where", "expr"), queries(), ids=lambda x: x if ": " in x or x.isalpha() else "")
def test_queries_name_declared_metrics_and_their_tags(where, expr):
    names = re.findall(r"\b(?:ray_)?raypipe_\w+", expr)
    assert names, f"{where} asks for none of raypipe's metrics"
    assert set(names) <= EXPORTED.keys(), where
    tags = {tag for name in names for tag in EXPORTED[name].tags} | set(RUN_TAGS) | OF_RAY
    used = set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)\s*\"", expr))
    for listed in re.findall(r"\b(?:by|on|ignoring)\s*\(([^)]*)\)", expr):
        used |= {tag.strip() for tag in listed.split(",")}
    assert used <= tags, where


def test_every_metric_is_on_a_dashboard():
    shown = {name for where, expr in queries() if ": " in where for name in re.findall(r"ray_raypipe_\w+", expr)}
    assert {EXPORTED[name].name for name in shown} == {m.name for m in METRICS}


@pytest.mark.parametrize("board", BOARDS, ids=lambda p: p.stem)
def test_boards_are_what_grafana_takes(board):
    data = json.loads(board.read_text(encoding="utf-8"))
    assert [v["name"] for v in data["templating"]["list"]] == ["datasource", "SessionName", "run"]
    ids = [panel["id"] for panel in data["panels"]]
    assert len(ids) == len(set(ids))
    taken = set()
    for panel in data["panels"]:
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["description"]
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, f"{panel['title']} lies over another panel"
        taken |= cells


def test_uids_are_different():
    uids = [json.loads(board.read_text(encoding="utf-8"))["uid"] for board in BOARDS]
    assert sorted(uids) == sorted(set(uids))


PROMTOOL = shutil.which("promtool")


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: prometheus)")
def test_each_alert_fires_on_its_fault_and_on_none():
    for words in (["check", "rules", str(RULES)], ["test", "rules", str(Path(__file__).with_name("alerts.yaml"))]):
        done = subprocess.run([str(PROMTOOL), *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


RAYS_PROMETHEUS = "global:\n  scrape_interval: 10s # every 10 s\n\nscrape_configs:\n- job_name: 'ray'\n"


def test_install_leaves_rays_own_files_and_names_ours(tmp_path, monkeypatch, capsys):
    metrics = tmp_path / "ray" / "session_latest" / "metrics"
    (metrics / "prometheus").mkdir(parents=True)
    config = metrics / "prometheus" / "prometheus.yml"
    config.write_text(RAYS_PROMETHEUS)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_METRICS_OUTPUT_ROOT", raising=False)
    for _ in range(2):  # the second time nothing is named twice
        assert run(["dashboards", "install"]) == 0
        assert config.read_text().startswith(RAYS_PROMETHEUS)
        assert yaml.safe_load(config.read_text())["rule_files"] == ["raypipe-rules.yaml"]
    assert yaml.safe_load((metrics / "prometheus" / "raypipe-rules.yaml").read_text())["groups"]
    provider = yaml.safe_load((metrics / "grafana/provisioning/dashboards/raypipe.yml").read_text())
    boards = Path(provider["providers"][0]["options"]["path"])
    assert sorted(p.name for p in boards.iterdir()) == [p.name for p in BOARDS]
    assert "restart it" in capsys.readouterr().out


def test_install_elsewhere_and_where_no_ray_is(tmp_path, monkeypatch, capsys):
    assert run(["dashboards", "install", "--to", str(tmp_path / "mine")]) == 0
    assert (tmp_path / "mine" / "prometheus" / "raypipe-rules.yaml").is_file()
    assert "rule_files" in capsys.readouterr().out
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "none"))
    monkeypatch.delenv("RAY_METRICS_OUTPUT_ROOT", raising=False)
    assert run(["dashboards", "install"]) == 2
    assert "ray start --head" in capsys.readouterr().err
    assert run(["dashboards", "instal"]) == 2
    assert 'did you mean "install"' in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert run(["dashboards", "install", "--to", str(tmp_path / "file")]) == 2


# A real Prometheus beside a running job: the query of every panel finds data, and every alert can be evaluated.

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
            result: dict[str, Any] = json.load(answer)["data"]
            return result
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
@pytest.mark.own_ray
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

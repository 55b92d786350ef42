"""Dashboards and alerts ask for metrics that exist, and Grafana, Prometheus and Ray's files stay whole."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from raypipe.cli import run
from raypipe.observe.metrics import METRICS, RUN_TAGS

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
    found = []
    for board in BOARDS:
        data = json.loads(board.read_text(encoding="utf-8"))
        for panel in data["panels"]:
            found += [(f"{board.stem}: {panel['title']}", target["expr"]) for target in panel["targets"]]
        found += [
            (f"{board.stem}: ${v['name']}", v["definition"]) for v in data["templating"]["list"] if "definition" in v
        ]
    rules = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    return found + [(rule["alert"], rule["expr"]) for group in rules["groups"] for rule in group["rules"]]


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

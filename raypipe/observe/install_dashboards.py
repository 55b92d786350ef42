"""Put ``dashboards/`` where the Grafana and the Prometheus of a Ray cluster find it.

Ray's dashboard writes their configuration at head start, below ``SESSION/metrics``, and removes its ``grafana`` folder
before it does; so ours is installed after a head has started, beside Ray's own files and with a provider of its own.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import yaml

from raypipe.atomic_write import write_whole
from raypipe.errors import SpecError
from raypipe.files import shipped
from raypipe.job.reading import parse_yaml

OPTION = "--to"
OURS = "raypipe"
"""Folder of our dashboards below ``grafana``: not below Ray's own, which its provider reads with all that is in it."""
RULES = "raypipe-rules.yaml"
NO_HEAD = "start a head with a dashboard (ray start --head), or name a folder"


def session_metrics() -> Path:
    """The folder in which the Ray that was last started on this machine keeps such files."""
    if given := os.environ.get("RAY_METRICS_OUTPUT_ROOT"):
        return Path(given)
    temporary = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    return Path(temporary) / "ray" / "session_latest" / "metrics"


def install_dashboards(to: Path | None = None) -> list[str]:
    """Copy the dashboards and the rules below ``to``, by default where Ray's Grafana and Prometheus look.

    Returns lines that say what was written and what is left to do.

    Raises:
        SpecError: no Ray session has such a folder, or it cannot be written.
    """
    root = (to or session_metrics()).absolute()
    if to is None and not root.is_dir():
        raise SpecError(OPTION, f"no Ray on this machine has written {root}", NO_HEAD)
    boards, provider = root / "grafana" / OURS, root / "grafana" / "provisioning" / "dashboards" / f"{OURS}.yml"
    rules, config = root / "prometheus" / RULES, root / "prometheus" / "prometheus.yml"
    source = shipped("dashboards")
    lines = []
    try:
        for folder in (boards, provider.parent, rules.parent):
            folder.mkdir(parents=True, exist_ok=True)
        for board in sorted((source / "grafana").glob("*.json")):
            shutil.copyfile(board, boards / board.name)
            lines.append(f"wrote {boards / board.name}")
        write_whole(provider, _provider(boards))
        lines.append(f"wrote {provider}")
        shutil.copyfile(source / "prometheus" / "rules.yaml", rules)
        lines.append(f"wrote {rules}")
        lines.append(_name_rules(config))
    except OSError as error:
        why = f"{error.filename or root}: {error.strerror or error}"
        raise SpecError(OPTION, why, "give a folder that can be written") from None
    lines.append("Grafana reads provisioning/ when it starts: restart it if it runs")
    lines.append("Prometheus reads rules when it starts, or is told to: curl -X POST localhost:9090/-/reload")
    return lines


def _provider(boards: Path) -> str:
    """Grafana's provisioning file for a folder of dashboards."""
    one = {"name": OURS, "folder": OURS, "type": "file", "options": {"path": str(boards)}}
    return yaml.safe_dump({"apiVersion": 1, "providers": [one]}, sort_keys=False)


def _name_rules(config: Path) -> str:
    """Name the rules in Prometheus's configuration, where there is one; returns what was done."""
    if not config.is_file():
        return f'name them in your prometheus.yml: rule_files: ["{config.with_name(RULES)}"]'
    text = config.read_text(encoding="utf-8")
    known = parse_yaml(text, str(config))
    named = known.get("rule_files") if isinstance(known, dict) else None
    if named and RULES in named:
        return f"{config} names them already"
    if named is not None:
        return f"add {RULES} to the rule_files of {config}"
    write_whole(config, f'{text.rstrip()}\n\nrule_files: ["{RULES}"]\n'.encode())
    return f"named them in {config}"

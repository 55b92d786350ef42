"""Private names of a library are used in one module alone."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "raypipe"
ROOMS = "capture graph models tensor checkpoint runtime/backward runtime/compiled runtime/graphs runtime/stage"
"""Rooms that take torch's from the module."""
RAY = re.compile(r"ray\._|ray\.experimental|ray\.autoscaler\.v2|ray\.\S*\._internal|_raylet|_node_ip_address")
TORCH = re.compile(r"torch\.(_(?!_version__)|utils\._|fx\.experimental|nn\.modules\.[a-z]+\._)")
CASES = [("ray", RAY, path) for path in sorted(ROOT.rglob("*.py")) if path.name != "ray_private.py"]
CASES += [("torch", TORCH, path) for room in ROOMS.split() for path in sorted((ROOT / room).rglob("*.py"))]


@pytest.mark.parametrize(
    ("library", "private", "path"), CASES, ids=[f"{library} {path.relative_to(ROOT)}" for library, _, path in CASES]
)
def test_nothing_else_uses_one(library: str, private: re.Pattern[str], path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        else:
            names = [node.arg or ""] if isinstance(node, ast.keyword) else []
        used = [name for name in names if private.match(name)]
        assert not used, f"{path}: {used} belongs into raypipe/compat/{library}_private.py"

"""Device memory over the shim, against the bytes that plans count: ``pytest -s`` prints the table of ``memory.py``."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu_shim.memory import CASES, GRAPH, LIMIT_S, NEAR, SETTINGS, row
from tests.gpu_shim.shim import lacking, said_by

pytestmark = [
    pytest.mark.runs,
    pytest.mark.own_ray,  # it starts none, but takes the machine for minutes
    pytest.mark.skipif(bool(lacking()), reason=f"the GPU shim is not here: {lacking()}"),
]


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What is said of the configurations that are asked for, all in one process, which measures their profiles."""
    here = [item for item in request.session.items if item.path == request.path]
    asked = [item.callspec.params["name"] for item in here if isinstance(item, pytest.Function)]
    return {one["name"]: one for one in said_by("tests.gpu_shim.memory", *asked, limit_s=LIMIT_S, **SETTINGS)}


@pytest.mark.parametrize("name", CASES)
def test_a_run_takes_the_memory_that_its_plan_counts(name: str, measured: dict[str, Any]) -> None:
    found = measured[name]
    print(f"\n{row(**found)}")
    assert len(found["counted"]) == (1 if name == GRAPH else 4)
    for planned, counted in zip(found["planned"], found["counted"], strict=True):
        assert abs(counted / planned - 1) <= NEAR, row(**found)

"""The placement graph of a model: what it counts, and Inception-V3 placed as published."""

import itertools
import json
from pathlib import Path

import pytest
import torch

from jobs.inception_v3 import InceptionV3
from raypipe.cli import run
from raypipe.graph.placement.place import place
from raypipe.graph.placement.problem import HardwareGraph, PlacementGraph
from raypipe.partition.pieces import graph_of_model

ROOT = Path(__file__).parents[2]
V100 = ROOT / "cluster" / "devices" / "v100.yaml"


@pytest.fixture(scope="module")
def inception() -> PlacementGraph:
    return graph_of_model("jobs.inception_v3:build", ["image=3x299x299"], 64, V100, "float32", "joint", 16.0, True)


def test_inception_is_the_published_network() -> None:
    with torch.device("meta"):
        model = InceptionV3()
    assert sum(p.numel() for p in model.parameters()) == 23_834_568  # the released model without auxiliary classifier
    assert [model.stem(torch.zeros(1, 3, 299, 299, device="meta")).shape[1:], model.head.in_features] == [
        (192, 35, 35),
        2048,
    ]


def nvlink(count: int) -> HardwareGraph:
    names = [f"gpu{n}" for n in range(count)]
    link = {"bandwidth_gb_s": 45, "latency_us": 8}
    return HardwareGraph.model_validate_json(
        json.dumps(
            {
                "nodes": [{"name": n, "memory_bytes": 32e9} for n in names],
                "links": [[a, b, link] for a, b in itertools.combinations(names, 2)],
            }
        )
    )


@pytest.mark.exhaustive
@pytest.mark.slow
def test_inception_on_v100s_as_published(inception: PlacementGraph) -> None:
    """Pal et al. 2019, section 6 and Figure 8: 1.32 on two, little more on three and four; ours are proven optimal."""
    alone = sum(op.seconds for op in inception.operations if isinstance(op.seconds, float))
    speedup = {}
    for count in (2, 3, 4):
        result = place(inception, nvlink(count), budget_s=60)
        assert result.optimal
        speedup[count] = alone / result.makespan_s
    assert speedup[2] == pytest.approx(1.32, rel=0.06)
    assert speedup[3] < speedup[2] * 1.1
    assert speedup[4] < speedup[3] * 1.02


@pytest.mark.exhaustive
@pytest.mark.slow
def test_merging_changes_no_total(inception: PlacementGraph) -> None:
    arguments = ("jobs.inception_v3:build", ["image=3x299x299"], 64, V100, "float32", "split", 16.0)
    apart = graph_of_model(*arguments, merge=False)
    assert len(apart.operations) > len(inception.operations)
    for of in ("seconds", "memory_bytes"):
        assert sum(getattr(op, of) for op in apart.operations) == pytest.approx(
            sum(getattr(op, of) for op in inception.operations)
        )


@pytest.mark.slow
def test_the_command_writes_what_place_reads(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    file = tmp_path / "graph.json"
    arguments = ["graph", "jobs.inception_v3:build", "--input", "image=3x75x75", "--batch", "2", "--cluster", str(V100)]
    assert run([*arguments, "-o", str(file)]) == 0
    assert run(["place", str(file), str(ROOT / "cluster/placement/two-v100.json"), "--json", "--budget", "4"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 0 < said["bound_s"] <= said["makespan_s"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (["--input", "image=3x"], "is not NAME=SHAPE"),
        (["--input", "image"], "is not NAME=SHAPE"),
        (["--input", "image=3x75x75", "--backward", "both"], "both"),
        (["--input", "image=3x75x75", "--dtype", "int4"], "no peak_tflops for int4"),
        (["--input", "image=999999999x999999999"], "larger than any sample"),
        (["--input", "picture=3x75x75"], "its arguments are image"),
    ],
)
def test_what_is_wrong_is_one_error(change, why: str, capsys) -> None:
    assert run(["graph", "jobs.inception_v3:build", "--cluster", str(V100), *change]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "why"), [("foo", '"foo" is not package.module:function'), ("nosuch:build", "nosuch can't be imported")]
)
def test_a_model_that_is_not_there_is_one_error(model: str, why: str, capsys) -> None:
    assert run(["graph", model, "--input", "x=3", "--cluster", str(V100)]) == 2
    said = capsys.readouterr().err
    assert why in said
    assert "fix: " in said

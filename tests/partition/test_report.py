"""The partition's report: even and balanced cuts, memory, what the cache of pieces gives back."""

from __future__ import annotations

import json

import pytest

from raypipe.cost.analytic import analytic_profile
from raypipe.cost.profile import Slicing
from raypipe.cost.tensor import Exchange, TensorRankWork, all_reduces
from raypipe.errors import SpecError
from raypipe.job import job_from
from raypipe.job.cluster import load_cluster
from raypipe.partition.partition_job import JobPieces, load_pieces, partition_job, pieces_key, save_pieces
from raypipe.partition.report import Crossing, ModelPiece, even_starts, live_per_stage, make_partition, report
from raypipe.partition.this_machine import this_machine
from raypipe.schedule import Shape, generate
from tests.cost.plain_layer import plain_layer

MIB = 2**20


@pytest.mark.parametrize(
    ("blocks", "stages", "starts"),
    [
        (["", "a", "a", "b", "b", "c", "c", "d", "d", ""], 2, [0, 5]),
        (["", "a", "a", "b", "b", "c", "c", "d", "d", ""], 4, [0, 3, 5, 7]),
        (["", "a", "b", "c", ""], 2, [0, 3]),  # the first stages get one more
        (["", "a", "b", "", "c", "d", ""], 2, [0, 3]),  # a decoder's embedding goes with its first block
        (["", "", "", ""], 2, [0, 2]),
        (["a", "b", "c"], 3, [0, 1, 2]),
    ],
)
def test_an_even_split_counts_blocks(blocks, stages, starts):
    assert even_starts(blocks, stages) == starts


def model(flops, heavy=2.0**22):
    """Pieces of these operations, in blocks of two, with a tied matrix at both ends."""
    pieces = tuple(
        ModelPiece(f"piece {i}", f"h.{(i - 1) // 2}" if 0 < i < len(flops) - 1 else "",
              (("tied" if i in (0, len(flops) - 1) else f"w{i}", int(heavy)),), f,
              (Crossing("x", (1, 8), "float32", 32),) if i < len(flops) - 1 else ())
        for i, f in enumerate(flops)
    )  # fmt: skip
    works = [
        plain_layer(p.label, flops=p.flops, parameters=int(heavy), kept_bytes=MIB, output_bytes=32) for p in pieces
    ]
    cluster = load_cluster("cluster/devices/a100.yaml")
    return pieces, analytic_profile(works, cluster, "float32", [1])


def test_the_balanced_cut_has_the_fastest_slowest_stage_and_a_shorter_step():
    pieces, profile = model([1e9, *[1e12, 2e12] * 8, 9e12])
    schedule = generate("1f1b", Shape(devices=4, microbatches=16))
    partition = make_partition(pieces, profile, schedule, 1)
    said = report(partition)
    assert said["balance"]["even"]["subgraphs"] == [5, 4, 4, 5]
    assert max(said["balance"]["balanced"]["stage_seconds"]) < max(said["balance"]["even"]["stage_seconds"])
    assert said["balance"]["speedup"] > 1.2
    assert said["balance"]["proven"]
    assert sum(stage["parameters"] for stage in said["stages"]) == said["parameters"] + 2**22  # tied over two stages
    assert [cut["bytes"] for cut in said["cuts"]] == [32] * 3
    assert [stage["subgraphs"][0] for stage in said["stages"][1:]] == [c["behind_subgraph"] + 1 for c in said["cuts"]]
    assert sum(stage["seconds"] for stage in said["stages"]) == pytest.approx(
        sum(s["seconds"] for s in said["subgraphs"])
    )
    json.dumps(said, allow_nan=False)


def test_memory_moves_the_cut():
    """Under 1F1B the first stage keeps most micro-batches, so with little memory it gets fewer pieces."""
    pieces, profile = model([1e12] * 16, heavy=1)
    schedule = generate("1f1b", Shape(devices=4, microbatches=8))
    assert live_per_stage(schedule) == (4.0, 3.0, 2.0, 1.0)
    free = make_partition(pieces, profile, schedule, 1).balanced
    assert [len(part) for part in free.stages] == [4, 4, 4, 4]
    tight = make_partition(pieces, profile, schedule, 1, memory_bytes=12.5 * MIB).balanced
    assert [len(part) for part in tight.stages] == [3, 4, 4, 5]
    assert max(tight.device_bytes) <= 12.5 * MIB
    with pytest.raises(SpecError, match="no cut into 4 stages fits the 6 MiB of a device"):
        make_partition(pieces, profile, schedule, 1, memory_bytes=6 * MIB)


def test_memory_counts_the_output_and_the_optimizer_of_the_job():
    """As the planner does: a stage holds its output until the backward, and SGD has state only with momentum."""
    pieces, profile = model([1e12] * 8, heavy=MIB)
    wide = replace_layers(profile, [x.model_copy(update={"output_bytes": MIB / 2}) for x in profile.layers])
    schedule = generate("1f1b", Shape(devices=4, microbatches=8))

    def first(profile, optimizer="sgd", momentum=0.0):
        return make_partition(
            pieces, profile, schedule, 1, 1e12, optimizer=optimizer, momentum=momentum
        ).balanced.device_bytes[0]  # fmt: skip

    assert first(profile, "adamw") - first(profile) == 2 * 8 * MIB
    assert first(profile, momentum=0.9) - first(profile) == 2 * 4 * MIB
    assert first(wide) - first(profile) == 4 * (MIB / 2 - 32)


@pytest.mark.parametrize("name", ["zb-v", "interleaved-1f1b", "chimera"])
def test_devices_with_two_stages_are_balanced_as_devices(name):
    pieces, profile = model([1e12] * 15 + [6e12])
    schedule = generate(name, Shape(devices=4, microbatches=8, chunks=1 if name == "chimera" else 2))
    result = make_partition(pieces, profile, schedule, 1).balanced
    costs = result.device_cost
    assert max(costs) <= result.bound * 1.01
    assert max(costs) - min(costs) < 2 * max(result.stage_cost)
    assert len(result.stages) == schedule.stages


def test_a_profile_of_another_model_is_refused():
    pieces, profile = model([1e9, 1e12, 1e12, 1e9])
    short = replace_layers(profile, profile.layers[:-1])
    with pytest.raises(SpecError, match="holds 3 layers, the model has 4"):
        make_partition(pieces, short, generate("1f1b", Shape(devices=2, microbatches=4)), 1)


def replace_layers(profile, layers):
    return profile.model_copy(update={"layers": layers})


def job(**changes):
    spec = {
        "name": "x", "model": {"hf": "gpt2", "config": {"n_layer": 4, "n_embd": 32, "n_head": 2}, "sequence": 16},
        "data": {"type": "bytes", "path": "stdlib"}, "train": {"steps": 1, "batch": 4},
        "parallel": {"stages": 2, "microbatch": 1},
    }  # fmt: skip
    return job_from({**spec, **changes})


def test_pieces_are_kept_and_damage_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYPIPE_CACHE_DIR", str(tmp_path))
    pieces, _ = model([1e9, 1e12, 1e9])
    works = tuple(plain_layer(p.label, flops=p.flops, parameters=1, kept_bytes=1, output_bytes=1) for p in pieces)
    gathered = (Exchange("all_gather", 4.0),)
    tensor_ranks = tuple(TensorRankWork(work, all_reduces(*(8.0,) * i), gathered) for i, work in enumerate(works))
    result = JobPieces(pieces, tensor_ranks, Slicing(positions=4, refused="it looks back"))
    save_pieces("key", result)
    assert load_pieces("key") == result
    assert load_pieces("other") is None
    (path,) = (tmp_path / "captured").iterdir()
    path.write_text('[[{"label": 1}], [], {"positions": 4}]')
    said: list[str] = []
    assert load_pieces("key", said.append) is None
    assert len(said) == 1
    assert "damaged" in said[0]


def test_the_key_of_pieces_follows_the_job():
    key = pieces_key(job())
    assert key == pieces_key(job(parallel={"stages": 4, "microbatch": 1}))  # how it is cut does not matter
    assert key != pieces_key(job(parallel={"stages": 2, "microbatch": 2}))
    assert key != pieces_key(job(train={"steps": 1, "batch": 4, "dtype": "float64"}))
    assert key != pieces_key(job(model={"hf": "gpt2", "config": {"n_layer": 5}, "sequence": 16}))
    gpt = {"type": "gpt", "layers": 2, "hidden": 8, "heads": 2, "sequence": 8}
    assert pieces_key(job(model=gpt)) is None


def test_this_machine_is_measured():
    result = this_machine("float32", 3)
    assert result.devices == 3
    assert 1e-3 < result.device.peak_tflops["float32"] < 10
    assert 0.1 < result.device.memory_gb_s < 10_000


def test_the_built_in_gpt_is_cut_by_its_layers():
    gpt = {"type": "gpt", "layers": 6, "hidden": 128, "heads": 2, "sequence": 64, "vocabulary": 32768}
    said = report(partition_job(job(model=gpt)))
    assert [s["label"] for s in said["subgraphs"]] == ["embedding", *["block"] * 6, "head"]
    assert said["stages"][1]["subgraphs"][1] == 8
    assert said["balance"]["balanced"]["subgraphs"][0] > said["balance"]["even"]["subgraphs"][0]  # the head is heavy
    tied = 32768 * 128
    assert sum(stage["parameters"] for stage in said["stages"]) == said["parameters"] + tied

"""A profile says what was measured: times from spans, bytes that autograd keeps, links from samples."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from raypipe.cli import run
from raypipe.cost.gpt_work import gpt_work
from raypipe.cost.profile import Noise, Profile, Slicing
from raypipe.data import Ragged, flat
from raypipe.errors import SpecError
from raypipe.job import GptSpec, job_from
from raypipe.models import GptLayers
from raypipe.plan.tensor_groups import Sharing, measured_with_experts
from raypipe.profiling import layer_times
from raypipe.profiling import profile_job as profiling
from raypipe.profiling.profile_job import measure_profile
from raypipe.profiling.profiled_steps import (
    AFTER,
    ALIVE,
    BEFORE,
    MICROBATCHES,
    WORST,
    Samples,
    alike,
    cast_bytes,
    grown_bytes,
    measured_layers,
    measured_step,
    middle_look,
    overhead_seconds,
    task_times,
    update_seconds,
)
from raypipe.schedule.costs import CostTable
from raypipe.schedule.live_activations import peak_activations
from raypipe.schedule.verify import verify
from raypipe.simulate.engine import simulate
from tests.capture.models import FAMILIES as CAPTURED
from tests.experts.families import FAMILIES
from tests.runtime.runs.small_runs import small_job
from tests.runtime.runs.test_any_model import half_frozen

MODEL = {"layers": 4, "hidden": 128, "heads": 4, "sequence": 64}
GROUPS = [0, 1, 1, 1, 1, 5]
HERE = [0, 1, 2, 5]


def test_alike_layers_are_measured_once() -> None:
    model = GptLayers(GptSpec(layers=4, hidden=16, heads=2, sequence=8))
    assert alike(model) == GROUPS
    assert measured_layers(GROUPS) == HERE


@pytest.mark.parametrize("way", ["joint", "recompute", "split"])
def test_the_measured_step_is_a_schedule(way) -> None:
    step = measured_step(6, HERE, way)
    verify(step)
    assert {task.stage for task in step.orders[0]} == set(HERE)
    # While R runs nothing but the inputs of the other micro-batch is alive.
    assert peak_activations(step)[0] == len(HERE) * (1 if way == "recompute" else ALIVE)


def simulated(way, costs: CostTable, gap: float = 0.0) -> Samples:
    """Three steps of device 0, its tasks one after another with ``gap`` between them."""
    order = measured_step(6, HERE, way).orders[0]
    spans = {span.task: span for span in simulate(measured_step(6, HERE, way), costs).spans[0]}
    lengths = [spans[task].end - spans[task].start for task in order]
    starts = np.cumsum([0.0, *(x + gap for x in lengths[:-1])])
    times = np.stack([starts, starts + lengths], axis=1)
    three = np.stack([times, times + 50.0, times + 99.0])
    return Samples(order, three, three[:, :, 1] - three[:, :, 0], np.zeros((len(order), 3), dtype=np.int64))


def test_times_come_back() -> None:
    costs = CostTable(
        forward=(0.5, 2.0, 2.0, 2.0, 2.0, 1.0), input_grad=(0.1, 2.1, 2.1, 2.1, 2.1, 1.1),
        weight_grad=(0.2, 1.9, 1.9, 1.9, 1.9, 0.9), recompute=(0.6, 2.3, 2.3, 2.3, 2.3, 1.3),
        update=(0.7, 0.2, 0.2, 0.2, 0.2, 0.1),
    )  # fmt: skip
    for way in ("joint", "recompute", "split"):
        sample = simulated(way, costs, gap=0.01)
        result = task_times([sample, sample], GROUPS)
        for (kind, stage), taken in result.items():
            assert taken.seconds == pytest.approx(costs.by_kind(kind)[stage])
            assert taken.spread == pytest.approx(0.0, abs=1e-9)
        assert overhead_seconds([sample], HERE) == pytest.approx(0.01)
        assert update_seconds([sample]) == pytest.approx(0.7 + 2 * 0.2 + 0.1 + 4 * 0.01)


def test_bytes_come_back() -> None:
    """Layer k keeps 100 (k + 1) bytes a micro-batch, of which W gives back all but k; its worst moment is 9 higher."""
    order = measured_step(6, HERE, "split").orders[0]
    grown = {"F": lambda k: 100 * (k + 1), "B": lambda k: -k, "W": lambda k: k - 100 * (k + 1), "U": lambda k: 0}
    after = np.cumsum([7, *(grown[task.kind](GROUPS[task.stage]) for task in order)])
    memory = np.stack([after[:-1], after[:-1] + 9, after[1:]], axis=1)
    sample = Samples(order, np.zeros((1, len(order), 2)), np.zeros((1, len(order))), memory)
    assert grown_bytes([sample], "F", GROUPS, BEFORE, AFTER) == {0: 100, 1: 200, 5: 600}
    assert grown_bytes([sample], "W", GROUPS, AFTER, BEFORE) == {0: 100, 1: 199, 5: 595}
    assert grown_bytes([sample], "B", GROUPS, BEFORE, WORST) == {0: 9, 1: 9, 5: 9}
    assert cast_bytes([sample], GROUPS) == {0: 0, 1: 0, 5: 0}
    made_once = np.cumsum([0, *(task.kind == "F" and task.mbs == (0,) for task in order)]) * 1000
    more = np.stack([made_once[:-1], made_once[1:], made_once[1:]], axis=1)
    first = replace(sample, memory=memory + more)
    assert cast_bytes([first], GROUPS) == {0: 1000, 1: 1000, 5: 1000}


def test_what_another_thread_allocates_meanwhile_does_not_count() -> None:
    quiet = np.array([[100, 190, 150], [150, 170, 120]])
    late = quiet + 5000  # the process has grown since
    late[1, 1:] += 2600  # and here it did so within a task
    odd = quiet - 300
    odd[0] -= [0, 0, 900]
    assert middle_look([quiet, late, odd]).tolist() == quiet.tolist()
    assert middle_look([late]).tolist() == late.tolist()
    assert middle_look([]).shape == (0, 3)


@pytest.mark.runs
def test_a_job_is_measured(local_ray, text_folder: Path, monkeypatch) -> None:
    # A batch of four of the largest micro-batches: with fewer, memory is seen on the last one of a step alone.
    # What a plan divides is not divided here.
    copies = {"stages": 1, "replicas": 2, "shard": "zero1"}
    job = small_job(text_folder, copies, MODEL, dtype="float32", clip=1.0, batch=16)
    sizes = [4, 2]
    # However busy this machine is: keep what is measured, and take it for true the next time.
    monkeypatch.setattr(Noise, "warning", lambda _: None)
    monkeypatch.setattr(profiling, "SAME", 1e9)
    monkeypatch.setattr(profiling, "QUICK", replace(profiling.QUICK, whole_s=1e9))
    profile = measure_profile(job, sizes, 2, quick=True, cached=True)
    assert Profile.model_validate_json(profile.model_dump_json()) == profile
    model = GptLayers(job.model)
    plain = [model.build(i, 0) for i in range(model.count)]
    assert [layer.name for layer in profile.layers] == list(model.names)
    assert [layer.parameters for layer in profile.layers] == [sum(p.numel() for p in x.parameters()) for x in plain]
    assert profile.tied_parameters == 256 * 128
    for layer in profile.layers:
        assert sorted(layer.times) == sorted(sizes)
        for times in layer.times.values():
            assert min(times.forward, times.input_grad, times.weight_grad, times.joint, times.recompute) > 0
    assert profile.layers[2] == profile.layers[3].model_copy(update={"name": "block.1"})
    # Counted tensor by tensor in raypipe/cost, and held there against what autograd saves.
    for layer, work in zip(profile.layers, gpt_work(job.model, "float32"), strict=True):
        assert layer.kept_bytes == pytest.approx(work.kept_bytes, rel=0.03)
        assert layer.waiting_bytes == pytest.approx(work.waiting_bytes, rel=0.03)
    block, work = profile.layers[1], gpt_work(job.model, "float32")[1]
    assert block.workspace_bytes == pytest.approx(work.workspace_bytes, rel=0.03)
    assert block.split_workspace_bytes == pytest.approx(work.split_workspace_bytes, rel=0.03)
    assert block.workspace_fixed_bytes == pytest.approx(work.workspace_fixed_bytes, rel=0.15)  # and bookkeeping
    assert profile.layers[1].output_bytes == 64 * 128 * 4
    assert profile.base_bytes > 100e6
    assert profile.inside.alpha_s > 0
    assert [(c.kind, c.group) for c in profile.collectives] == [("all_reduce", 2)]
    assert (profile.devices, profile.devices_per_host) == (2, 2)
    assert 0 < profile.alone <= 1
    said: list[str] = []
    again = measure_profile(job, sizes, 2, quick=True, cached=True, say=said.append)
    speed = {"layers": {"__all__": {"times"}}, "update_s_per_parameter": True, "task_overhead_s": True}
    assert again.model_dump(exclude=speed) == profile.model_dump(exclude=speed)
    factors = [
        new.times[size].forward / old.times[size].forward
        for new, old in zip(again.layers, profile.layers, strict=True) for size in sizes
    ]  # fmt: skip
    assert factors == pytest.approx([factors[0]] * len(factors))
    assert any(text.startswith("took the profile kept") for text in said)


@pytest.mark.runs
def test_a_profile_of_long_tasks_is_bounded(local_ray, text_folder: Path, monkeypatch) -> None:
    """As of a model whose tasks take seconds: layers once, one step of each order, the sizes that there is time for."""
    monkeypatch.setattr(layer_times, "LONG", 1.0)
    # Seconds for the smallest size and, by what it says of itself, four samples more.
    monkeypatch.setattr(layer_times.LayerBench, "sample_seconds", lambda *_: 1000.0)
    monkeypatch.setattr(profiling, "STEPS", 0.0)
    monkeypatch.setattr(profiling, "QUICK", replace(profiling.QUICK, whole_s=4900.0))
    said: list[str] = []
    job = small_job(text_folder, {}, MODEL, dtype="float32", batch=16)
    profile = measure_profile(job, [1, 2, 4, 8], 2, quick=True, say=said.append)
    assert "4 of 6 layers" not in " ".join(said)
    assert "3 of 6 layers" in " ".join(said)
    assert any("measuring 4 too" in text and "2, 8 would take too long" in text for text in said)
    for layer in profile.layers:
        assert list(layer.times) == [1, 4]
        assert layer.kept_bytes > 0
        assert layer.times[1].recompute == layer.times[1].forward


@pytest.mark.runs
@pytest.mark.exhaustive
def test_frozen_layers_are_measured_as_such(local_ray, tmp_path: Path) -> None:
    """Half of the model's layers train nothing, and those at its beginning have no gradient to compute."""
    draw = np.random.default_rng(0)
    np.savez(tmp_path / "rows.npz", features=draw.normal(size=(64, 5)), labels=draw.integers(0, 3, 64))
    job = job_from({
        "name": "frozen", "model": {"import": "tests.runtime.runs.test_any_model:half_frozen", "args": {"inside": 5}},
        "data": {"type": "arrays", "path": str(tmp_path / "rows.npz")},
        "train": {"steps": 1, "batch": 16, "dtype": "float32"}, "parallel": {"schedule": "1f1b", "stages": 1},
    })  # fmt: skip
    profile = measure_profile(job, [4], 1, quick=True)
    plain = half_frozen(5)
    assert sum(x.parameters for x in profile.layers) == sum(p.numel() for p in plain.parameters())
    assert sum(x.trained for x in profile.layers) == sum(p.numel() for p in plain.parameters() if p.requires_grad)
    assert profile.layers[0].parameters > profile.layers[0].trained == 0
    assert profile.layers[-1].trained == profile.layers[-1].parameters > 0
    assert profile.update_s_per_parameter > 0


@pytest.mark.runs
def test_a_profile_says_what_is_the_experts_and_what_they_get(local_ray, text_folder: Path) -> None:
    """Three layers, of which two are measured: the loads of the third are its own, as the model by itself routes."""
    config = {**FAMILIES["qwen3_moe"], "num_hidden_layers": 3}
    model = {"hf": "qwen3_moe", "config": config, "sequence": 16}
    job = job_from({
        "name": "experts", "model": model, "data": {"type": "bytes", "path": str(text_folder)},
        "train": {"steps": 1, "batch": 8, "dtype": "float32"}, "parallel": "auto",
    })  # fmt: skip
    profile = measure_profile(job, [2], 1, quick=True)
    found = [layer.experts for layer in profile.layers if layer.experts is not None]
    assert len(found) == 3
    for own in found:
        assert own.work.parameters == 4 * 3 * 16 * 8
        assert 0 < own.forward < 1
        assert sum(own.loads) == pytest.approx(4)
        assert all(round(load / 4 * 128) == pytest.approx(load / 4 * 128) for load in own.loads)  # 2 x 2 x 16 tokens
        assert own.imbalance(2, ()) == pytest.approx(max(sum(own.loads[:2]), sum(own.loads[2:])) / 2)
        halves = [max(sum(half), 4 - sum(half)) / 2 for half in combinations(own.loads, 2)]
        assert own.imbalance(2) == pytest.approx(min(halves))
    assert len({own.loads for own in found}) > 1
    assert set(measured_with_experts(job, profile, 4)) == {Sharing(experts=2), Sharing(experts=4)}


@pytest.mark.runs
def test_rows_of_packed_documents_are_measured(local_ray, tmp_path: Path) -> None:
    """Fewer than hold the documents of a step, whole, also where copies are to divide them."""
    draw = np.random.default_rng(0)
    rows = Ragged.of([draw.integers(3, 90, int(n)) for n in draw.integers(2, 32, 60)])
    np.savez(tmp_path / "rows.npz", **flat({"input_ids": rows, "labels": rows}))
    job = job_from({
        "name": "packed", "model": {"hf": "llama", "config": {**CAPTURED["llama"], "vocab_size": 96}},
        "data": {"type": "arrays", "path": str(tmp_path / "rows.npz")},
        "train": {"steps": 1, "tokens_per_step": 256, "microbatch_tokens": 32, "dtype": "float32"},
        "parallel": {"auto": True, "context": 2},
    })  # fmt: skip
    assert job.train.batch == 15
    profile = measure_profile(job, [1, 2], 1, quick=True)
    assert profile.slicing == Slicing(positions=32, packed=True)
    assert all(layer.times[2].forward > 0 for layer in profile.layers)
    assert profile.layers[1].key_value_bytes == 2 * 32 * (2 * 8) * 4


def test_a_model_that_fits_no_device_is_refused(text_folder: Path) -> None:
    from raypipe.profiling.layer_times import LayerBench

    job = small_job(text_folder, {}, {"hidden": 4096, "heads": 4})
    bench = LayerBench(job, GptLayers(job.model), workers=None, data=text_folder)
    with pytest.raises(SpecError, match=r"block.0 alone 6\.00 GiB\), but a device has 1\.00 GiB"):
        bench.check_room(1 << 30)
    bench.check_room(1 << 36)
    sgd = small_job(text_folder, {}, {"hidden": 4096, "heads": 4}, optimizer="sgd")
    with pytest.raises(SpecError, match=r"block.0 alone 3\.00 GiB\)"):  # weights and gradients, no state
        LayerBench(sgd, GptLayers(sgd.model), workers=None, data=text_folder).check_room(1 << 30)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--microbatches", "0"], "0 for a mini-batch of 32"),
        (["--microbatches", "64"], "64 for a mini-batch of 32"),
        (["--microbatches", "x"], "is not a whole number"),
        (["-o", "nowhere/p.json"], "there is no such folder"),
        (["--devices", "0"], r"greater than or equal to 1|the range x>=1"),
        (["--set", "model.hiden=3"], 'did you mean "hidden"'),
    ],
)
def test_wrong_requests_end_at_once(words, why, capsys) -> None:
    assert run(["profile", "jobs/quickstart.yaml", *words]) == 2
    out = capsys.readouterr()
    assert re.search(why, out.err)
    assert not out.out


@pytest.mark.runs
def test_the_command_writes_what_it_prints(local_ray, text_folder: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "profile.json"
    words = [f"data.path={text_folder}", "model.layers=2", "model.hidden=32", "model.sequence=16", "train.batch=4"]
    sets = [part for word in words for part in ("--set", word)]
    options = ["--devices", "1", "--microbatches", "2", "--quick", "-o", str(out), "--json"]
    assert run(["profile", "jobs/quickstart.yaml", *sets, *options]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert Profile.model_validate_json(json.dumps(printed)) == Profile.model_validate_json(out.read_bytes())
    assert printed["source"] == "measured"
    assert MICROBATCHES >= ALIVE

"""Copies that divide weights gather those of products in bfloat16, where the arithmetic reads nothing else of them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from raypipe.cost.analytic import analytic_profile
from raypipe.cost.stages import narrow_bytes
from raypipe.job import GptSpec
from raypipe.job.train_spec import TrainSpec
from raypipe.models import GptLayers, build_model
from raypipe.runtime.update import flat_weights, shards
from raypipe.runtime.update.flat_weights import FlatWeights
from raypipe.schedule import Schedule, Shape, generate
from raypipe.schedule.lowering.programs import programs
from raypipe.schedule.passes import add_updates, place_gradient_sync, replicate, shard
from raypipe.schedule.sharding import sum_groups
from tests.cost.test_memory_of_a_step import MACHINE, FirstOfGroup, Noise, executor, sliced
from tests.exhaustive import exhaustive
from tests.job_files import minimal_job
from tests.runtime.runs.one_device import executor_of
from tests.runtime.update.test_buckets import Done

pytestmark = pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="torch before 2.10 gathers float32")


def two_copies(name: str, chunks: int, policy: Any) -> tuple[Schedule, Schedule]:
    """An order of one device, and the same on two that divide weights."""
    one = generate(name, Shape(devices=1, microbatches=4, chunks=chunks))
    return one, add_updates(place_gradient_sync(shard(replicate(one, 2), 3, gather=policy, copies=2), "lazy"))


def one_step(
    spec: Any, cut: Sequence[range], name: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[float, dict[str, Tensor], list[int]]:
    """Run a step of the first of two copies on the weights of the start; return loss, gradients, bytes by stage."""
    one, schedule = two_copies(name, len(cut), policy)
    plain = executor(spec, one, cut, 2, "bfloat16")
    values = {n: p.detach().clone() for stage in plain.modules.values() for n, p in stage.trained.items()}
    gradients: dict[str, Tensor] = {}

    def gather(flat: FlatWeights) -> None:
        flat.whole.untyped_storage().resize_(flat._bytes)
        flat.gathered = True
        for n, at in flat.layout.offsets.items():
            flat.whole[at : at + values[n].numel()] = values[n].flatten()

    def reduce_scatter(flat: FlatWeights) -> None:
        flat.gradients.open()
        found = flat.gradients.close()
        for n, at in flat.layout.offsets.items():
            gradients[n] = gradients.get(n, 0) + found[at : at + values[n].numel()].view_as(values[n])
        flat._scattering.append((Done(), found[: flat.layout.shard]))

    monkeypatch.setattr(FlatWeights, "gather", gather)
    monkeypatch.setattr(FlatWeights, "reduce_scatter", reduce_scatter)
    groups: Any = {n: FirstOfGroup(2) for n in sum_groups(schedule.placement, schedule.sharding)}
    runner = executor(spec, schedule, cut, 2, "bfloat16", groups=groups)
    torch.manual_seed(0)  # of the data
    loss = runner.run(programs(schedule)[0], 0, 1e-3).loss_sum
    return loss, gradients, [sum(flat._bytes for flat in stage.flats) for stage in runner.sync.shards.values()]


@pytest.mark.parametrize(
    ("family", "name", "chunks", "policy"),
    [
        ("gpt", "1f1b", 1, "microbatch"), ("gpt", "bfs", 2, "unit"), ("gpt", "zeropp", 2, "unit"),
        ("gpt2", "1f1b", 1, "microbatch"), ("llama", "zeropp", 2, "unit"), ("chunks", "1f1b", 1, "microbatch"),
        ("mixtral", "1f1b", 1, "microbatch"),
    ],
)  # fmt: skip
def test_the_bits_are_those_of_weights_gathered_wide(family, name, chunks, policy, monkeypatch) -> None:
    """``chunks``: a GPT whose loss is computed in chunks of tokens, with the gradient of its head.

    Experts are read, and so gathered, in float32: autocast has no rule for grouped products.
    """
    spec, (layers,), profile = sliced("gpt" if family == "chunks" else family, "bfloat16")
    if family == "chunks":
        shape = {**spec.model_dump(), "tie_embeddings": False}
        plan = {"schedule": "1f1b", "stages": 1, "microbatch": 2}
        train = {"batch": 8, "dtype": "bfloat16", "loss_chunk_tokens": 32}
        spec = build_model(minimal_job({"type": "gpt", **shape}, parallel=plan, **train), None)
        profile = analytic_profile(GptSpec(**shape), MACHINE, "bfloat16", [2])
    cut = [layers] if chunks == 1 else [layers[:3], layers[3:]]
    loss, gradients, gathered = one_step(spec, cut, name, policy, monkeypatch)
    monkeypatch.setattr(shards, "weights_of_products", lambda _: set())
    wide_loss, wide_gradients, wide = one_step(spec, cut, name, policy, monkeypatch)
    assert loss == wide_loss
    assert gradients.keys() == wide_gradients.keys()
    for n, gradient in gradients.items():
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, wide_gradients[n]), n
    known = profile.model_copy(update={"gathers_narrow": True})
    for layers, narrow, whole in zip(cut, gathered, wide, strict=True):
        planned = narrow_bytes(known, layers) - (2 * 256 * 128 if family == "gpt2" else 0)  # of a matrix read twice
        assert whole - narrow == pytest.approx(planned, rel=0.01)  # biases are not counted


def trains(rank: int, folder: str, wide: bool, name: str, chunks: int, results: Any) -> None:
    """Train one of two copies for three steps; say the losses and the bytes that it gave to gathers."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{wide}", rank=rank, world_size=2)
    if wide:
        shards.weights_of_products = lambda _: set()
    sent: list[int] = []
    start = flat_weights.start_all_gather

    def gather(whole: Tensor, own: Tensor, group: Any) -> Any:
        sent.append(own.nbytes)
        return start(whole, own, group)

    flat_weights.start_all_gather = gather
    _, schedule = two_copies(name, chunks, "microbatch")
    groups = {n: dist.new_group([0, 1]) for n in sum_groups(schedule.placement, schedule.sharding)}
    spec = GptSpec(layers=2, hidden=64, heads=4, sequence=32, vocabulary=128, dropout=0.0, tie_embeddings=False)
    cut = [range(4)] if chunks == 1 else [range(2), range(2, 4)]
    runner = executor_of(
        GptLayers(spec, torch.float32), cut, schedule, Noise(128, 32), TrainSpec(steps=3, batch=16, dtype="bfloat16"),
        batch=16, microbatch=2, dtype=torch.float32, groups=groups, copy=rank, tied=False, clip=None,
        autocast=torch.bfloat16,
    )  # fmt: skip
    losses = []
    for step in range(3):
        torch.manual_seed(step)  # of the data
        losses.append(runner.run(programs(schedule)[rank], step, 0.01).loss_sum)
    results.put((rank, losses, sum(sent)))
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), *exhaustive(("zeropp", 2))])
def test_two_processes_train_to_the_same_bits_with_fewer_bytes(name, chunks, tmp_path) -> None:
    context = multiprocessing.get_context("fork")  # the modules are there
    found = []
    for wide in (False, True):
        results = context.Queue()
        given = str(tmp_path), wide, name, chunks, results
        processes = [context.Process(target=trains, args=(rank, *given)) for rank in range(2)]
        for process in processes:
            process.start()
        found.append(sorted(results.get(timeout=120) for _ in processes))
        for process in processes:
            process.join()
    for (_, losses, sent), (_, wide_losses, wide_sent) in zip(*found, strict=True):
        assert losses == wide_losses
        assert sent < 0.56 * wide_sent


def test_autocast_makes_no_copies_of_experts() -> None:
    _, _, profile = sliced("mixtral", "bfloat16")
    blocks = [layer for layer in profile.layers if layer.expert_parameters]
    assert len(blocks) == 2
    for layer in blocks:
        assert 0 < layer.cast_bytes <= 2 * (layer.parameters - layer.expert_parameters)

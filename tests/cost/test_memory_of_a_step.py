"""Predicted memory against every byte that torch's allocator hands out while the runtime runs a real step.

One device runs whole schedules, with two stages on it where the schedule has chunks. What two devices would add
(messages, gradient sums) is left to the runs in tests/runtime.
"""

import gc
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from raypipe.cost.analytic import analytic_profile
from raypipe.cost.memory import device_memory
from raypipe.cost.sizes import divided_sequences
from raypipe.graph.counted import ON_CPU
from raypipe.job import GptSpec
from raypipe.job.cluster import cluster_from
from raypipe.job.spec import job_from
from raypipe.job.train_spec import TrainSpec
from raypipe.models import DTYPES, GptLayers, build_model
from raypipe.models.current_slice import own_chunks
from raypipe.models.task import Field
from raypipe.partition.job_costs import tied_values
from raypipe.partition.partition_job import job_pieces
from raypipe.partition.pieces import tensor_ranks_of
from raypipe.runtime.update import collectives, flat_weights
from raypipe.schedule import Shape, generate
from raypipe.schedule.ir import StageGraph
from raypipe.schedule.lowering.asynchronous import WHOLE, parts
from raypipe.schedule.lowering.programs import programs
from raypipe.schedule.microbatch_order import Copies
from raypipe.schedule.passes import add_recompute, add_updates, place_gradient_sync, replicate, shard
from raypipe.schedule.sharding import sum_groups
from raypipe.schedule.verify import verify
from raypipe.tensor import SoloGroup, set_group
from tests.exhaustive import ONLY, crossed, exhaustive
from tests.runtime.runs.one_device import executor_of
from tests.runtime.update.test_buckets import Done

LINK = {"latency_us": 1, "bandwidth_gb_s": 1}
MACHINE = cluster_from(
    {
        "name": "any", "hosts": 1, "inside": LINK, "between": LINK,
        "device": {
            "name": "any", "memory_gib": 1, "usable": 1, "memory_gb_s": 1, "efficiency": 1,
            "peak_tflops": {"float32": 1, "float64": 1, "bfloat16": 1},
        },
    }
)  # fmt: skip


class Noise:
    """Random tokens."""

    def __init__(self, vocabulary, sequence):
        self.vocabulary, self.sequence = vocabulary, sequence

    def batch(self, split, seed, step, batch):
        tokens = torch.randint(self.vocabulary, (batch, self.sequence))
        return {"input_ids": tokens, "shift_labels": tokens}

    def lengths(self, split, seed, step, batch):
        return {}


class Packed(Noise):
    """Rows of two documents, one of which is three quarters of it."""

    def batch(self, split, seed, step, batch):
        numbers = torch.arange(self.sequence)
        numbers = torch.where(numbers < 3 * self.sequence // 4, numbers, numbers - 3 * self.sequence // 4)
        rows = super().batch(split, seed, step, batch)
        return {**rows, "position_ids": numbers.repeat(batch, 1)}


def executor(spec, schedule, cut, microbatch, dtype, recomputed=None, groups=None, optimizer="adamw", context=1):
    """The runtime's own executor over all stages of a GPT, or of a model of bytes; ``groups`` divide the stages."""
    gpt = isinstance(spec, GptSpec)
    model = GptLayers(spec, DTYPES[dtype]) if gpt else spec
    samples, slices = int(microbatch * schedule.share_of_samples), schedule.rules.slices
    model.slices = max(slices, context)
    train = TrainSpec(steps=3, batch=samples * schedule.microbatches // slices, dtype=dtype, optimizer=optimizer)
    rows = Packed if model.packed else Noise
    return executor_of(
        model, cut, schedule, rows(spec.vocabulary if gpt else 256, model.positions), train, batch=train.batch,
        microbatch=samples, dtype=DTYPES[dtype], recomputed=recomputed, groups=groups, tied=len(cut) > 1, clip=None,
        autocast=torch.bfloat16 if dtype == "bfloat16" else None,
    )  # fmt: skip


def measured(make, schedule, steps=2):
    """Most bytes allocated at once from the making of an executor to the end of its second step.

    That one finds the optimizer's state. Where several versions of the weights are kept, a third finds them all.
    All is watched from the start: of memory that was there before, the profiler does not say that it is freed.
    """
    program = programs(parts(add_updates(schedule))[WHOLE])[0]
    gc.collect()  # else what an earlier case has left is freed meanwhile, and counts as less
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        runner = make()
        for step in range(steps):
            runner.run(program, step, 1e-3)
    return most_bytes(seen)


def most_at_once(runner, program):
    """Most bytes that the second step allocates at once, on top of what it finds."""
    runner.run(program, 0, 1e-3)  # the optimizer makes its state
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        runner.run(program, 1, 1e-3)
    return most_bytes(seen)


def most_bytes(seen):
    """Most bytes in use at once of those that were allocated while a profiler watched."""
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


CAPTURED = {
    "gpt2": {
        "n_layer": 2, "n_embd": 128, "n_head": 4, "vocab_size": 256, "attn_pdrop": 0.0,
    },
    "llama": {
        "num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 256, "vocab_size": 256,
    },
    "mixtral": {
        "num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 256, "vocab_size": 256, "num_local_experts": 8,
    },
}  # fmt: skip
ONE, TWO = [range(6)], [range(3), range(3, 6)]
CASES = [
    ("1f1b", ONE, "float32", None, {"dropout": 0.1}),
    ("1f1b", ONE, "bfloat16", None, {"dropout": 0.1}),
    ("zb-h1", ONE, "float32", None, {"dropout": 0.1}),
    ("interleaved-1f1b", TWO, "float32", None, {}),
    ("bfs", TWO, "bfloat16", None, {}),
    ("zeropp", TWO, "float32", None, {"dropout": 0.1}),
    ("zb-v", TWO, "float32", None, {"vocabulary": 3000}),
    ("gpipe", ONE, "bfloat16", "late", {"vocabulary": 2000}),
    ("bfs", TWO, "float32", "early", {}),
    ("1f1b", ONE, "float32", None, {"vocabulary": 3000, "sequence": 32}),
    ("pipedream", ONE, "float32", None, {"tie_embeddings": False}),
    ("pipedream-2bw", ONE, "float32", None, {}),
    ("1f1b", ONE, "bfloat16-true", None, {"dropout": 0.1}),
    ("1f1b", ONE, "bfloat16-true", None, {"hidden": 256, "sequence": 16}),
    *exhaustive(
        ("gpipe", ONE, "float32", None, {}),
        ("gpipe", ONE, "float64", None, {}),
        ("zb-h1", ONE, "bfloat16", None, {}),
        ("fast-forward", TWO, "float32", None, {}),
        ("gpipe", ONE, "float32", "late", {}),
        ("1f1b", ONE, "float32", None, {"hidden": 256, "sequence": 32}),
        ("zb-h1", ONE, "bfloat16-true", None, {}),
        ("bfs", TWO, "bfloat16-true", None, {}),
        ("gpipe", ONE, "bfloat16-true", "late", {"vocabulary": 2000}),
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cut", "recomputed"),
    [("gpipe", ONE, {3, 4, 5}), ("1f1b", ONE, {4, 5}), ("gpipe", ONE, {1, 2, 4}), ("bfs", TWO, {2, 4, 5})],
)
def test_layers_that_are_computed_again_keep_nothing_until_then(name, cut, recomputed):
    spec = GptSpec(layers=4, hidden=128, heads=4, sequence=128, vocabulary=256, dropout=0.1)
    schedule = add_recompute(generate(name, Shape(devices=1, microbatches=4, chunks=len(cut))), "early")
    profile = analytic_profile(spec, MACHINE, "float32", [2])
    (predicted,) = device_memory(profile, cut, schedule, 2, recomputed=recomputed)
    result = measured(partial(executor, spec, schedule, cut, 2, "float32", recomputed), schedule)
    assert predicted.total == pytest.approx(result, rel=0.04), predicted.terms()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "slices", "chunks", "recompute"),
    [
        ("gpipe", "float32", 4, 1, True), ("interleaved-1f1b", "float32", 4, 2, False),
        ("1f1b", "bfloat16", 2, 1, False), ("zb-h1", "float32", 4, 1, False),
        *exhaustive(
            ("1f1b", "float32", 4, 1, False), ("1f1b", "float64", 8, 1, False), ("1f1b", "float32", 4, 1, True)
        ),
    ],
)  # fmt: skip
def test_slices_keep_their_share_of_a_sequence(name, dtype, slices, chunks, recompute):
    spec = GptSpec(layers=4, hidden=128, heads=4, sequence=256, vocabulary=256, dropout=0.1)
    schedule = generate(name, Shape(devices=1, microbatches=2, slices=slices, chunks=chunks))
    if recompute:
        schedule = add_recompute(schedule, "early")
    cut = TWO if chunks > 1 else ONE
    (predicted,) = device_memory(analytic_profile(spec, MACHINE, dtype, [2]), cut, schedule, 2)
    result = measured(partial(executor, spec, schedule, cut, 2, dtype), schedule)
    assert predicted.total == pytest.approx(result, rel=0.04), predicted.terms()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name", "dtype"),
    [
        ("gpt", "zb-h1", "float32"), ("gpt2", "1f1b", "float32"),
        *exhaustive(
            ("gpt", "1f1b", "float32"), ("gpt", "1f1b", "bfloat16"), ("llama", "zb-h1", "bfloat16"),
            ("gpt", "1f1b", "bfloat16-true"),
        ),
    ],
)  # fmt: skip
def test_a_loss_in_chunks_keeps_no_logits(family, name, dtype):
    """Of a vocabulary that takes most of the memory where its logits are whole."""
    totals = []
    shape = {"layers": 2, "hidden": 128, "heads": 4, "vocabulary": 8000}
    if family != "gpt":
        shape = {"hf": family, "config": {**CAPTURED[family], "vocab_size": 8000}}
    for chunk in (None, 32):
        job = job_from({
            "name": "chunks", "model": {**shape, "sequence": 256}, "data": {"type": "bytes", "path": "stdlib"},
            "train": {"steps": 1, "batch": 8, "dtype": dtype, "loss_chunk_tokens": chunk},
            "parallel": {"schedule": name, "stages": 1, "microbatch": 2},
        })  # fmt: skip
        model, works, tied = build_model(job, None), job.model, 0
        if family != "gpt":
            works, tied = [rank.work for rank in tensor_ranks_of(job, model, ON_CPU)], tied_values(job_pieces(job))
        cut, schedule = [range(model.count)], generate(name, Shape(devices=1, microbatches=4))
        profile = analytic_profile(works, MACHINE, dtype, [2], tied=tied, loss_chunk=chunk)
        (predicted,) = device_memory(profile, cut, schedule, 2)
        totals.append(measured(partial(executor, model, schedule, cut, 2, dtype), schedule))
        assert predicted.total == pytest.approx(totals[-1], rel=0.04), (chunk, predicted.terms())
    assert totals[1] < 0.7 * totals[0]


def sliced(family, dtype):
    """The built-in GPT, or a captured model; its cut, and its profile."""
    if family == "gpt":
        spec = GptSpec(layers=4, hidden=128, heads=4, sequence=256, vocabulary=256, dropout=0.1)
        return spec, ONE, analytic_profile(spec, MACHINE, dtype, [2])
    job = job_from({
        "name": "captured", "model": {"hf": family, "config": CAPTURED[family], "sequence": 256},
        "data": {"type": "bytes", "path": "stdlib"}, "train": {"steps": 1, "batch": 4, "dtype": dtype},
        "parallel": {"schedule": "1f1b", "stages": 1, "microbatch": 2},
    })  # fmt: skip
    model = build_model(job, None)
    works = [rank.work for rank in tensor_ranks_of(job, model, ON_CPU)]
    return model, [range(model.count)], analytic_profile(works, MACHINE, dtype, [2])


@pytest.mark.slow
@pytest.mark.parametrize(("family", "dtype", "recompute"), [
    ("gpt2", "float32", False),
    *exhaustive(("gpt", "float32", False), ("gpt2", "bfloat16", False)),
    *exhaustive(("llama", "float32", False), ("llama", "float64", True)),
])  # fmt: skip
def test_the_first_of_four_stages_keeps_less_in_slices(family, dtype, recompute):
    """Its order alone on one device: 4 micro-batches in flight, or 7 slices of a quarter each."""
    model, cut, profile = sliced(family, dtype)
    result, activations = {}, {}
    for slices in (1, 4):
        whole = generate("1f1b", Shape(devices=4, microbatches=6, slices=slices))
        chain = replace(whole, placement=((0,),), orders=whole.orders[:1], graph=StageGraph.chain(1))
        if recompute:
            chain = add_recompute(chain, "early")
        verify(chain)
        (predicted,) = device_memory(profile, cut, chain, 2)
        result[slices] = measured(partial(executor, model, chain, cut, 2, dtype), chain)
        activations[slices] = predicted.activations
        assert predicted.total == pytest.approx(result[slices], rel=0.04), predicted.terms()
    if not recompute:
        assert activations[4] / activations[1] == pytest.approx(7 / 16, rel=0.05)
        assert result[1] - result[4] == pytest.approx(activations[1] - activations[4], rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "cut", "dtype", "recompute", "changes"), CASES)
def test_every_byte_is_accounted_for(name, cut, dtype, recompute, changes):
    spec = GptSpec(
        **{"layers": 4, "hidden": 128, "heads": 4, "sequence": 128, "vocabulary": 256, "dropout": 0.0, **changes}
    )
    microbatch = 2
    schedule = generate(name, Shape(devices=1, microbatches=4, chunks=len(cut)))
    if recompute:
        schedule = add_recompute(schedule, recompute)
    (predicted,) = device_memory(analytic_profile(spec, MACHINE, dtype, [microbatch]), cut, schedule, microbatch)
    steps = 3 if name.startswith("pipedream") else 2
    result = measured(partial(executor, spec, schedule, cut, microbatch, dtype), schedule, steps)
    assert predicted.total == pytest.approx(result, rel=0.04), predicted.terms()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "changes"), crossed(range(3), [{}, {"hidden": 256}, {"vocabulary": 3000, "sequence": 32}])
)
def test_pipedream_has_no_gradients_when_a_backward_begins(device, changes):
    """The order of one of three devices alone, on the whole model: 3, 2 or 1 versions of the weights in flight."""
    spec = GptSpec(
        **{"layers": 4, "hidden": 128, "heads": 4, "sequence": 128, "vocabulary": 256, "dropout": 0.0,
           "tie_embeddings": False, **changes}
    )  # fmt: skip
    whole = generate("pipedream", Shape(devices=3, microbatches=6))
    order = tuple(task._replace(stage=0) for task in whole.orders[device])
    chain = replace(whole, placement=((0,),), orders=(order,), graph=StageGraph.chain(1))
    (predicted,) = device_memory(analytic_profile(spec, MACHINE, "float32", [2]), ONE, chain, 2)
    result = measured(partial(executor, spec, chain, ONE, 2, "float32"), chain, 3)
    assert predicted.total == pytest.approx(result, rel=0.04), predicted.terms()


# Bytes that the runtime's own sharded stages take on one of several copies, against the memory model.


SPEC = GptSpec(layers=4, hidden=128, heads=4, sequence=64, vocabulary=256, dropout=0.0, tie_embeddings=False)
MICROBATCH = 2
CUTS = {1: [range(6)], 2: [range(3), range(3, 6)]}
SHARDED = [
    pytest.param(name, chunks, level, policy, copies, dtype, "adamw", marks=() if daily else ONLY)
    for name, chunks in (("1f1b", 1), ("bfs", 2), ("zeropp", 2))
    for level in (1, 2, 3)
    for policy in ("step", "unit", "microbatch")
    for copies in (2, 4)
    for dtype in ("float32", "bfloat16")
    # Where weights are not divided nothing is gathered for a task; every level has both numbers of copies.
    for usual in [(level == 3 or policy == "step") and copies == (4 if level == 2 or policy == "unit" else 2)]
    for daily in [usual and (dtype == "float32" or (level == 3 and policy != "unit"))]
]
# Of whole matrices these copies' shares are not alike: all together are a sixth larger than what they hold.
SHARDED += [
    pytest.param("1f1b", 1, 1, "step", 8, "float32", "muon"),
    pytest.param("bfs", 2, 3, "step", 4, "float32", "muon"),
    *exhaustive(("zeropp", 2, 2, "unit", 4, "float32", "muon"), ("1f1b", 1, 3, "microbatch", 8, "bfloat16", "muon")),
]


class FirstOfGroup:
    """A process group of which only the first member exists."""

    def __init__(self, members: int) -> None:
        self._members = members

    def size(self) -> int:
        return self._members

    def rank(self) -> int:
        return 0


def gather(whole: torch.Tensor, own: torch.Tensor, group: FirstOfGroup) -> Done:
    for other in whole.view(group.size(), -1):
        if other.data_ptr() != own.data_ptr():
            other.copy_(own)
    return Done()


def scatter(own: torch.Tensor, whole: torch.Tensor, group: FirstOfGroup) -> Done:
    own.copy_(whole.view(group.size(), -1)[0])
    return Done()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "chunks", "level", "policy", "copies", "dtype", "optimizer"), SHARDED)
def test_a_copys_bytes_are_those_of_the_model(
    name, chunks, level, policy, copies, dtype, optimizer, monkeypatch
) -> None:
    monkeypatch.setattr(flat_weights, "start_all_gather", gather)
    monkeypatch.setattr(collectives, "start_reduce_scatter", scatter)
    one = generate(name, Shape(devices=1, microbatches=4, chunks=chunks))
    whole = shard(replicate(one, copies), level, gather=policy, copies=copies)
    schedule = add_updates(place_gradient_sync(whole, "lazy"))
    cut = CUTS[chunks]
    profile = analytic_profile(SPEC, MACHINE, dtype, [MICROBATCH], optimizer=optimizer)
    narrow = profile.model_copy(update={"gathers_narrow": dtype == "bfloat16" and hasattr(torch.Tensor, "grad_dtype")})
    predicted = device_memory(narrow, cut, schedule, MICROBATCH, optimizer=optimizer)[0]

    groups: Any = {n: FirstOfGroup(copies) for n in sum_groups(schedule.placement, schedule.sharding)}
    runner = executor(SPEC, schedule, cut, MICROBATCH, dtype, groups=groups, optimizer=optimizer)
    most = most_at_once(runner, programs(schedule)[0])
    kept = [t for m in runner.modules.values() for t in m.named.values()]
    kept += [flat.shard for stage in runner.sync.shards.values() for flat in stage.flats]
    kept += [t for o in runner.updates.optimizers.values() for state in o.state.values() for t in state.values()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    assert predicted.total == pytest.approx(most + sum(storages.values()), rel=0.05), predicted.terms()


# What copies that divide sequences hold: the bytes that the runtime allocates on one of them.


class FirstCopy(SoloGroup):
    """The first of several copies, without the others: it gets as much as they would send."""

    def __init__(self, size: int) -> None:
        self.size = size

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x.clone() for _ in range(self.size)]

    def start_all_to_all(self, x: torch.Tensor, sends: Any, receives: Any) -> Any:
        return x.clone(), lambda: None


def first_copy(copies: int, *of: Any) -> Any:
    runner = executor(*of, context=copies)
    lengths = runner.io_specs.model.chunk_lengths(copies)
    runner.feed.hold(own_chunks(0, copies), 2 * copies, lengths, Copies(4, 1))
    return runner


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "copies", "recompute"),
    [("1f1b", "float32", 2, False), ("zb-h1", "float32", 4, False), ("gpipe", "bfloat16", 2, True)],
)
def test_a_copy_keeps_its_share_of_a_sequence(name: str, dtype: str, copies: int, recompute: bool) -> None:
    spec = GptSpec(layers=4, hidden=128, heads=4, sequence=256, vocabulary=256, dropout=0.1)
    schedule = generate(name, Shape(devices=1, microbatches=4))
    if recompute:
        schedule = add_recompute(schedule, "early")
    whole = analytic_profile(spec, MACHINE, dtype, [2])
    (predicted,) = device_memory(divided_sequences(whole, copies), ONE, schedule, 2)
    (alone,) = device_memory(whole, ONE, schedule, 2)
    set_group(FirstCopy(copies), "context")
    try:
        result = measured(partial(first_copy, copies, spec, schedule, ONE, 2, dtype), schedule)
    finally:
        set_group(SoloGroup(), "context")
    assert predicted.total == pytest.approx(result, rel=0.04), predicted.terms()
    assert predicted.activations == pytest.approx(alone.activations / copies, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name", "dtype"), [("llama", "1f1b", "float32"), ("gpt2", "zb-h1", "float32")])
def test_a_copy_keeps_its_share_of_packed_rows(family: str, name: str, dtype: str) -> None:
    job = job_from({
        "name": "packed", "model": {"hf": family, "config": CAPTURED[family]},
        "data": {"type": "arrays", "path": "rows.npz"},
        "train": {"steps": 1, "batch": 8, "dtype": dtype, "tokens_per_step": 1024, "microbatch_tokens": 256},
        "parallel": {"schedule": name, "stages": 1, "microbatch": 2, "replicas": 2, "context": 2},
    })  # fmt: skip
    model = build_model(job, {name: Field((256,), torch.int64) for name in ("input_ids", "shift_labels")})
    works = [rank.work for rank in tensor_ranks_of(job, model, ON_CPU)]
    cut, schedule = [range(model.count)], generate(name, Shape(devices=1, microbatches=4))
    profile = divided_sequences(analytic_profile(works, MACHINE, dtype, [2]), 2)
    (predicted,) = device_memory(profile, cut, schedule, 2)
    set_group(FirstCopy(2), "context")
    try:
        result = measured(partial(first_copy, 2, model, schedule, cut, 2, dtype), schedule)
    finally:
        set_group(SoloGroup(), "context")
    assert predicted.total == pytest.approx(result, rel=0.04), predicted.terms()

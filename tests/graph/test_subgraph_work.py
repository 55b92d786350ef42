"""Work counted off a captured model, against the tensors that autograd saves and the built-in GPT's formulas."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from raypipe.cost.analytic import analytic_profile
from raypipe.cost.gpt_work import MEGATRON, gpt_work
from raypipe.cost.kernels import Kernels
from raypipe.cost.profile import Slicing
from raypipe.cost.stages import costs_of
from raypipe.cost.tensor import divided_gpt, tensor_profile
from raypipe.data import declared_fields
from raypipe.errors import SpecError
from raypipe.graph.counted import ON_CPU, is_cast, without_idle_casts
from raypipe.graph.liveness import replicated
from raypipe.job import DataSpec, GptSpec, JobSpec
from raypipe.job.cluster import load_cluster
from raypipe.job.parallel_spec import ParallelSpec
from raypipe.models import build_model
from raypipe.models.captured import CapturedModel
from raypipe.models.keyed_random import random_keys
from raypipe.partition.job_costs import divided_profile, job_profile
from raypipe.partition.partition_job import job_pieces
from raypipe.partition.pieces import VARYING, slicing_of, tensor_ranks_of
from raypipe.plan.candidate import slice_counts
from raypipe.plan.choose import choose
from raypipe.schedule import Shape, generate
from raypipe.tensor import SoloGroup, group_of_thread
from tests.exhaustive import exhaustive
from tests.job_files import minimal_job

ROOT = Path(__file__).parents[2]
KERNELS = Kernels(flops_s=1e12, bytes_s=1e12, overhead_s=1e-5)
SAMPLES = 2
SEQUENCE = 16
NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
GPT2 = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 260, "n_positions": SEQUENCE}
LLAMA = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "intermediate_size": 96, "vocab_size": 260, "max_position_embeddings": 32,
}  # fmt: skip


def job_of(
    kind: str, config: dict[str, Any], sequence: int = SEQUENCE, tensor: int = 1, lora: dict[str, Any] | None = None,
    **train: Any,
) -> JobSpec:  # fmt: skip
    return minimal_job(
        {"hf": kind, "config": config, "sequence": sequence, "lora": lora},
        parallel={"microbatch": 2, "tensor": tensor},
        **train,
    )


def saved_bytes(model: CapturedModel, i: int, narrow: bool) -> int:
    """What autograd saves of one sub-graph for SAMPLES samples, each storage once, parameters left out."""
    stage = model.build_stage([i], 0)
    text = torch.randint(256, (SAMPLES, SEQUENCE + 1), generator=torch.Generator().manual_seed(1))
    inputs = model.task.from_text(text, list(range(SAMPLES)))
    arrived = tuple(
        torch.randn(t.shape, dtype=t.dtype).requires_grad_(t.differentiable)
        for t in (model.crossing(i - 1, SAMPLES) if i else ())
    )
    result: dict[int, int] = {}
    kept: list[torch.Tensor] = []  # or an address could be given out twice
    own = {p.untyped_storage().data_ptr() for p in (*stage.parameters(), *stage.buffers())}

    def pack(t: torch.Tensor) -> torch.Tensor:
        kept.append(t)
        mask = t.dtype == torch.bool and t.shape == (SEQUENCE, SEQUENCE)  # what a query sees, once a micro-batch
        if t.untyped_storage().data_ptr() not in own and not mask:
            result[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        random_keys(0, 0, range(SAMPLES), True),
        torch.autocast("cpu", torch.bfloat16, enabled=narrow),
    ):
        out = stage(arrived, inputs)
        if i == model.count - 1:
            model.task.loss(out[0], inputs)
    return sum(result.values())


def table_bytes(model: CapturedModel, i: int) -> int:
    """Rotary tables that a sub-graph keeps but every stage makes once: left out of the account."""
    graph, sizes = model.graph, model.sizes(SAMPLES)
    anew = replicated(graph)
    span = model.sharding.operations(range(i, i + 1))
    read = {o for n in span for o in graph.operations[n].inputs if anew[o] and not anew[n]}
    kinds = [kind for o in read if (kind := graph.operations[o].type) is not None and kind.floating]
    return sum(kind.bytes(sizes) for kind in kinds)


class Two(SoloGroup):
    """A member whose other one has the same: what is computed is wrong, what is kept is not."""

    size = 2

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x, x]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "config", "dtype", "tensor"),
    [
        ("gpt2", {**GPT2, "activation_function": "gelu"}, "bfloat16", 1),
        ("gpt2", {**GPT2, "n_head": 4}, "float32", 2),
        ("gpt2", {**GPT2, **NO_DROPOUT}, "bfloat16", 1),
        *exhaustive(("gpt2", {**GPT2, **NO_DROPOUT}, "float32", 1), ("llama", LLAMA, "float32", 1)),
        ("llama", {**LLAMA, "num_attention_heads": 4, "num_key_value_heads": 2}, "bfloat16", 1),
    ],
    ids=[
        "dropout",
        "divided",
        "elementary GELU in bfloat16",
        "elementary GELU",
        "one key for all queries",
        "grouped queries",
    ],
)
def test_kept_bytes_are_the_tensors_that_autograd_saves(kind, config, dtype, tensor) -> None:
    """But for place numbers and what a query sees, once a micro-batch, and the loss itself."""
    job = job_of(kind, config, dtype=dtype, tensor=tensor)
    model = build_model(job, declared_fields(job.data), tensor_rank=0)
    assert isinstance(model, CapturedModel)
    works = [tensor_rank.work for tensor_rank in tensor_ranks_of(job, model, ON_CPU)]
    for i in (0, 1, 2, model.count - 1):
        with group_of_thread(Two()) if tensor > 1 else nullcontext():
            saved = saved_bytes(model, i, dtype == "bfloat16") - table_bytes(model, i)
        expected = SAMPLES * works[i].kept_bytes + works[i].cast_bytes
        assert saved == pytest.approx(expected, abs=8 * SEQUENCE), works[i].name
    tied = 260 * 64 // tensor if kind == "gpt2" else 0
    assert sum(work.parameters for work in works) - tied == sum(model.graph.parameters.values())


class Casts(TorchDispatchMode):
    """Counts casts."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16-true"])
def test_casts_to_the_dtype_that_a_tensor_has_copy_nothing(dtype: str) -> None:
    """Llama's norms compute in float32, whatever arrives, and cast back to that."""
    job = job_of("llama", LLAMA, dtype=dtype)
    model = build_model(job, declared_fields(job.data))
    assert isinstance(model, CapturedModel)
    asked = sum(map(is_cast, model.graph.operations))
    real = sum(map(is_cast, without_idle_casts(model.graph, None).operations))
    text = torch.randint(256, (SAMPLES, SEQUENCE + 1), generator=torch.Generator().manual_seed(1))
    inputs, stage = model.task.from_text(text, list(range(SAMPLES))), model.build_stage(list(range(model.count)), 0)
    with Casts() as casts:
        stage((), inputs)
    assert casts.count == real
    assert (asked > real) == (dtype == "float32")


def test_inputs_that_no_backward_reads_are_no_saved_tensors_of_a_stage(tmp_path) -> None:
    """A ReLU keeps its result alone: a stage that begins with it holds the sum that it reads all the same."""
    np.savez(tmp_path / "images.npz", image=np.zeros((8, 3, 16, 16), np.float32), labels=np.arange(8))
    job = minimal_job(
        {"import": "tests.capture.models:ResNet", "loss": "model"}, tmp_path / "images.npz", {"microbatch": 2}
    )
    model = build_model(job, declared_fields(job.data))
    assert isinstance(model, CapturedModel)
    works = [tensor_rank.work for tensor_rank in tensor_ranks_of(job, model)]
    inputs = {"image": torch.zeros(SAMPLES, 3, 16, 16), "labels": torch.arange(SAMPLES)}
    unread = [0]
    for i in range(1, model.count):
        arrived = tuple(torch.randn(t.shape).requires_grad_(t.differentiable) for t in model.crossing(i - 1, SAMPLES))
        saved: list[torch.Tensor] = []

        def keep(t: torch.Tensor, saved: list[torch.Tensor] = saved) -> torch.Tensor:
            saved.append(t)
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            model.build_stage([i], 0)(arrived, inputs)
        held = {t.untyped_storage().data_ptr() for t in saved}
        unread.append(sum(t.nbytes for t in arrived if t.untyped_storage().data_ptr() not in held))
    assert [SAMPLES * work.unread_input_bytes for work in works] == unread
    assert min(unread[1:]) == 0
    assert max(unread) > 0


def test_frozen_weights_have_no_gradients_and_layers_before_the_first_trained_one_no_backward() -> None:
    """Adapters in the second of two blocks: until there nothing is kept, and only what is behind has a B."""
    pytest.importorskip("peft")
    lora = {"r": 4, "target_modules": r".*\.1\.attn\.c_attn"}
    plain, adapted = job_of("gpt2", {**GPT2, **NO_DROPOUT}), job_of("gpt2", {**GPT2, **NO_DROPOUT}, lora=lora)
    whole, model = (build_model(job, declared_fields(job.data), tensor_rank=0) for job in (plain, adapted))
    assert isinstance(model, CapturedModel)
    works = [tensor_rank.work for tensor_rank in tensor_ranks_of(adapted, model)]
    usual = [tensor_rank.work for tensor_rank in tensor_ranks_of(plain, whole)]
    first = next(i for i, work in enumerate(works) if work.trained_parameters)
    assert [work.trained_parameters for work in works] == [4 * (64 + 3 * 64) if i == first else 0 for i in range(5 + 1)]
    assert sum(work.parameters for work in works) == sum(work.parameters for work in usual) + 4 * (64 + 3 * 64)
    for i, (work, before) in enumerate(zip(works, usual, strict=True)):
        saved = saved_bytes(model, i, False)
        assert saved == pytest.approx(SAMPLES * work.kept_bytes, abs=8 * SEQUENCE), work.name
        backward, weights = (KERNELS.seconds(each, 8) for each in (work.input_grad, work.weight_grad))
        assert (backward == 0.0) == (i < first)
        assert (weights == 0.0) == (i != first)
        assert work.weight_grad.flops < 0.1 * before.weight_grad.flops or not before.weight_grad.flops
    profile = job_profile(adapted, load_cluster(ROOT / "cluster" / "devices" / "a100.yaml"))
    assert (profile.tied_parameters, profile.trained_tied_parameters) == (260 * 64, 0)
    assert sum(layer.trained for layer in profile.layers) == 4 * (64 + 3 * 64)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [*exhaustive("float32"), "bfloat16"])
def test_the_same_architecture_costs_what_the_built_in_gpt_costs(dtype) -> None:
    """GPT-2 captured from its own code beside formulas that were counted by hand, on A100."""
    shape = GptSpec(layers=2, hidden=1024, heads=16, sequence=512, vocabulary=50257, dropout=0.1)
    config = {
        "n_layer": 2, "n_embd": 1024, "n_head": 16, "n_positions": 512, "activation_function": "gelu",
        "attn_pdrop": 0.0, "resid_pdrop": 0.1, "embd_pdrop": 0.1,
    }  # fmt: skip
    cluster = load_cluster(ROOT / "cluster" / "devices" / "a100.yaml")
    captured = job_profile(job_of("gpt2", config, 512, dtype=dtype), cluster)
    formulas = analytic_profile(gpt_work(shape, dtype), cluster, dtype)
    embedding, attention, mlp, *_, head = captured.layers
    for samples in (1, 8, 64):
        for what in ("forward", "input_grad", "weight_grad", "joint", "recompute"):
            ours = [getattr(layer.times[samples], what) for layer in captured.layers]
            theirs = [getattr(layer.times[samples], what) for layer in formulas.layers]
            assert ours[1] + ours[2] == pytest.approx(theirs[1], rel=0.03), what
            assert ours[-1] == pytest.approx(theirs[-1], rel=0.05), what
            assert sum(ours) == pytest.approx(sum(theirs), rel=0.03), what
    for what in ("parameters", "kept_bytes", "cast_bytes", "waiting_bytes"):
        block = getattr(attention, what) + getattr(mlp, what)
        assert block == getattr(formulas.layers[1], what)
        assert getattr(head, what) == getattr(formulas.layers[-1], what)
    assert embedding.parameters == formulas.layers[0].parameters
    assert embedding.kept_bytes == pytest.approx(formulas.layers[0].kept_bytes, rel=0.01)
    for ours, theirs in ((mlp, formulas.layers[1]), (head, formulas.layers[-1])):
        for what in ("output_bytes", "workspace_bytes", "workspace_fixed_bytes", "split_workspace_bytes"):
            assert getattr(ours, what) == pytest.approx(getattr(theirs, what)), what
    assert captured.tied_parameters == analytic_profile(shape, cluster, dtype).tied_parameters == 50257 * 1024


@pytest.mark.slow
def test_a_member_of_a_group_computes_holds_and_sums_what_the_formulas_say() -> None:
    """But for the head: a captured model gathers its logits, the built-in GPT's loss is divided."""
    shape = GptSpec(layers=2, hidden=1024, heads=16, sequence=512, vocabulary=50256, dropout=0.1)
    config = {
        "n_layer": 2, "n_embd": 1024, "n_head": 16, "n_positions": 512, "vocab_size": 50256, "attn_pdrop": 0.0,
        "activation_function": "gelu",
    }  # fmt: skip
    job = job_of("gpt2", config, 512, tensor=4)
    model = build_model(job, declared_fields(job.data), tensor_rank=0)
    embedding, attention, mlp, *_, head = tensor_ranks_of(job, model)
    table, block, *_, last = divided_gpt(shape, "float32", 4)
    assert embedding.forward == table.forward
    assert attention.forward + mlp.forward == block.forward
    assert attention.backward + mlp.backward == block.backward
    assert (head.forward, head.backward) == ((("all_gather", 4.0 * 512 * 50256),), last.backward)
    assert embedding.work.parameters == table.work.parameters
    assert attention.work.parameters + mlp.work.parameters == block.work.parameters
    assert head.work.parameters == last.work.parameters
    cluster = load_cluster(ROOT / "cluster" / "devices" / "a100.yaml")
    for halves in (False, True):
        ours = divided_profile(job, cluster, 4, halves)
        theirs = tensor_profile(shape, cluster, "float32", 4, sub_pipelined=halves)
        assert ours.tied_parameters == theirs.tied_parameters
        for what in ("forward", "input_grad", "weight_grad"):
            block_s = sum(getattr(layer.times[64], what) for layer in ours.layers[3:5])  # the second block's
            assert block_s == pytest.approx(getattr(theirs.layers[2].times[64], what), rel=0.08), what


def test_fused_kernels_of_a_captured_gpt2_are_those_of_the_gpt() -> None:
    """What they move and keep, and the shapes of the products, of a block between others."""
    length, hidden = 256, 1024
    config = {"n_layer": 3, "n_embd": hidden, "n_head": 8, "vocab_size": 512, "n_positions": length,
              "activation_function": "gelu", **NO_DROPOUT}  # fmt: skip
    job = job_of("gpt2", config, length, dtype="bfloat16-true")
    model = build_model(job, declared_fields(job.data), tensor_rank=0)
    attention, mlp = (rank.work for rank in tensor_ranks_of(job, model)[3:5])
    shape = GptSpec(layers=3, hidden=hidden, heads=8, sequence=length, vocabulary=512)
    block = gpt_work(shape, "bfloat16-true", MEGATRON)[2]
    for task in ("forward", "input_grad", "weight_grad"):
        ours, theirs = [getattr(attention, task), getattr(mlp, task)], getattr(block, task)
        assert sorted(p[:4] for each in ours for p in each.products) == sorted(p[:4] for p in theirs.products)
        assert sum(each.quantized for each in ours) == theirs.quantized
        known = sum(p.flops for each in ours for p in each.products) + sum(each.attention for each in ours)
        assert known == pytest.approx(sum(each.flops for each in ours))
        if task != "weight_grad":
            assert sum(each.fused_traffic or 0.0 for each in ours) == pytest.approx(theirs.fused_traffic, rel=0.15)
    assert (attention.fused_kept_bytes or 0) + (mlp.fused_kept_bytes or 0) == pytest.approx(
        block.fused_kept_bytes, rel=0.05
    )


def test_fp8_plans_and_does_not_train() -> None:
    job = job_of("gpt2", {**GPT2, **NO_DROPOUT}, dtype="fp8")
    wide = job.model_copy(update={"train": job.train.model_copy(update={"dtype": "bfloat16-true"})})
    assert job_pieces(job) == job_pieces(wide)
    with pytest.raises(SpecError, match="fp8 is for planning alone"):
        build_model(job, declared_fields(job.data))


def test_slices_of_a_captured_gpt2_take_what_those_of_the_gpt_take() -> None:
    """Attention grows along the sequence, in the forward and in the input gradient; keys and values are as large."""
    length, cluster = 8192, load_cluster(ROOT / "cluster" / "devices" / "h100.yaml")
    config = {"n_layer": 2, "n_embd": 1024, "n_head": 8, "vocab_size": 256, "n_positions": length,
              "activation_function": "gelu", **NO_DROPOUT}  # fmt: skip
    captured = job_profile(job_of("gpt2", config, length), cluster)
    shape = GptSpec(layers=2, hidden=1024, heads=8, sequence=length, vocabulary=256)
    whole = analytic_profile(shape, cluster, "float32")
    assert captured.slicing == whole.slicing == Slicing(positions=length)
    schedule = generate("1f1b", Shape(devices=1, microbatches=1, slices=4))
    result = []
    for profile in (captured, whole):
        cut = [range(len(profile.layers))]
        tasks = [task for task in schedule.tasks() if task.kind in ("F", "BW")]
        result.append(costs_of(profile, cut, 1, schedule).durations(schedule, tasks))
    for ours, theirs in zip(*result, strict=True):
        assert ours / sum(result[0]) == pytest.approx(theirs / sum(result[1]), rel=0.03)
    assert min(result[1]) < 0.6 * max(result[1])
    sizes = [sum(layer.key_value_bytes for layer in profile.layers) for profile in (captured, whole)]
    assert sizes[0] == sizes[1] == 2 * 2 * 4 * length * 1024


def test_profiles_say_why_a_model_does_not_run_in_slices(tmp_path) -> None:
    cluster = load_cluster(ROOT / "cluster" / "devices" / "h100.yaml")
    job = job_of("gpt2", {**GPT2, "n_positions": 2048}, 2048)
    dropping = job_profile(job, cluster)
    assert dropping.slicing is not None
    assert "its attention drops weights" in dropping.slicing.refused
    assert slice_counts(job, dropping) == ()
    decision = choose(job.model_copy(update={"parallel": ParallelSpec(auto=True)}), dropping, 2, search_s=0)
    assert sum("its attention drops weights" in note for note in decision.notes) == 1
    (tmp_path / "few.txt").write_text("one\ntwo\n" * 40)
    lines = job.model_copy(update={"data": DataSpec(type="lines", path=str(tmp_path / "few.txt"))})
    model = build_model(lines, declared_fields(lines.data), tensor_rank=0)
    assert slicing_of(lines, model, None) == Slicing(positions=2048, refused=VARYING)

"""Plans as other trainers' files and back; their own parsers: ``python -m tests.bench.planners.parsers``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raypipe.cost.analytic import analytic_profile
from raypipe.cost.divided_head import divided_cut
from raypipe.errors import RequestError, SpecError
from raypipe.job.cluster import load_cluster
from raypipe.job.parallel_spec import ParallelSpec
from raypipe.job.spec import job_from
from raypipe.plan.candidate import Candidate
from raypipe.plan.emit.layout import TrainerLayout, even_cut
from raypipe.plan.emit.nearest import nearest
from raypipe.plan.emit.trainers import TRAINERS, Costs, emit, layout_of, read, slow
from raypipe.plan.plan import Plan
from raypipe.plan.predict.prediction import Cut
from raypipe.plan.predict.predictor import Predictor
from raypipe.schedule.shape import Grid
from tests.job_files import minimal_job
from tests.plan.conftest import make_job, make_profile, make_shared

JOB, PROFILE = make_job(batch=16, clip=1.0), make_profile()
SHARED = {(2, False): make_shared(PROFILE, 2), (2, True): make_shared(PROFILE, 2, True)}
POSITIONS = make_shared(PROFILE, 2).model_copy(update={"base_bytes": PROFILE.base_bytes + 1})
COSTS = Costs(
    JOB, PROFILE, {**SHARED, (1, False, 2): PROFILE.model_copy(update={"experts": 2})}, divided=lambda _: POSITIONS
)
LAYERS = tuple(range(i, i + 1) for i in range(8))
EVEN, UNEVEN, EIGHT = even_cut(6, 2), (range(3), range(3, 8)), (range(8),)
PLANS: dict[str, tuple[Cut, dict[str, Any]]] = {
    "one device": (EIGHT, {"microbatch": 2}),
    "copies": (EIGHT, {"replicas": 4, "microbatch": 2, "sync": "eager"}),
    "zero1": (EIGHT, {"replicas": 4, "shard": "zero1", "microbatch": 2}),
    "zero2 over hosts": (EIGHT, {"replicas": 4, "shard": "zero2", "shard_replicas": 2}),
    "zero3": (even_cut(6, 2), {"replicas": 4, "shard": "zero3", "chunks": 2, "schedule": "interleaved-1f1b"}),
    "recomputed copies": (EIGHT, {"replicas": 4, "recompute": "full"}),
    "uneven pipeline": (UNEVEN, {"stages": 2, "replicas": 2}),
    "zero1 in a pipeline": (UNEVEN, {"stages": 2, "replicas": 2, "shard": "zero1", "sync": "eager"}),
    "zero3 in a pipeline": (UNEVEN, {"stages": 2, "replicas": 2, "shard": "zero3", "gather": "microbatch"}),
    "copies inside hosts": (EVEN, {"stages": 2, "replicas": 2, "innermost": "replicas"}),
    "some layers": (EVEN, {"stages": 2, "replicas": 2, "recompute": (2, 3, 6)}),
    "micro-batches kept": (EVEN, {"stages": 2, "replicas": 2, "recompute": "full", "keep": (0.5, 1.0)}),
    "interleaved": (even_cut(6, 4), {"stages": 2, "replicas": 2, "chunks": 2, "schedule": "interleaved-1f1b"}),
    "breadth first": (even_cut(6, 4), {"stages": 2, "replicas": 2, "chunks": 2, "schedule": "bfs"}),
    "gpipe": (EVEN, {"stages": 2, "schedule": "gpipe"}),
    "zb-h1": (UNEVEN, {"stages": 2, "replicas": 2, "schedule": "zb-h1"}),
    "zb-v": (even_cut(6, 4), {"stages": 2, "chunks": 2, "schedule": "zb-v"}),
    "chimera": (EVEN, {"stages": 2, "replicas": 2, "schedule": "chimera", "microbatch": 2}),
    "early recompute": (EVEN, {"stages": 2, "schedule": "early-recompute"}),
    "groups in halves": (UNEVEN, {"stages": 2, "tensor": 2, "sub_pipelined": True, "microbatch": 2, "update": "wait"}),
    "groups": (EIGHT, {"replicas": 2, "tensor": 2, "update": "wait"}),
    "groups with positions": (UNEVEN, {"stages": 2, "tensor": 2, "sequence_parallel": True, "update": "wait"}),
}  # fmt: skip


def plan_of(name: str) -> Plan:
    cut, keys = PLANS[name]
    return Plan.of(ParallelSpec(**keys), cut, JOB.train.batch)


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("name", PLANS)
def test_what_a_trainer_can_express_is_read_back_to_the_same_plan(name: str, trainer: str, tmp_path: Path) -> None:
    file, plan = tmp_path / "layout", plan_of(name)
    result = emit(trainer, plan, COSTS, file)
    file.write_text(result.text)
    title, back = read(file, COSTS, 4)
    assert title == TRAINERS[trainer].able.title
    assert back.plan() == result.layout.plan()
    p = back.parallel
    assert (p.stages, p.replicas, p.tensor) == (plan.parallel.stages, plan.parallel.replicas, plan.parallel.tensor)
    assert all(line in result.text for line in result.lost)
    changed = {
        key for key in ("shard", "recompute", "microbatch", "keep") if getattr(p, key) != getattr(plan.parallel, key)
    }
    assert changed <= {line.split(":")[0] for line in result.lost}
    assert bool(result.lost) == (len(result.lost) > 1), "the cost and each loss"


@pytest.mark.parametrize(
    ("trainer", "key", "sharded"),
    [
        ("megatron", "--expert-model-parallel-size 2\n", False),
        ("torchtitan", "--parallelism.expert_parallel_degree 2\n", True),
        ("automodel", "  ep_size: 2\n", True),
    ],
)
@pytest.mark.parametrize(
    ("cut", "keys"),
    [
        (EIGHT, {"replicas": 4}),
        (EIGHT, {"replicas": 4, "shard": "zero2", "shard_replicas": 2}),
        (UNEVEN, {"stages": 2, "replicas": 2, "shard": "zero1"}),
    ],
    ids=["copies", "groups of two", "pipeline"],
)
def test_divided_experts_are_read_back(
    cut: Cut, keys: dict[str, Any], trainer: str, key: str, sharded: bool, tmp_path: Path
) -> None:
    """torchtitan and AutoModel divide experts over copies that divide the other parameters too."""
    plan, file = Plan.of(ParallelSpec(experts=2, **keys), cut, JOB.train.batch), tmp_path / "layout"
    result = emit(trainer, plan, COSTS, file)
    assert key in result.text
    assert ("--training.disable_cuda_graphs\n" in result.text) == (trainer == "torchtitan")
    file.write_text(result.text)
    back = read(file, COSTS, 4)[1]
    assert back.plan() == result.layout.plan()
    assert back.parallel.experts == 2
    if sharded:
        assert back.parallel.shard == "zero2"
    said = any("divides experts over copies that divide the rest" in line for line in result.lost)
    assert said == (sharded and "shard" not in keys)


@pytest.mark.parametrize(
    ("trainer", "keys"),
    [
        ("megatron", ["--context-parallel-size 2\n"]),
        ("torchtitan", ["--parallelism.context_parallel_degree 2\n"]),
        ("automodel", ["  cp_size: 2\n", "  dp_size: {apart}\n"]),
    ],
)
@pytest.mark.parametrize(
    ("cut", "plan_keys"),
    [
        (EIGHT, {"replicas": 4}),
        (EIGHT, {"replicas": 4, "shard": "zero3"}),
        (EIGHT, {"replicas": 4, "shard": "zero2", "shard_replicas": 2}),
        (UNEVEN, {"stages": 2, "replicas": 2, "shard": "zero1"}),
    ],
    ids=["copies", "zero3", "groups of two", "pipeline"],
)
def test_divided_sequences_are_read_back(
    cut: Cut, plan_keys: dict[str, Any], trainer: str, keys: list[str], tmp_path: Path
) -> None:
    """torchtitan and AutoModel divide them over copies that divide the other parameters too."""
    plan, file = Plan.of(ParallelSpec(context=2, **plan_keys), cut, JOB.train.batch), tmp_path / "layout"
    result = emit(trainer, plan, COSTS, file)
    for key in keys:
        assert key.format(apart=plan.parallel.sample_copies) in result.text, result.text
    file.write_text(result.text)
    back = read(file, COSTS, 4)[1]
    assert back.plan() == result.layout.plan()
    assert (back.parallel.context, back.parallel.replicas) == (2, plan.parallel.replicas)
    assert back.microbatches == result.layout.microbatches == JOB.train.batch // plan.parallel.sample_copies


def test_sequences_that_a_trainer_does_not_divide() -> None:
    plan = Plan.of(ParallelSpec(replicas=2, context=2), EIGHT, JOB.train.batch)
    with pytest.raises(RequestError, match="DeepSpeed does not divide sequences over copies"):
        emit("deepspeed", plan, COSTS, None)


def test_experts_that_a_trainer_does_not_divide() -> None:
    plan = Plan.of(ParallelSpec(replicas=2, experts=2), EIGHT, JOB.train.batch)
    with pytest.raises(RequestError, match="DeepSpeed does not divide experts over copies"):
        emit("deepspeed", plan, COSTS, None)


def test_megatron_is_told_of_a_mixtures_experts() -> None:
    config = {
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
        "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    job = minimal_job({"hf": "deepseek_v3", "config": config, "sequence": 32}, ".", {"auto": True}, batch=8)
    layout = TrainerLayout(parallel=ParallelSpec(replicas=4, experts=4), cut=(range(6),), batch=8)
    lines = TRAINERS["megatron"].write(layout, job).splitlines()
    assert {"--num-experts 8", "--moe-router-topk 2", "--moe-ffn-hidden-size 32",
            "--moe-shared-expert-intermediate-size 64", "--moe-layer-freq ([0]*1+[1]*3)",
            "--expert-model-parallel-size 4", "--multi-latent-attention", "--q-lora-rank 24", "--kv-lora-rank 16",
            "--qk-head-dim 8", "--qk-pos-emb-head-dim 4", "--v-head-dim 8", "--qk-layernorm",
            "--moe-router-score-function sigmoid", "--moe-router-enable-expert-bias", "--moe-router-num-groups 2",
            "--moe-router-group-topk 1", "--moe-router-topk-scaling-factor 2.5", "--rotary-base 500000",
            "--norm-epsilon 1e-06", "--rope-type rope"} <= {*lines}  # fmt: skip
    for key in ("num_experts_per_tok", "v_head_dim"):
        bare = job.model.model_copy(update={"config": {k: v for k, v in config.items() if k != key}})
        with pytest.raises(SpecError, match=f"{key}: is not given"):
            TRAINERS["megatron"].write(layout, job.model_copy(update={"model": bare}))


@pytest.mark.parametrize("normalised", [True, False])
def test_megatron_is_told_how_a_router_weighs_and_of_a_gate(normalised: bool) -> None:
    config = {
        "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_experts": 8, "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 32, "norm_topk_prob": normalised,
    }  # fmt: skip
    model, data = {"hf": "qwen2_moe", "config": config, "sequence": 32}, {"type": "bytes", "path": "."}
    train = {"steps": 1, "batch": 8}
    job = minimal_job(model, data, {"auto": True}, **train)
    lines = (
        TRAINERS["megatron"].write(TrainerLayout(parallel=ParallelSpec(), cut=(range(6),), batch=8), job).splitlines()
    )
    assert "--moe-shared-expert-gate" in lines
    assert ("--moe-router-pre-softmax" in lines) != normalised


def test_megatron_is_told_the_sizes_alone_of_a_model_whose_arguments_are_not_known() -> None:
    config = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
    train, data = {"steps": 1, "batch": 8}, {"type": "bytes", "path": "."}
    model = {"hf": "gpt_oss", "config": config, "sequence": 32}
    job = minimal_job(model, data, {"auto": True}, **train)
    text = TRAINERS["megatron"].write(TrainerLayout(parallel=ParallelSpec(), cut=(range(6),), batch=8), job)
    assert "# of the model these are the sizes alone: add what else gpt_oss has\n" in text
    assert "--hidden-size 64" in text


def test_megatron_is_told_how_a_model_is_trained() -> None:
    """Its own defaults are a tenth of dropout, and another optimizer's figures."""
    config = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
    data, layout = {"type": "bytes", "path": "."}, TrainerLayout(parallel=ParallelSpec(), cut=(range(6),), batch=8)

    def lines(hf: str, rope: dict[str, Any] | None = None, **train: Any) -> set[str]:
        own = {**config, "rope_parameters": rope} if rope else config
        job = minimal_job(
            {"hf": hf, "config": own, "sequence": 32}, data, {"auto": True}, **{"steps": 90, "batch": 8, **train}
        )
        return {*TRAINERS["megatron"].write(layout, job).splitlines()}

    adamw = lines("llama", lr=0.01, betas=[0.9, 0.95], weight_decay=0.1, lr_schedule="cosine", warmup_steps=5)
    assert {"--optimizer adam", "--lr 0.01", "--adam-beta2 0.95", "--weight-decay 0.1", "--lr-decay-style cosine",
            "--lr-warmup-iters 5", "--clip-grad 0", "--attention-dropout 0", "--hidden-dropout 0"} <= adamw  # fmt: skip
    assert {"--attention-dropout 0.1", "--hidden-dropout 0.1"} <= lines("gpt2")
    assert "# no argument here says train.decay" in adamw
    smoothed = lines("llama", decay="matrices", label_smoothing=0.1)
    assert "# no argument here says train.label_smoothing" in smoothed
    assert not any("no argument" in line for line in lines("llama", decay="matrices"))
    assert {"--optimizer sgd", "--sgd-momentum 0.5"} <= lines("llama", optimizer="sgd", momentum=0.5)
    assert "# the optimizer is Adam in place of muon" in lines("llama", optimizer="muon")
    scaled = lines("llama", {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 4.0})
    assert {"--use-rope-scaling", "--rope-scaling-factor 4", "--rotary-base 500000"} <= scaled
    assert "# rotary positions are plain in place of yarn" in lines("llama", {"rope_type": "yarn", "factor": 4.0})


def test_megatron_is_told_of_a_qwens_heads_and_norms() -> None:
    """The type says what the configuration leaves to its defaults; heads are wider than their share of the model."""
    config = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 32}
    model = {"hf": "qwen3_moe", "config": config, "sequence": 32}
    train, data = {"steps": 1, "batch": 8}, {"type": "bytes", "path": "."}
    job = minimal_job(model, data, {"auto": True}, **train)
    lines = TRAINERS["megatron"].write(TrainerLayout(parallel=ParallelSpec(), cut=(range(6),), batch=8), job)
    said = {"kv-channels 32", "qk-layernorm", "swiglu", "normalization RMSNorm", "position-embedding-type rope"}
    assert {f"--{line}" for line in {*said, "untie-embeddings-and-output-weights"}} <= {*lines.splitlines()}


@pytest.mark.parametrize(
    ("name", "trainer", "lost"),
    [
        ("uneven pipeline", "megatron", set()),
        ("zero1 in a pipeline", "megatron", set()),
        ("zb-h1", "torchtitan", {"innermost"}),
        ("zb-v", "automodel", set()),
        ("zb-v", "megatron", {"schedule", "microbatch"}),
        ("zero1", "torchtitan", {"shard", "chunks"}),
        ("zero3 in a pipeline", "deepspeed", {"shard", "innermost"}),
        ("zero2 over hosts", "deepspeed", {"shard_replicas", "chunks"}),
        ("some layers", "megatron", {"recompute"}),
        ("micro-batches kept", "megatron", {"keep"}),
        ("groups in halves", "megatron", {"sub_pipelined"}),
        ("groups with positions", "megatron", set()),
        ("groups", "torchtitan", {"sequence_parallel"}),
        ("groups with positions", "deepspeed", {"sequence_parallel"}),
    ],
)
def test_the_file_says_what_is_lost_and_what_it_costs(name: str, trainer: str, lost: set[str], tmp_path: Path) -> None:
    result = emit(trainer, plan_of(name), COSTS, tmp_path / "layout")
    assert {line.split(":")[0] for line in result.lost[1:]} == lost
    if lost:
        own, planned = (COSTS.predict(p).step_s for p in (result.layout.plan(), plan_of(name)))
        more = max(0.0, own / planned - 1)
        assert f"predicted to take {own:.4g} s a step, {more:.1%} more than the plan" in result.lost[0]


@pytest.mark.parametrize("name", ["uneven pipeline", "zero1", "interleaved", "zb-h1", "zero3 in a pipeline"])
def test_a_plan_is_predicted_as_the_planner_predicts_its_candidate(name: str) -> None:
    keys = PLANS[name][1]
    judge, p = Predictor(PROFILE, JOB.train, 6), ParallelSpec(**keys)
    grid = Grid(p.stages, p.replicas, p.microbatch, JOB.train.batch // p.replicas // p.microbatch)
    same = {"chunks": p.chunks, "shard": p.shard, "gather": p.gather, "sync": p.sync}
    c = Candidate.on(grid, p.schedule, **same)
    judge = replace(judge, syncs=(p.sync,))
    made = Plan.of(p, judge.cut(c), JOB.train.batch)
    wanted, result = judge.predict(c, timed=True), COSTS.predict(made)
    assert result.step_s == pytest.approx(judge.time(wanted, final=True).step_s, rel=1e-9)
    assert [device.total for device in result.memory] == pytest.approx(list(wanted.memory_bytes), rel=1e-9)


def test_groups_that_divide_positions_have_costs_of_their_own() -> None:
    """Those are made where plans share layers otherwise; without that they are refused, as groups of another size."""
    own, other = plan_of("groups with positions"), plan_of("groups")
    plain = own.model_copy(update={"parallel": own.parallel.model_copy(update={"sequence_parallel": False})})
    more = [a.total - b.total for a, b in zip(COSTS.predict(own).memory, COSTS.predict(plain).memory, strict=True)]
    assert more == [1.0, 1.0]
    with pytest.raises(SpecError, match="groups of 2 devices"):
        Costs(JOB, PROFILE, SHARED).predict(own)
    assert Costs(JOB, PROFILE, SHARED).predict(other)


def test_a_layout_that_does_not_fit_is_refused() -> None:
    plan = plan_of("zero3 in a pipeline")
    nearest_plan = emit("deepspeed", plan, COSTS, None).layout.plan()
    held = max(device.total for device in COSTS.predict(nearest_plan).memory)
    tight = Costs(JOB, make_profile(memory_bytes=held - 1), {})
    with pytest.raises(RequestError, match=r"DeepSpeed cannot express the plan: the nearest to the plan lacks .* GiB"):
        emit("deepspeed", plan, tight, None)


def test_stale_weights_and_few_micro_batches_are_refused(tmp_path: Path) -> None:
    stale = Plan.of(ParallelSpec(stages=2, schedule="pipedream"), EVEN, 16)
    with pytest.raises(RequestError, match="trains on stale weights, Megatron-LM does not"):
        emit("megatron", stale, COSTS, tmp_path / "layout")
    few = Plan.of(ParallelSpec(stages=2, microbatch=16), EVEN, 16)
    with pytest.raises(RequestError, match="AutoModel wants a micro-batch for each of 2 devices, the plan has 1"):
        emit("automodel", few, COSTS, tmp_path / "layout")
    with pytest.raises(RequestError, match="goes into a file beside"):
        emit("torchtitan", plan_of("zb-h1"), COSTS, None)


def test_torchtitan_is_given_its_own_configuration_of_a_model_or_none() -> None:
    """Mistral 7B has the widths of Llama 3 8B, and Llama 2 70B those of Llama 3 70B: other models."""
    for hf, blocks, hidden, inner, vocabulary, config in (
        ("llama", 32, 4096, 14336, 128256, "llama3_8b"),
        ("mistral", 32, 4096, 14336, 32768, None),
        ("llama", 80, 8192, 28672, 128256, "llama3_70b"),
        ("llama", 80, 8192, 28672, 32000, None),
        ("qwen3", 64, 5120, 25600, 151936, "qwen3_32b"),
    ):
        sizes = {"num_hidden_layers": blocks, "hidden_size": hidden, "intermediate_size": inner}
        sizes |= {"num_attention_heads": 32, "vocab_size": vocabulary}
        model = {"hf": hf, "sequence": 4096, "config": sizes}
        job = job_from({**JOB.model_dump(exclude_unset=True), "model": model})
        layout = TrainerLayout(parallel=ParallelSpec(), cut=even_cut(6, 1), batch=16)
        lines = TRAINERS["torchtitan"].write(layout, job, None).splitlines()
        assert [line for line in lines if line.startswith("--config")] == ([f"--config {config}"] if config else [])
        assert any("add --module and --config of your own" in line for line in lines) == (config is None)
        assert f"# set in the configuration, no argument: optimizer {job.train.optimizer}, rate 0.001" in lines


MEGATRON = "--micro-batch-size 2 --global-batch-size 16 "


@pytest.mark.parametrize(
    ("text", "cut", "keys"),
    [
        (MEGATRON, EIGHT, {"replicas": 4}),
        (MEGATRON + "--pipeline-model-parallel-size 2", EVEN, {"stages": 2, "replicas": 2}),
        (MEGATRON + "--pipeline-model-parallel-size=2 --num-layers-per-virtual-pipeline-stage 1 --num-layers 6",
         even_cut(6, 6), {"stages": 2, "chunks": 3, "schedule": "interleaved-1f1b"}),
        (MEGATRON + "--pipeline-model-parallel-size 2 --num-layers 6 --decoder-first-pipeline-num-layers 2",
         UNEVEN, {"stages": 2}),
        (MEGATRON + "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*2|(tt)*2,L'",
         UNEVEN, {"stages": 2}),
        (MEGATRON + "--pipeline-model-parallel-size 2 --recompute-granularity full --recompute-method block "
         "--recompute-num-layers 1", EVEN, {"recompute": (1, 4)}),
        ("--parallelism.pipeline_parallel_degree 2 --training.local_batch_size 8 --training.global_batch_size 16 "
         "activation-checkpoint:none", EVEN, {"stages": 2, "replicas": 2, "shard": "zero2", "microbatch": 1}),
        ("--parallelism.pipeline_parallel_degree 2 --parallelism.data_parallel_replicate_degree 2 "
         "--parallelism.data_parallel_shard_degree 1 --training.local_batch_size 8 activation-checkpoint:full",
         EVEN, {"stages": 2, "replicas": 2, "shard": "none", "recompute": "full"}),
        ("step_scheduler: {local_batch_size: 4}\ndistributed: {strategy: ddp}", EIGHT,
         {"replicas": 4, "shard": "none"}),
        ('{"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}',
         LAYERS, {"replicas": 4, "shard": "zero2"}),
        ('{"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "pipeline": {"stages": 2}}', EVEN,
         {"stages": 2, "replicas": 2}),
    ],
)  # fmt: skip
def test_layouts_that_people_wrote(text: str, cut: Cut, keys: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "theirs"
    file.write_text(text)
    _, result = read(file, COSTS, 4)
    assert result.cut == cut
    assert {key: getattr(result.parallel, key) for key in keys} == keys
    result.plan()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("--global-batch-size 16", "micro-batch-size: is missing"),
        (MEGATRON + "--context-parallel-size 3", "4 devices are no multiple of 3"),
        (MEGATRON + "--expert-model-parallel-size 3", "4 copies are no multiple of 3"),
        (MEGATRON + "--expert-model-parallel-size 2 --tensor-model-parallel-size 2", "and no plan has both"),
        (MEGATRON + "--pipeline-model-parallel-size 3", "4 devices are no multiple of 3"),
        (MEGATRON + "--pipeline-model-parallel-layout Etm|L", "is not an embedding"),
        (MEGATRON + "--recompute-granularity selective", '"selective" is not expressible'),
        (MEGATRON + "--num-layers 5", "has 5 blocks, the job's model 6"),
        ("--micro-batch-size 2 --global-batch-size 32", "has a batch of 32, the job 16"),
        ("# WORLD_SIZE=8\n" + MEGATRON, "needs 8 devices, there are 4"),
        (MEGATRON + "'", "is no list of arguments"),
        ("--parallelism.pipeline_parallel_degree x", "is 'x', no number"),
        ("--parallelism.tensor_parallel_degree 1 activation-checkpoint:selective", "selects operations"),
        ("--parallelism.pipeline_parallel_degree 2 --parallelism.module_fqns_per_model_part lm_head layers.0 "
         "activation-checkpoint:none",
         "lists other modules"),
        ("distributed: [", "is no YAML"),
        ("distributed: {strategy: megatron_fsdp}", '"megatron_fsdp" is not expressible'),
        ("{", "is no JSON"),
        ('{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "pipeline": {"stages": 2, "partition": [0, 8]}}',
         "is no cut of 8 layers in 2 stages"),
    ],
)  # fmt: skip
def test_what_no_plan_has_is_refused_by_name(text: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "theirs"
    file.write_text(text)
    with pytest.raises(SpecError) as error:
        read(file, COSTS, 4)
    assert why in str(error.value)
    assert error.value.fix


def test_stages_that_end_inside_blocks_move_between_them(tmp_path: Path) -> None:
    """Six layers as three blocks of two: a cut after layer 3 is inside a block."""
    plan = Plan.of(ParallelSpec(stages=2, replicas=2, recompute=(1, 2, 5)), EVEN, 16)
    halves = Costs(make_job(layers=3, batch=16, clip=1.0), PROFILE, {})
    assert halves.per_block == 2
    result = emit("megatron", plan, halves, tmp_path / "layout")
    assert {line.split(":")[0] for line in result.lost[1:]} == {"cut", "recompute"}
    assert result.layout.aligned
    (tmp_path / "layout").write_text(result.text)
    _, back = read(tmp_path / "layout", halves, 4)
    assert back.plan() == result.layout.plan()
    assert back.parallel.recompute == result.layout.parallel.recompute
    with pytest.raises(SpecError, match="not as an embedding, 4 blocks and a head"):
        Costs(make_job(layers=4), PROFILE, {})


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zeropp"])
def test_more_stages_than_blocks_become_fewer(schedule: str, trainer: str, tmp_path: Path) -> None:
    """Eight stages of a layer, where the trainers cut between an embedding, three blocks and a head."""
    cut = tuple(range(i, i + 1) for i in range(8))
    plan = Plan.of(ParallelSpec(stages=4, chunks=2, schedule=schedule), cut, 16)
    halves = Costs(make_job(layers=3, batch=16, clip=1.0), PROFILE, {})
    result = emit(trainer, plan, halves, tmp_path / "layout")
    assert result.layout.aligned
    assert len(result.layout.cut) == 4
    assert {"cut", "schedule"} == {line.split(":")[0] for line in result.lost[1:]}


def test_more_devices_than_blocks_are_refused() -> None:
    plan = Plan.of(ParallelSpec(stages=4), even_cut(6, 4), 16)
    with pytest.raises(RequestError, match="no order for 4 devices and 1 blocks"):
        emit("megatron", plan, Costs(make_job(layers=1, batch=16), PROFILE, {}), None)


def test_what_is_slow_about_a_layout_adds_up_and_the_plan_mends_it() -> None:
    best = Plan.of(ParallelSpec(stages=2, replicas=2, microbatch=1, sync="eager", update="wait"), EVEN, 16)
    poor = TrainerLayout(
        parallel=best.parallel.model_copy(update={"recompute": "full"}), cut=(range(2), range(2, 8)), batch=16
    )
    result = slow(poor, best, COSTS)
    assert result.step_s > result.planned_s
    for at, step_s in enumerate((result.step_s, result.planned_s)):
        assert sum(pair[at] for pair in result.parts.values()) == pytest.approx(step_s, rel=1e-9)
    assert set(result.saved) == {"cut", "recomputation"}
    alone = replace(poor, cut=EVEN)
    assert result.saved["cut"] == pytest.approx(result.step_s - COSTS.predict(alone.plan()).step_s, rel=1e-9)
    lines = list(result.lines("theirs"))
    assert lines[0].startswith("theirs: predicted")
    assert any("with the plan's cut alone" in line for line in lines)
    assert slow(layout_of(best, COSTS), best, COSTS).saved == {}


def test_a_divided_head_becomes_whole_at_its_predicted_cost(tmp_path: Path) -> None:
    """With the best cut between blocks, and as the planner predicts both."""
    shape = {"layers": 16, "hidden": 2048, "heads": 16, "sequence": 4096, "vocabulary": 128256}
    job = minimal_job(
        {"type": "gpt", "tie_embeddings": False, **shape}, parallel={"auto": True}, batch=32, dtype="bfloat16-true"
    )
    cluster = load_cluster(Path("cluster/devices/a100.yaml")).resized(8)
    costs = Costs(job, analytic_profile(job.model, cluster, job.train.dtype), {})
    keys = {"schedule": "1f1b", "stages": 8, "replicas": 1, "microbatch": 1}
    split = Plan.of(ParallelSpec(vocabulary="split", **keys), divided_cut(even_cut(16, 8), 8), 32)
    file = tmp_path / "layout"
    for trainer in TRAINERS:
        result = emit(trainer, split, costs, file)
        assert result.layout.layers == 18
        file.write_text(result.text)
        back = read(file, costs, 8)[1]
        assert back.plan() == result.layout.plan()
        whole = Plan.of(ParallelSpec(**keys), back.cut, 32)
        more = costs.predict(whole).step_s / costs.predict(split).step_s - 1
        assert f"{more:.1%} more than the plan" in result.lost[0]
        assert more > 0.1
        assert [line.split(":")[0] for line in result.lost[1:]] == ["vocabulary"]
        saved = slow(back, split, costs).saved["division of the head"]
        assert saved == pytest.approx(costs.predict(whole).step_s - costs.predict(split).step_s, rel=1e-9)


@pytest.mark.parametrize("trainer", ["torchtitan", "automodel", "deepspeed"])
def test_gradients_that_copies_divide_are_never_whole(trainer: str) -> None:
    """FSDP sums them as each block's backward ends, so what the plan's copies divide by chunks needs no whole set."""
    keys = {"replicas": 4, "shard": "zero2", "schedule": "interleaved-1f1b", "microbatch": 4}
    plan = Plan.of(ParallelSpec(chunks=4, **keys), even_cut(6, 4), 16)
    result = emit(trainer, plan, COSTS, None)
    assert [line.split(":")[0] for line in result.lost[1:]] == ["chunks"]
    held, whole = (
        max(device.total for device in COSTS.predict(one).memory)
        for one in (result.layout.plan(), Plan.of(ParallelSpec(**{**keys, "schedule": "1f1b"}), EIGHT, 16))
    )
    assert held < whole


def test_a_searched_order_goes_into_a_csv(tmp_path: Path) -> None:
    named = plan_of("zb-h1")
    plan = Plan.of(named.parallel.model_copy(update={"schedule": "auto"}), UNEVEN, 16, named.order())
    drafts = nearest(layout_of(plan, COSTS), TRAINERS["torchtitan"].able, COSTS.choices(layout_of(plan, COSTS)))
    assert [draft.layout.parallel.schedule for draft in drafts] == ["auto"]
    result = emit("torchtitan", plan, COSTS, tmp_path / "layout.txt")
    assert (tmp_path / "layout.csv").is_file()
    assert f"--parallelism.pipeline_parallel_schedule_csv {tmp_path / 'layout.csv'}" in result.text

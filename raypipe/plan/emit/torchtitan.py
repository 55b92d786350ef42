"""Layouts as arguments of torchtitan (0.3): ``torchrun ... -m torchtitan.train $(grep -v '^#' FILE)``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from raypipe.errors import RequestError
from raypipe.files import expanded, write_whole
from raypipe.job.parallel_spec import ParallelSpec, Shard
from raypipe.job.spec import JobSpec
from raypipe.plan.emit.layout import DecoderShape, Settings, TrainerLayout, even_cut, layer_by_layer
from raypipe.plan.emit.nearest import Abilities
from raypipe.plan.predict.prediction import Cut
from raypipe.schedule.forms.text import from_torch_csv, to_torch_csv

# Stages in the words of ``torch.distributed.pipelining``: modules by name, schedules by class or as a CSV.


NAMES = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved-1f1b": "Interleaved1F1B", "bfs": "LoopedBFS"}
"""Schedules whose order is PyTorch's of that name; others go into a CSV."""
LOOPS, V = "PipelineScheduleMulti", "ZBVZeroBubble"
"""Classes that say where the stages of an order in a CSV lie: round after round, or in a V."""


@dataclass(frozen=True)
class Names:
    """How a model names its modules."""

    embedding: str
    block: str
    """Before a block's number."""
    head: tuple[str, ...]
    everywhere: tuple[str, ...] = ()
    """What each stage has."""

    def of(self, cut: Cut) -> list[list[str]]:
        """Return the modules of each stage.

        >>> Names("embed", "layers.", ("norm", "head")).of((range(0, 2), range(2, 4)))
        [['embed', 'layers.0'], ['layers.1', 'norm', 'head']]
        """
        last = cut[-1].stop - 1

        def one(i: int) -> tuple[str, ...]:
            return (self.embedding,) if not i else self.head if i == last else (f"{self.block}{i - 1}",)

        return [[*(name for i in own for name in one(i)), *self.everywhere] for own in cut]

    def cut(self, parts: Sequence[Sequence[str]], settings: Settings, key: str) -> Cut:
        """Read the modules of each stage.

        Raises:
            SpecError: they are not the embedding, the blocks and the head in turn.
        """
        ends = [0]
        for own in parts:
            ends.append(
                ends[-1]
                + sum(name == self.embedding or name == self.head[-1] or name.startswith(self.block) for name in own)
            )
        cut = tuple(range(a, b) for a, b in pairwise(ends))
        if self.of(cut) != [list(own) for own in parts]:
            raise settings.fail(key, "lists other modules than the embedding, blocks and head in turn", "list these")
        return cut


def written(layout: TrainerLayout, file: Path | None) -> dict[str, str]:
    """Return the schedule's name, and ``csv``, where its order was written, if it has one of its own.

    Raises:
        RequestError: there is no file to write it beside.
    """
    if layout.order is None:
        return {"schedule": NAMES[layout.parallel.schedule]}
    if file is None:
        raise RequestError("--emit", "the plan's order goes into a file beside the trainer's", "give -o FILE")
    beside = file.with_suffix(".csv")
    write_whole(beside, to_torch_csv(layout.order).encode())
    return {"schedule": V if layout.parallel.placement == "v" else LOOPS, "csv": str(beside)}


def scheduled(layout: TrainerLayout, settings: Settings, schedule: str, csv: str) -> TrainerLayout:
    """The layout with the schedule that these keys of a file name.

    Raises:
        SpecError: raypipe has no schedule of that name.
    """
    stages = layout.parallel.stages
    chunks = settings.divided(schedule, len(layout.cut), stages)
    words: Mapping[str, str] = {word: name for name, word in NAMES.items()}
    keys: dict[str, Any] = {"chunks": chunks, "placement": "line"}
    file = settings.values.get(csv)
    if not file:
        return layout.with_keys(schedule=settings.choice(schedule, words, "1f1b"), **keys)
    order = replace(from_torch_csv(expanded(Path(str(file))).read_text(), str(file)), name="auto")
    v = settings.choice(schedule, {V: True, LOOPS: False}, False)
    keys |= {"schedule": "auto", "placement": "v" if v else "ring" if chunks > 1 else "line"}
    return replace(layout.with_keys(**keys), order=order)


ABLE = Abilities(
    title="torchtitan",
    schedules=tuple(NAMES),
    orders=True,
    shards={"none": "none", "zero1": "zero2", "zero2": "zero2", "zero3": "zero3"},
    pipelined_shards={"none": "none", "zero1": "zero2", "zero2": "zero2", "zero3": "zero3"},
    shard_groups=("zero2", "zero3"),
    experts="shards",
    context="shards",
    lazy=(),
    eager=("none", "zero2", "zero3"),
    eager_pipelines=True,
    sequence=True,
)
CONFIGS = {
    ("llama", 32, 4096, 14336, 128256): ("llama3", "llama3_8b"),
    ("llama", 80, 8192, 28672, 128256): ("llama3", "llama3_70b"),
    ("llama", 126, 16384, 53248, 128256): ("llama3", "llama3_405b"),
    ("qwen3", 28, 1024, 3072, 151936): ("qwen3", "qwen3_0_6b"),
    ("qwen3", 28, 2048, 6144, 151936): ("qwen3", "qwen3_1_7b"),
    ("qwen3", 40, 5120, 17408, 151936): ("qwen3", "qwen3_14b"),
    ("qwen3", 64, 5120, 25600, 151936): ("qwen3", "qwen3_32b"),
    ("qwen3_moe", 48, 2048, 768, 151936): ("qwen3", "qwen3_30b_a3b"),
    ("deepseek_v3", 61, 7168, 2048, 129280): ("deepseek_v3", "deepseek_v3_671b"),
    ("gpt_oss", 24, 2880, 2880, 201088): ("gpt_oss", "gpt_oss_20b"),
    ("gpt_oss", 36, 2880, 2880, 201088): ("gpt_oss", "gpt_oss_120b"),
}
"""Modules and configurations of torchtitan's registry, by a model's type at Hugging Face, blocks, width, width of MLPs
or experts, and vocabulary, by which Llama 2 70B differs from Llama 3 70B."""
MODULES = Names("tok_embeddings", "layers.", ("norm", "lm_head"))
RESHARD: dict[Shard, str] = {"zero2": "never", "zero3": "always"}
P, T = "parallelism.", "training."


def write(layout: TrainerLayout, job: JobSpec, file: Path | None = None) -> str:
    """Return the arguments, one a line; an order that has no name goes into a CSV beside ``file``."""
    return "".join(f"{line}\n" for line in _arguments(layout, job, file))


def _arguments(layout: TrainerLayout, job: JobSpec, file: Path | None) -> Iterator[str]:
    p, train, model = layout.parallel, job.train, DecoderShape.of(job)
    inner, vocabulary = model.expert_width or model.intermediate or 0, int(model.config.get("vocab_size", 0))
    named = CONFIGS.get((model.kind, model.blocks, model.hidden, inner, vocabulary))
    if named is None:
        yield "# no configuration of torchtitan's is known to be this model: add --module and --config of your own"
    else:
        yield f"--module {named[0]}"
        yield f"--config {named[1]}"
    yield f"# set in the configuration, no argument: optimizer {train.optimizer}, rate {train.lr:g}"
    samples = layout.batch // p.sample_copies if layout.pipelined else p.microbatch
    yield f"--{T}local_batch_size {samples}"
    yield f"--{T}global_batch_size {layout.batch}"
    yield f"--{T}seq_len {model.sequence}"
    yield f"--{T}steps {train.steps}"
    if train.clip is not None:
        yield f"--{T}max_norm {train.clip:g}"
    if train.dtype.startswith("float"):
        yield f"--{T}mixed_precision_param float32"
    group = 1 if p.shard == "none" else p.shard_replicas or p.replicas
    yield f"--{P}data_parallel_replicate_degree {p.replicas // group}"
    yield f"--{P}data_parallel_shard_degree {group // p.context}"
    if p.context > 1:
        yield f"--{P}context_parallel_degree {p.context}"
    if p.shard != "none":
        yield f"--{P}fsdp_reshard_after_forward {RESHARD[p.shard]}"
    yield f"--{P}tensor_parallel_degree {p.tensor}"
    if p.experts > 1:
        yield f"--{P}expert_parallel_degree {p.experts}"
    yield f"--{P}pipeline_parallel_degree {p.stages}"
    if layout.pipelined or p.experts > 1:  # graphs have no room for sizes that the host reads, as experts' rows are
        yield f"--{T}disable_cuda_graphs"
    if layout.pipelined:
        yield f"--{P}pipeline_parallel_microbatch_size {p.microbatch}"
        yield f"--{P}module_fqns_per_model_part " + " ".join(map(",".join, MODULES.of(layout.block_cut)))
        schedule = written(layout, file)
        yield f"--{P}pipeline_parallel_schedule {schedule['schedule']}"
        if "csv" in schedule:
            yield f"--{P}pipeline_parallel_schedule_csv {schedule['csv']}"
    if train.compile == "inductor":
        yield "--compile.enable"
    yield "activation-checkpoint:" + ("none" if p.recompute == "none" else "full")


def read(text: str, source: str, devices: int, blocks: int) -> TrainerLayout:
    """Read arguments.

    Args:
        text: the file.
        source: its name, for messages.
        devices: of the whole job, where the arguments leave the degree of sharding open.
        blocks: of the model.

    Raises:
        SpecError: an argument asks for what no plan has, or the numbers do not divide.
    """
    settings = Settings.of_arguments(text, source)
    context = settings.whole(f"{P}context_parallel_degree")
    tensor, stages = (settings.whole(f"{P}{key}_parallel_degree") for key in ("tensor", "pipeline"))
    replicate, shard_key = settings.whole(f"{P}data_parallel_replicate_degree"), f"{P}data_parallel_shard_degree"
    open_ = str(settings.values.get(shard_key, -1)) == "-1"
    each = tensor * stages * replicate * context
    # FSDP divides weights over the copies that divide sequences too.
    group = context * (settings.divided(shard_key, devices, each) if open_ else settings.whole(shard_key))
    replicas, local = replicate * group, settings.whole(f"{T}local_batch_size", 8)
    level = settings.choice(
        f"{P}fsdp_reshard_after_forward",
        {"never": "zero2", "always": "zero3", "default": "zero2" if stages > 1 else "zero3"},
        "zero2" if stages > 1 else "zero3",
    )
    parts = settings.values.get(f"{P}module_fqns_per_model_part")
    named = [str(part).split(",") for part in ([parts] if isinstance(parts, str) else parts or ())]
    key = f"{P}module_fqns_per_model_part"
    chunks = 1 if str(settings.values.get(f"{P}pipeline_parallel_schedule", "1F1B")) in ("1F1B", "GPipe") else 2
    layout = TrainerLayout(
        parallel=ParallelSpec(
            stages=stages,
            replicas=replicas,
            microbatch=settings.whole(f"{P}pipeline_parallel_microbatch_size") if stages > 1 else local,
            tensor=tensor,
            sequence_parallel=tensor > 1,
            experts=settings.experts(f"{P}expert_parallel_degree", group, tensor),
            context=context,
            innermost="replicas",
            shard="none" if group == 1 else level,  # type: ignore[arg-type]
            shard_replicas=None if replicate == 1 or group == 1 else group,
            sync="eager" if replicas > 1 else "lazy",
            update="wait",
            recompute=_recomputed(settings),  # type: ignore[arg-type]
        ),
        cut=MODULES.cut(named, settings, key) if named else even_cut(blocks, stages * chunks),
        batch=settings.whole(f"{T}global_batch_size", local * replicas // context),
    )
    if stages > 1:
        layout = scheduled(layout, settings, f"{P}pipeline_parallel_schedule", f"{P}pipeline_parallel_schedule_csv")
    return layer_by_layer(layout)


def _recomputed(settings: Settings) -> str:
    words = {key.partition(":")[2] for key in settings.values if key.startswith("activation-checkpoint:")}
    chosen = words.pop() if words else "selective"
    if chosen not in ("none", "full"):
        raise settings.fail(f"activation-checkpoint:{chosen}", "selects operations", "use none or full")
    return chosen

"""The ``train`` section of a job file.

Token budgets say how many tokens a step takes, how many a row of packed documents holds, and how many rows that makes.
The documents of a step follow from the seed, the step and ``train.tokens_per_step`` alone; rows, micro-batches and
copies divide them afterwards. So the number of rows has to be enough for any documents, before any is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from raypipe.job.field_types import Count, Positive, Share, Spec

PER_STAGE = 4
"""Rows of a step for each stage of a copy, where nobody says how many tokens one holds: a bubble of at most a fifth,
(stages - 1) / (rows + stages - 1)."""
PLANNED_ROWS = 32
"""Rows of a step where the planner chooses the stages: any power of two of copies and micro-batches up to it fits."""


class TokenBudget(NamedTuple):
    """How the documents of a step are taken and packed."""

    tokens: int
    """Most tokens of a step."""
    row_tokens: int
    """Most tokens of a row."""
    rows: int
    """Rows of a step."""
    copies: int
    """Data-parallel copies, among which the rows of a step are divided."""
    even: int
    """Length at which a document's attention takes as long as all else, in tokens."""


def rows_needed(tokens: int, row_tokens: int) -> int:
    """Return a number of rows into which first fit packs any documents of at most ``tokens`` together.

    No document is longer than a row. First fit leaves no two rows that would fit into one, so k rows hold more than
    ``k * row_tokens / 2`` tokens (Johnson 1973).

    >>> rows_needed(65536, 8192), rows_needed(100, 100), rows_needed(100, 60)
    (15, 1, 3)
    """
    return max(1, -(-2 * tokens // row_tokens) - 1)


def with_rows(job: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a job file's content with the rows and the tokens of a row that its token budget implies.

    What is no number, or missing, stays for the job's own checks.
    """
    train, parallel = job.get("train"), job.get("parallel")
    if not isinstance(train, Mapping) or not _count(train.get("tokens_per_step")):
        return job
    tokens: int = train["tokens_per_step"]
    parallel = parallel if isinstance(parallel, Mapping) else {"auto": parallel == "auto"}
    keys = ("stages", "replicas", "microbatch", "context", "experts")
    stages, copies, each, together, sharing = (parallel.get(key, 1) for key in keys)
    row: Any = train.get("microbatch_tokens", "auto")
    rows: Any = train.get("batch")
    if not all(map(_count, (stages, copies, each, together, sharing))) or not (row == "auto" or _count(row)):
        return job
    unit = max(1, max(copies, sharing) // together) * each
    if rows is None and row == "auto":
        rows = PLANNED_ROWS if parallel.get("auto") else PER_STAGE * stages
        rows = -(-rows // each) * unit if not parallel.get("auto") else -(-rows // unit) * unit
    elif rows is None:
        rows = -(-rows_needed(tokens, row) // unit) * unit
    if row == "auto" and _count(rows):
        row = -(-2 * tokens // (rows + 1))
        parts = 2 * together if together > 1 else 1  # into which copies divide rows
        row = min(tokens, -(-row // parts) * parts)
    return {**job, "train": {**train, "batch": rows, "microbatch_tokens": row}}


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


class OptimizerKind(NamedTuple):
    """The facts of an optimizer."""

    made_by: str
    """Its class, by module and name."""
    options: tuple[str, ...] = ()
    """Keys of ``train`` that it reads, beside rate and weight decay."""
    values: int = 0
    """Values of its state per parameter; ``momentum`` adds one."""
    fused: bool = True
    """Whether it has fused kernels on CPU and CUDA alike."""
    rest: int = 0
    """More values of state of each parameter that is none of the matrices which it updates by themselves."""
    divides: Literal["values", "matrices", "nothing"] = "values"
    """What of a parameter may be updated by itself: each value, so that devices may divide parameters; a whole matrix,
    so that copies may divide them among themselves; or only what all copies have."""


OptimizerName = Literal["adamw", "adam", "sgd", "adagrad", "rmsprop", "adafactor", "muon"]
OPTIMIZERS: dict[str, OptimizerKind] = {
    "adamw": OptimizerKind("torch.optim.AdamW", ("betas", "eps"), values=2),
    "adam": OptimizerKind("torch.optim.Adam", ("betas", "eps"), values=2),
    "sgd": OptimizerKind("torch.optim.SGD", ("momentum",)),
    "adagrad": OptimizerKind("torch.optim.Adagrad", ("eps",), values=1, fused=False),
    "rmsprop": OptimizerKind("torch.optim.RMSprop", ("alpha", "eps", "momentum"), values=1, fused=False),
    # A row and a column of each matrix are next to nothing.
    "adafactor": OptimizerKind("transformers.optimization.Adafactor", fused=False, divides="nothing"),
    # Momentum of matrices, and AdamW's two moments of the rest.
    "muon": OptimizerKind(
        "raypipe.runtime.update.optimizer.MuonAndAdamW",
        ("betas", "eps", "momentum", "muon_rate", "muon_excludes"),
        values=1,
        rest=1,
        fused=False,
        divides="matrices",
    ),
}
"""What planner, rules and workers know of each ``train.optimizer``."""
MUON_MOMENTUM = 0.95
EMBEDDINGS = ("*embed*", "*wte*", "*wpe*", "*shared.weight", "*token*.weight", "*position*.weight")
HEADS = ("*lm_head*", "head.*", "*.head.*", "*classifier*", "*score*", "*decoder.weight", "*project.weight")
NO_MUON = (*EMBEDDINGS, *HEADS, "*experts*bias*")
"""Names that embeddings and heads have in the libraries, and in the built-in GPT; and experts' biases, of which layers
have stacks."""


class EarlyStopSpec(Spec):
    """Stop the run when the validation loss, or ``best_metric``, no longer improves, or is good enough."""

    patience: Positive | None = None
    """The run stops after this many validations in a row without an improvement; null: it does not."""
    target: float | None = None
    """The run stops at the first validation with this loss or less (or this value of ``best_metric``); null: at none.
    ``raypipe autoconfigure --epochs`` ranks plans by the time to it."""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """A validation loss must be this much below the lowest one so far to count as an improvement; likewise a value of
    ``best_metric``."""

    @model_validator(mode="after")
    def _stops(self) -> EarlyStopSpec:
        if self.patience is None and self.target is None:
            raise ValueError("gives neither patience nor target, so nothing would stop the run; give one of them")
        return self


class ElasticSpec(Spec):
    """Go on with another plan when the cluster loses devices or gains some."""

    min_devices: Positive = 1
    """With fewer devices the run waits, as ``wait_for_devices_s`` says."""
    max_devices: Positive | None = None
    """Most devices to use, and to ask an autoscaler for; null: those that the cluster has."""
    wait_s: Annotated[float, Field(ge=0)] = 30.0
    """Seconds that lost devices have to come back before the run goes on without them."""

    @model_validator(mode="after")
    def _in_order(self) -> ElasticSpec:
        if self.max_devices is not None and self.max_devices < self.min_devices:
            raise ValueError(f"max_devices is {self.max_devices}, less than min_devices, {self.min_devices}")
        return self

    def within(self, devices: int) -> int:
        """Return the number of devices to use where the cluster has ``devices``."""
        most = devices if self.max_devices is None else min(devices, self.max_devices)
        return max(most, self.min_devices)


class ProfileSpec(Spec):
    """Run torch's profiler for some steps."""

    start_step: Positive = 10
    """The first step that is profiled, from 1; best not one of the first few, which also warm up."""
    steps: Annotated[int, Field(ge=1, le=100)] = 3
    """Number of steps."""


class GroupSpec(Spec):
    """Parameters with a learning rate or a weight decay of their own."""

    parameters: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    """Their names, which are those in a checkpoint; of a tied one that has several, all."""
    scale: Annotated[float, Field(ge=0)] = 1.0
    """Factor of each step's learning rate; 0: they stay as they are."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Weight decay; null: as ``train.weight_decay`` and ``train.decay`` say."""


class TrainSpec(Spec):
    """Optimizer, length, precision, validation and checkpoints."""

    steps: Positive
    """Optimizer steps of the run."""
    batch: Annotated[int, Field(ge=1, le=10_000_000)]
    """Mini-batch size: sequences per step, over all replicas. With ``tokens_per_step``: rows of packed documents, and
    may be left out."""
    tokens_per_step: Positive | None = None
    """Most tokens of a step. A step takes whole documents (rows of ``data.type: arrays``), in shuffled order, as many
    as fit; they are packed into ``batch`` rows that take equally long, and none sees another. Which documents a step
    takes depends on nothing but this, the seed and the step. null: a step takes ``batch`` samples."""
    microbatch_tokens: Positive | Literal["auto"] = "auto"
    """With ``tokens_per_step``: most tokens of a row, of which a micro-batch has ``parallel.microbatch`` (1). Rows that
    take equally long differ in tokens, so there are about twice as many as would be full. ``auto``: as ``batch`` says,
    or else four rows for each stage of a copy (where the planner chooses the stages, 32 in all)."""
    optimizer: OptimizerName = "adamw"
    """Optimizer, as PyTorch's; ``adafactor`` as transformers' with the rates that are given; ``muon`` PyTorch's for
    matrices, and AdamW for all else, embeddings and heads. ``adamw``, ``adafactor`` and ``muon`` decouple weight decay
    from the gradient; the others add it to the gradient. ``adagrad``, ``rmsprop``, ``adafactor`` and ``muon`` have no
    fused kernels on every device, so they allow no ``on_nonfinite: skip`` and no ``cuda_graphs: step`` or ``auto``.
    ``adafactor`` and ``muon`` read whole matrices: no ``tensor``, and ``adafactor`` no ``shard``; ``shard`` divides
    ``muon``'s matrices whole among the copies, about as much work to each."""
    lr: Annotated[float, Field(gt=0)] = 0.001
    """Peak learning rate."""
    betas: Annotated[tuple[Share, Share], Field(strict=False)] = (0.9, 0.999)
    """Adam's decay rates of the first and second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Term that avoids division by zero, of all but SGD."""
    momentum: Share = 0.0
    """Momentum of SGD, RMSprop and Muon; Muon's, if it is not given, is PyTorch's 0.95."""
    muon_rate: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """How Muon scales the rate by a matrix's shape (``adjust_lr_fn`` of torch.optim.Muon): ``match_rms_adamw``, so that
    AdamW's ``lr`` and ``weight_decay`` fit both, or ``original``, for which Muon's usual ``lr`` is 50 times AdamW's."""
    muon_excludes: Annotated[tuple[str, ...], Field(strict=False)] = NO_MUON
    """Patterns, as a shell's, of names of matrices that AdamW updates too. The usual ones are meant for embeddings and
    heads; the run says which matrices they match."""
    alpha: Share = 0.99
    """RMSprop's decay rate of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Weight decay."""
    decay: Literal["all", "matrices"] = "all"
    """Parameters that decay. ``all``, as in PyTorch's optimizers; ``matrices``: those of two dimensions or more, but no
    norms and biases, as in nanoGPT and Hugging Face's Trainer."""
    groups: Annotated[tuple[GroupSpec, ...], Field(strict=False)] = ()
    """Parameters with a learning rate or a weight decay of their own, as the parameter groups of PyTorch's optimizers;
    the others have ``lr`` and ``weight_decay``."""
    lr_schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Learning rate after the warm-up; ``cosine`` and ``linear`` fall from ``lr`` to ``min_lr`` at the last step."""
    warmup_steps: Count = 0
    """Steps over which the learning rate rises linearly to ``lr``."""
    warmup_from_zero: bool = False
    """Begin the warm-up with a rate of 0, as Hugging Face's schedules do; else the first step has one part of it."""
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """Learning rate at the last step with ``cosine`` and ``linear``."""
    lr_table: Annotated[tuple[Annotated[float, Field(ge=0)], ...], Field(strict=False)] | None = None
    """Learning rate of each step, one for each of ``steps``, instead of ``lr``, its schedule and warm-up; null: these.
    ``PipelineTrainer`` writes it down for schedulers that a job file has no name for."""
    label_smoothing: Share = 0.0
    """Share of each label's probability that is spread evenly over all classes; for losses that are cross-entropies of
    labels."""
    loss_chunk_tokens: Positive | None = None
    """Compute the logits of this many tokens of a micro-batch at a time, with their loss and gradients, so that the
    logits never exist whole: the memory of one chunk, for four products with the head instead of three. For models that
    end in a linear head and its cross-entropy. null: all logits of a micro-batch at once."""
    clip: Annotated[float, Field(gt=0)] | None = None
    """Gradients are clipped to this global norm (L2, over all stages); null for no clipping."""
    on_nonfinite: Literal["stop", "skip", "rewind"] = "stop"
    """What happens when the loss, a gradient or the global norm of a step is infinite or not a number. ``stop``: the
    run ends with an error. ``skip``: no device makes the update of that step. ``rewind``: the run goes back to its last
    checkpoint and on with the data after that step's. No checkpoint ever holds such a number."""
    seed: Count = 0
    """Seed of the initial weights, the order of the data and dropout."""
    dtype: Literal["float32", "float64", "bfloat16", "bfloat16-true", "fp8"] = "float32"
    """Precision of training. ``bfloat16`` is autocast over float32 weights. ``bfloat16-true`` has weights, activations
    and gradients in bfloat16; the optimizer updates float32 master weights, which are rounded to the weights. ``fp8``
    is for planning alone: as ``bfloat16-true``, with the products of linear layers in FP8."""
    tf32: bool = False
    """On GPUs: compute float32 products and convolutions in TF32, faster and with 10 bits of mantissa instead of 23."""
    deterministic: bool = False
    """Fail rather than run kernels whose result may differ between two runs."""
    compile: Literal["none", "inductor", "auto"] = "none"
    """Compile each stage's forward, input gradient and weight gradients with TorchInductor, beside the first steps,
    which run eagerly. ``inductor``: all devices swap the compiled programs in between two steps. ``auto``: they do, and
    each device then keeps what is faster. A stage that cannot be compiled runs eagerly, with a notice. Needs a C++
    compiler on every host."""
    compile_first: bool = False
    """Compile before the first step instead, so that the run's bits do not depend on when compilation ends.
    ``deterministic`` implies it, and so does an ``activation_memory_budget`` below 1, for which eager stages are too
    large."""
    compile_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """What the compilation of a device's stages may take; a stage that is not compiled by then stays eager."""
    cuda_graphs: Literal["none", "tasks", "step", "auto"] = "none"
    """On GPUs, replay kernels that were captured once instead of launching them one by one; on CPU devices it is an
    error. ``tasks``: a graph for each compiled stage's forward, input gradient and weight gradients, for every
    micro-batch in flight (needs ``compile``). ``step``: one graph for all of a step, on one device. ``auto``: ``step``
    on one device, ``tasks`` where several run compiled stages, on CPUs none. What cannot be captured runs as without,
    with a note. Written against recorded operations on a CPU and never run on a GPU; so the default is ``none``."""
    eval_every: Count = 0
    """Steps between validations; 0 to validate only at the end."""
    eval_batches: Annotated[int, Field(ge=1, le=100_000)] = 8
    """Mini-batches of held-out data per validation, which are queued at once. Where rows of arrays or lines do not fill
    the last one of a pass, others do whose labels the loss ignores, and it counts for its own rows."""
    early_stop: EarlyStopSpec | None = None
    """Stop before ``steps`` when validation no longer improves, or reaches a target; null to run all steps."""
    load_best_at_end: bool = False
    """Return the best checkpoint instead of the last one: the one with the lowest validation loss, or as
    ``best_metric`` says."""
    metrics: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")] | None = None
    """``package.module:function`` that computes figures of each validation from all its predictions, as
    ``compute_metrics`` of Hugging Face's Trainer: it gets ``predictions`` and ``label_ids``, NumPy arrays with a row
    per sample, and returns numbers by name, such as ``accuracy``. All predictions are in the driver's memory at once;
    a function ``preprocess_logits(logits, labels)`` in the same module makes less of them where they are."""
    best_metric: str = "loss"
    """The figure of a validation by which the best checkpoint is chosen and ``early_stop`` judges: ``loss``, or one
    that ``metrics``, or the loss function of ``model.loss``, returns."""
    best_is: Literal["lowest", "highest"] = "lowest"
    """Which value of ``best_metric`` is the best."""
    checkpoint_every: Count = 0
    """Steps between checkpoints; 0 to save only at the end."""
    keep_checkpoints: Positive | None = 2
    """Number of newest checkpoints to keep; null for all."""
    async_save: bool = True
    """Write checkpoints beside training, from a copy of parameters and optimizer state that each worker keeps in host
    memory; the run waits for the last one at its end. False: training waits until each checkpoint is written."""
    checkpoint_storage: str | None = None
    """URI to which every complete checkpoint is copied, such as ``s3://bucket/run``: any that pyarrow or fsspec opens.
    ``--resume`` in a run directory without checkpoints begins with the newest copy. Null for no copies."""
    max_failures: Count = 3
    """Restarts from the last checkpoint before the run fails."""
    recovery: Literal["in-place", "restart"] = "in-place"
    """What happens when a worker dies. ``in-place``: where each of its stages has a copy (``parallel.replicas``,
    Chimera's other direction), it alone is replaced, and its copies give it their state; at most one step is repeated.
    Where there is no copy, all go on from the one that ``copy_every`` has made, or else from the last checkpoint.
    ``restart``: all processes start again, from the last checkpoint."""
    copy_every: Count | Literal["auto"] = 0
    """Steps between copies of each worker's parameters and optimizer state into the memory of its node and of the next
    one, sent beside training. Where a worker dies whose stages have no other copy, all go on from the newest ones; they
    end with the process that started the run. ``auto``: as often as training loses at most 2 % of its time by what was
    measured, and as a copy arrives before the next. 0 for none."""
    standby: Annotated[int, Field(ge=0, le=1000)] = 0
    """Processes that wait, with torch imported, to replace a worker that dies, and so seconds sooner. Each takes a few
    hundred MB of memory and no device."""
    elastic: ElasticSpec | None = None
    """With ``parallel: auto``: go on with another plan, for other devices, when the cluster loses devices for good or
    gains some that would shorten the step. ``{}`` for the defaults; null: keep the plan."""
    wait_for_devices_s: Annotated[float, Field(ge=0)] | None = 3600.0
    """Seconds to wait for devices that other jobs use or that an autoscaler has to start; null for no limit."""
    message_timeout_s: float = 300.0
    """Seconds a device waits for another one, in set-up, for a message and in an all-reduce, before it fails with an
    error that names what it waited for; 1 s to one week."""

    profile: ProfileSpec | None = None
    """Run torch's profiler over a few steps: each worker writes a Chrome trace into ``profiles`` of the run directory,
    in which every task of the schedule has its name. ``{}`` for the defaults; null: no profile."""
    report_to: Annotated[tuple[Literal["tensorboard", "mlflow", "wandb"], ...], Field(strict=False)] = ()
    """What gets the run's figures beside metrics.jsonl: ``tensorboard`` (event files in the run directory), ``mlflow``
    (``MLFLOW_TRACKING_URI``, else the run directory), ``wandb`` (the run directory; offline unless ``WANDB_MODE`` says
    otherwise)."""

    @model_validator(mode="after")
    def _fused(self) -> TrainSpec:
        if not OPTIMIZERS[self.optimizer].fused:
            for key in (f"on_nonfinite: {self.on_nonfinite}", f"cuda_graphs: {self.cuda_graphs}"):
                if key in ("on_nonfinite: skip", "cuda_graphs: step", "cuda_graphs: auto"):
                    raise ValueError(f"combines {key} with {self.optimizer}, which has no fused kernels; use adamw")
        return self

    @model_validator(mode="after")
    def _usual_momentum(self) -> TrainSpec:
        if self.optimizer == "muon" and "momentum" not in self.model_fields_set:
            object.__setattr__(self, "momentum", MUON_MOMENTUM)
        return self

    @model_validator(mode="after")
    def _one_group_each(self) -> TrainSpec:
        named = [name for group in self.groups for name in group.parameters]
        if len(set(named)) < len(named):
            twice = next(name for name in named if named.count(name) > 1)
            raise ValueError(f"names {twice} twice in groups; name it once")
        return self

    @property
    def gathers_narrow(self) -> bool:
        """Return whether copies that divide weights gather those of products in bfloat16, as the arithmetic reads them.

        The graphs of compiled stages cast weights themselves.
        """
        return self.dtype == "bfloat16" and self.compile == "none"

    @property
    def captures_tasks(self) -> bool:
        """Return whether GPUs run the tasks of compiled stages as CUDA graphs, where the plan allows it."""
        return self.compile == "inductor" and self.cuda_graphs in ("tasks", "auto")

    @property
    def compiles_beside(self) -> bool:
        """Return whether stages may be compiled beside steps, by a process that takes memory of the device."""
        return self.compile != "none" and not (self.compile_first or self.deterministic)

    @property
    def updates_whole(self) -> bool:
        """Return whether the optimizer reads whole rows and columns of a parameter, so that nothing may divide it."""
        return OPTIMIZERS[self.optimizer].divides != "values"

    @property
    def updates_alone(self) -> bool:
        """Return whether each copy updates all parameters of its stages."""
        return OPTIMIZERS[self.optimizer].divides == "nothing"

    def iterates_on(self, name: str, dims: int) -> bool:
        """Return whether Muon updates a parameter of this name and number of dimensions, and so reads it whole.

        >>> train = TrainSpec(steps=1, batch=1, optimizer="muon")
        >>> [train.iterates_on(name, 2) for name in ("h.0.mlp.weight", "wte.weight")], train.iterates_on("ln.weight", 1)
        ([True, False], False)
        """
        excluded = (fnmatchcase(name, pattern) for pattern in self.muon_excludes)
        return self.optimizer == "muon" and dims == 2 and not any(excluded)

    @property
    def crossing_dtype(self) -> str:
        """Dtype of floating-point tensors between stages: that of the weights, which autocast does not change."""
        return {"bfloat16": "float32", "bfloat16-true": "bfloat16", "fp8": "bfloat16"}.get(self.dtype, self.dtype)

    @property
    def needs_norm(self) -> bool:
        """Return whether every device needs the global gradient norm of each step."""
        return self.clip is not None or self.on_nonfinite == "skip"

    @property
    def keeps_best(self) -> bool:
        """Return whether the best checkpoint is kept in addition to the newest."""
        return self.early_stop is not None or self.load_best_at_end

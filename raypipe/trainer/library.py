"""A row of the Trainer table: what becomes of one name of ``transformers.Trainer``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any

from raypipe.errors import SpecError

HONOURED, WITHOUT_EFFECT, REFUSED = "honoured", "without effect", "refused"
BY_THE_TRAINER = object()
"""In place of a default: not read here, but by code of the Trainer itself that a run uses."""


@dataclass(frozen=True, slots=True)
class LibraryRow:
    """The fate of one name."""

    name: str
    answer: str
    """``HONOURED``, ``WITHOUT_EFFECT`` or ``REFUSED``."""
    words: str
    """What it becomes; why it has no effect; or what to do instead."""
    default: Any = BY_THE_TRAINER
    """Of a field that is translated to a job: the Trainer's default."""
    old: bool = False
    """Whether newer releases of transformers do not have it."""
    only_if: Callable[[], bool] | None = None
    """Of a field that is refused in some places alone: whether this is one."""

    @property
    def refuses(self) -> bool:
        """Return whether a value of it is refused here."""
        return self.answer == REFUSED and (self.only_if is None or self.only_if())


def honoured(name: str, words: str, default: Any = BY_THE_TRAINER, old: bool = False) -> LibraryRow:
    """Return the row of a name that means here what it means there."""
    return LibraryRow(name, HONOURED, words, default, old)


def without_effect(name: str, words: str, old: bool = False) -> LibraryRow:
    """Return the row of a name that changes nothing here; ``words`` say why."""
    return LibraryRow(name, WITHOUT_EFFECT, words, old=old)


def refused(name: str, words: str, only_if: Callable[[], bool] | None = None) -> LibraryRow:
    """Return the row of a name that is an error; ``words`` say what to do instead."""
    return LibraryRow(name, REFUSED, words, only_if=only_if)


def each(make: Callable[..., LibraryRow], words: str, *names: str) -> list[LibraryRow]:
    """Return rows of several names of one fate: ``make`` is ``honoured``, ``without_effect`` or ``refused``."""
    return [make(name, words) for name in names]


def table(*rows: LibraryRow) -> dict[str, LibraryRow]:
    """Return the rows by name."""
    return {row.name: row for row in rows}


def refuse(rows: Sequence[LibraryRow], prefix: str = "", why: str = "not supported") -> None:
    """Raise one error that names all of ``rows``, if there are any.

    Raises:
        SpecError: there are.
    """
    if not rows:
        return
    where = ", ".join(f"{prefix}{row.name}" for row in rows)
    fixes = [row.words if len(rows) == 1 else f"{row.name}: {row.words}" for row in rows]
    raise SpecError(where, f"{'are' if len(rows) > 1 else 'is'} {why}", "; ".join(fixes))


def _gpus() -> bool:
    import torch

    return torch.cuda.device_count() > 0


DURATION_AND_BATCH = table(
    honoured("output_dir", "the run directory", ""),
    honoured("per_device_train_batch_size", "`train.batch`: times `gradient_accumulation_steps` and `dp`", 8),
    honoured("gradient_accumulation_steps", "`train.batch`", 1),
    honoured("num_train_epochs", "`train.steps`, and the rows of each", 3.0),
    honoured("max_steps", "`train.steps`", -1),
    refused("auto_find_batch_size", "give per_device_train_batch_size: the planner chooses micro-batches that fit"),
    without_effect("average_tokens_across_devices", "the loss is the mean over all targets of the mini-batch"),
)
OPTIMIZER = table(
    honoured("learning_rate", "`train.lr`", 5e-5),
    honoured(
        "lr_scheduler_type",
        "`train.lr_schedule`, or a rate of each step in `train.lr_table`; not "
        "reduce_lr_on_plateau and greedy, which wait for losses",
        "linear",
    ),
    honoured("lr_scheduler_kwargs", "`train.lr_table`", None),
    honoured("warmup_steps", "`train.warmup_steps`; below 1 a share of all steps", 0),
    honoured("warmup_ratio", "`train.warmup_steps`", 0.0, old=True),
    honoured(
        "optim",
        "`train.optimizer`: adamw_torch, adamw_torch_fused, sgd, adagrad, rmsprop, adafactor; others are refused",
        "adamw_torch",
    ),
    honoured(
        "optim_args", "momentum of sgd, eps of adagrad, alpha, eps and momentum of rmsprop; others are refused", None
    ),
    refused("optim_target_modules", "freeze the other parameters by requires_grad, or train adapters with peft"),
    honoured("weight_decay", "`train.weight_decay`, of the parameters that decay in the Trainer", 0.0),
    honoured("adam_beta1", "`train.betas`", 0.9),
    honoured("adam_beta2", "`train.betas`", 0.999),
    honoured("adam_epsilon", "`train.eps`", 1e-8),
    honoured("max_grad_norm", "`train.clip`", 1.0),
    honoured("label_smoothing_factor", "`train.label_smoothing`", 0.0),
    honoured("neftune_noise_alpha", "noise in the captured model, drawn by sample; rows of equal length", None),
)
COMPUTATION = table(
    honoured("bf16", "`train.dtype: bfloat16`", False),
    refused("fp16", "use bf16, which needs no loss scaling"),
    *each(refused, "leave it out: a validation is in the type of training", "bf16_full_eval", "fp16_full_eval"),
    honoured("tf32", "`train.tf32`", None),
    honoured("activation_checkpointing", "`parallel.recompute: full`", None),
    honoured("gradient_checkpointing", "`parallel.recompute: full`", None),
    without_effect("activation_checkpointing_kwargs", "they choose how to recompute, which changes no value"),
    without_effect("gradient_checkpointing_kwargs", "they choose how to recompute, which changes no value"),
    refused("torch_compile", 'use job={"train": {"compile": "auto"}}'),
    refused("torch_compile_backend", 'use job={"train": {"compile": "auto"}}'),
    refused("torch_compile_mode", 'use job={"train": {"compile": "auto"}}'),
    refused("use_liger_kernel", 'use job={"train": {"compile": "auto"}}'),
    refused("liger_kernel_config", 'use job={"train": {"compile": "auto"}}'),
    without_effect("use_cache", "a forward of training keeps no cache"),
    without_effect("torch_empty_cache_steps", "it returns memory that PyTorch holds, which changes no value"),
    honoured("full_determinism", "`train.deterministic`", False),
    honoured("seed", "`train.seed`", 42),
    refused("use_cpu", "unset it, or hide the GPUs by CUDA_VISIBLE_DEVICES=", only_if=_gpus),
    refused("debug", "leave it out: a loss that is not finite ends the step with an error that names it"),
    without_effect("skip_memory_metrics", "the memory of every device is in `raypipe report`"),
)
LOGGING = table(
    honoured("logging_strategy", "which steps `state.log_history` and `on_log` have", "steps"),
    honoured("logging_steps", "which steps `state.log_history` and `on_log` have", 500),
    honoured("logging_first_step", "whether the first step has an entry", False),
    honoured("report_to", "`train.report_to`: tensorboard, mlflow, wandb; others are one warning", "none"),
    refused("include_num_input_tokens_seen", "read tokens_per_s in metrics.jsonl"),
    without_effect("logging_nan_inf_filter", "a loss that is not finite is an error, so none is logged"),
    without_effect("log_on_each_node", "only the driver logs"),
    without_effect("log_level", "raypipe does not log by the library's logger"),
    without_effect("log_level_replica", "only the driver logs"),
    without_effect("disable_tqdm", "there is no tqdm bar"),
    without_effect("logging_dir", "TensorBoard's files are in `output_dir`", old=True),
    without_effect("run_name", "a run has the name of `output_dir`"),
    without_effect("project", "only trackio reads it, which `report_to` does not have here"),
    without_effect("trackio_space_id", "only trackio reads it, which `report_to` does not have here"),
    without_effect("trackio_bucket_id", "only trackio reads it, which `report_to` does not have here"),
    without_effect("trackio_static_space_id", "only trackio reads it, which `report_to` does not have here"),
)
EVALUATION = table(
    honoured("eval_strategy", "`train.eval_every`", "no"),
    honoured("eval_steps", "`train.eval_every`", None),
    refused("eval_delay", "leave it out, and read the validations after it"),
    refused("eval_on_start", "call evaluate() before train()"),
    honoured("per_device_eval_batch_size", "of `evaluate` and `predict`; validations take `train.batch` rows", 8),
    refused("prediction_loss_only", "leave compute_metrics out: a validation then computes the loss alone"),
    refused("eval_do_concat_batches", "leave it out: compute_metrics gets all predictions as one array"),
    refused("include_for_metrics", "leave it out: compute_metrics gets predictions and label_ids"),
    refused("batch_eval_metrics", "reduce logits by preprocess_logits_for_metrics"),
    without_effect("eval_use_gather_object", "predictions are gathered by raypipe"),
    without_effect("eval_accumulation_steps", "it says where predictions wait, which changes no value"),
    honoured("load_best_model_at_end", "`train.load_best_at_end`", False),
    honoured("metric_for_best_model", "`train.best_metric`", None),
    honoured("greater_is_better", "`train.best_is`", None),
    honoured(
        "predict_with_generate", "`evaluate` and `predict` generate; validations while training have the loss alone"
    ),
    honoured("generation_max_length", "of `evaluate` and `predict`"),
    honoured("generation_num_beams", "of `evaluate` and `predict`"),
    honoured("generation_config", "of `evaluate` and `predict`"),
)
SAVING = table(
    honoured("save_strategy", "`train.checkpoint_every`: no, steps, epoch; best is refused", "steps"),
    honoured("save_steps", "`train.checkpoint_every`", 500),
    honoured("save_total_limit", "`train.keep_checkpoints`; None keeps all", None),
    without_effect("save_only_model", "a checkpoint holds the optimizer too; `save_model` writes the weights alone"),
    without_effect("save_on_each_node", "checkpoints are on a file system that all nodes share"),
    without_effect("enable_jit_checkpoint", "SIGTERM always ends a run with a checkpoint"),
    without_effect("overwrite_output_dir", "`train` says itself whether a directory holds another run", old=True),
    without_effect("resume_from_checkpoint", "scripts read it and give it to `train`"),
    refused("ignore_data_skip", "leave it out: a resumed run goes on with the rows that come next, at no cost"),
    refused("restore_callback_states_from_checkpoint", "keep what a callback needs in a file of its own"),
    refused("push_to_hub", "upload the directory that save_model returns"),
    without_effect("hub_token", "only `push_to_hub` reads it"),
    without_effect("hub_private_repo", "only `push_to_hub` reads it"),
    without_effect("hub_model_id", "only `push_to_hub` reads it"),
    without_effect("hub_strategy", "only `push_to_hub` reads it"),
    without_effect("hub_always_push", "only `push_to_hub` reads it"),
    without_effect("hub_revision", "only `push_to_hub` reads it"),
)
ROWS = table(
    honoured("data_seed", "the rows of each step, by the Trainer's sampler", None),
    honoured("dataloader_drop_last", "whether an epoch's last, short mini-batch is dropped", False),
    honoured(
        "train_sampling_strategy",
        "the rows of each step: random, sequential, group_by_length; others refused",
        "random",
    ),
    honoured("group_by_length", "the rows of each step, by the Trainer's sampler", False, old=True),
    honoured("length_column_name", "the Trainer's sampler reads it for group_by_length"),
    honoured("accelerator_config", "the Trainer's loader reads it for the rows of each step"),
    honoured("remove_unused_columns", "the columns that are written for the workers", True),
    refused("label_names", "name the column of labels `labels`, `label` or `label_ids`"),
    without_effect("sortish_sampler", "the Trainer does not read it either"),
    without_effect("dataloader_num_workers", "rows are written before training, and each device reads its own"),
    without_effect("dataloader_pin_memory", "each device reads its own rows"),
    without_effect("dataloader_persistent_workers", "no process loads rows beside the devices"),
    without_effect("dataloader_prefetch_factor", "no process loads rows beside the devices"),
    without_effect("dataloader_multiprocessing_context", "no process loads rows beside the devices"),
    without_effect("dataloader_in_order", "rows always come in order"),
)
DEVICES = table(
    *each(refused, 'shard by job={"parallel": {...}}: docs/guides/sharding.md', "fsdp", "fsdp_config", "deepspeed"),
    refused("parallelism_config", "use raypipe.init(dp=, tp=, pp=)"),
    without_effect("ddp_find_unused_parameters", "raypipe reduces gradients itself"),
    without_effect("ddp_bucket_cap_mb", "raypipe reduces gradients itself"),
    without_effect("ddp_broadcast_buffers", "raypipe reduces gradients itself"),
    without_effect("ddp_static_graph", "raypipe reduces gradients itself"),
    without_effect("ddp_backend", "raypipe chooses it: NCCL on GPUs, else Gloo"),
    without_effect("ddp_timeout", "Ray notices a worker that ends"),
    without_effect("local_rank", "Ray starts the processes"),
)
SCRIPTS = table(
    *each(without_effect, "only scripts read it", "do_train", "do_eval", "do_predict"),
)
SECTIONS = {
    "Duration and mini-batch": DURATION_AND_BATCH,
    "Optimizer and loss": OPTIMIZER,
    "Computation": COMPUTATION,
    "Logging": LOGGING,
    "Evaluation": EVALUATION,
    "Saving": SAVING,
    "Rows": ROWS,
    "Devices": DEVICES,
    "Scripts": SCRIPTS,
}
ARGUMENTS: dict[str, LibraryRow] = {name: row for rows in SECTIONS.values() for name, row in rows.items()}


def defaults() -> dict[str, Any]:
    """Return the Trainer's defaults of the fields that are translated to a job; a dict may contain no others."""
    rows = ARGUMENTS.values()
    return {row.name: row.default for row in rows if row.answer == HONOURED and row.default is not BY_THE_TRAINER}


def check_fields(args: Any) -> None:
    """Check a ``TrainingArguments``.

    Raises:
        SpecError: a field is set that is refused, or that has no row.
    """
    given = [f.name for f in fields(args) if f.init and _is_set(args, f)]
    refuse([ARGUMENTS[name] for name in sorted(given) if name in ARGUMENTS and ARGUMENTS[name].refuses], "args.")
    unknown = sorted(set(given) - ARGUMENTS.keys())
    words = "leave at the default: it came with another release of transformers"
    refuse([refused(name, words) for name in unknown], "args.", "not known to raypipe")


def _is_set(args: Any, field: Field[Any]) -> bool:
    """Return whether a field differs from its default; None, "none" and "no" are equal, but False and True not.

    So is a dict of nothing: older releases of transformers leave one in ``fsdp_config`` where no FSDP is asked for.
    """
    default = field.default if field.default_factory is MISSING else field.default_factory()
    value = getattr(args, field.name)
    given, usual = (None if _is_nothing(v) else text(v) for v in (value, default))
    return given != usual


def _is_nothing(value: Any) -> bool:
    return not value or value in ("none", "no", ["none"]) or (isinstance(value, dict) and not any(value.values()))


def text(value: Any) -> str:
    """Convert a member of transformers' enumerations to its text."""
    return str(getattr(value, "value", value))


CONSTRUCTOR: dict[str, LibraryRow] = table(
    honoured("model", "an instance trains as it is; also a type, a directory, or a job's `model` section"),
    honoured("args", "see the fields below; also a dict"),
    honoured("data_collator", "called once per row, before training"),
    honoured("train_dataset", "with a length; not an `IterableDataset`"),
    honoured("eval_dataset", "one; a dict of several is refused"),
    honoured("processing_class", "the default collator pads with it, and `save_model` writes it"),
    honoured("model_init", "called once, for the model"),
    honoured("compute_loss_func", "captured together with the model"),
    honoured("compute_metrics", "in each validation"),
    honoured("callbacks", "of `transformers.TrainerCallback`, `raypipe.Callback` and `ray.train.UserCallback`"),
    honoured("preprocess_logits_for_metrics", "on the devices"),
    honoured(
        "optimizers",
        "read off once: of torch's AdamW, Adam, SGD, Adagrad or RMSprop, groups that differ in lr and weight_decay",
    ),
    honoured("optimizer_cls_and_kwargs", "as `optimizers`"),
)


_SCRIPT = "only scripts call it"
_OWN_LOSS = "compute the loss by compute_loss, which is captured with the model"
_FIGURES = "compute figures by compute_metrics, and reduce logits by preprocess_logits_for_metrics"
_OPTIMIZER = "asked once: its class (`train.optimizer`), and groups that differ in lr and weight_decay (`train.groups`)"
_COLLATE = "give a data_collator, which is called once per row"
_MESH = "use raypipe.init(dp=, tp=, pp=)"
_SAVED = "follow checkpoints by a callback's on_save, and name your method otherwise"
METHODS: dict[str, LibraryRow] = table(
    honoured("compute_loss", "captured together with the model"),
    honoured("get_train_dataloader", "its sampler gives the rows of the whole run, its collator each row"),
    honoured("_get_train_sampler", "gives the rows of the whole run"),
    *each(honoured, _OPTIMIZER, "create_optimizer", "get_optimizer_cls_and_kwargs"),
    honoured("get_decay_parameter_names", "weight decay by parameter (`train.groups`)"),
    honoured("create_scheduler", "asked once for the rates of the whole run"),
    *each(honoured, _SCRIPT, "train", "predict", "log_metrics", "save_metrics", "metrics_format", "save_state"),
    honoured("hyperparameter_search", _SCRIPT + "; without one of your own it is refused"),
    honoured("create_model_card", _SCRIPT),
    honoured("push_to_hub", _SCRIPT + "; without one of your own it is refused"),
    honoured("init_hf_repo", _SCRIPT),
    *each(honoured, "before `train`", "add_callback", "pop_callback", "remove_callback"),
    *each(honoured, _SCRIPT, "get_learning_rates", "get_num_trainable_parameters", "get_optimizer_group"),
    *each(without_effect, "the cost model counts them", "floating_point_ops", "store_flos"),
    *each(without_effect, "the script's process is the only one", "is_local_process_zero", "is_world_process_zero"),
    refused("training_step", _OWN_LOSS),
    refused("compute_loss_context_manager", 'use args.bf16, or job={"train": {"dtype": ...}}'),
    refused("autocast_smart_context_manager", 'use args.bf16, or job={"train": {"dtype": ...}}'),
    refused("create_optimizer_and_scheduler", "define create_optimizer and create_scheduler, which are called here"),
    refused("get_batch_samples", "order the rows by _get_train_sampler or get_train_dataloader"),
    refused("set_initial_training_values", "set args.max_steps or args.num_train_epochs"),
    refused("get_total_train_batch_size", "set args.per_device_train_batch_size and gradient_accumulation_steps"),
    refused("num_examples", "give datasets that have a length"),
    refused("evaluate", "name your method otherwise and call it after train; " + _FIGURES),
    *each(refused, _FIGURES, "evaluation_loop", "prediction_step"),
    refused("get_eval_dataloader", "give eval_dataset in the order that you want; " + _COLLATE),
    refused("get_test_dataloader", "give predict the rows in the order that you want; " + _COLLATE),
    refused("load_generation_config", "give args.generation_config"),
    refused("log", "read logs by a callback's on_log"),
    refused("save_model", _SAVED),
    refused("call_model_init", "give model_init"),
    *each(refused, _MESH, "create_accelerator_and_postprocess", "get_cp_size", "get_sp_size", "get_tp_size"),
    refused("end", "run your code after train"),
    # Hooks that scripts are known to define, although their names begin with an underscore.
    refused("_get_eval_sampler", "give eval_dataset in the order that you want"),
    *each(refused, _COLLATE, "_prepare_inputs", "_prepare_input"),
    refused("_remove_unused_columns", "choose columns in the dataset, or set args.remove_unused_columns"),
    refused("_inner_training_loop", _OWN_LOSS),
    refused("_maybe_log_save_evaluate", "set a callback's control flags"),
    *each(refused, _SAVED, "_save_checkpoint", "_save"),
    refused("_load_from_checkpoint", "give the model with the weights that training starts from"),
    refused("_load_best_model", "set args.load_best_model_at_end"),
    refused("_wrap_model", "change the model before it is given"),
)


def check_overrides(kind: type, plain: type) -> None:
    """Check what a subclass defines.

    Args:
        kind: the class of a trainer.
        plain: ``PipelineTrainer``.

    Raises:
        SpecError: it defines a method of the Trainer that would not be called here.
    """
    if kind is plain:
        return
    own = {name for each in kind.__mro__ for name in vars(each) if not name.startswith("__")}
    defined = sorted(name for name in own if getattr(kind, name) is not getattr(plain, name, None))
    refuse([METHODS[name] for name in defined if name in METHODS and METHODS[name].refuses], f"{kind.__name__}.")
    others = [name for name in defined if name not in METHODS and name in _library_has()]
    words = "the Trainer's own loop uses it, which does not run here; use another name if it is your own"
    refuse([refused(name, words) for name in others], f"{kind.__name__}.")


def _library_has() -> set[str]:
    """Return all names of the installed Trainers."""
    try:
        from transformers import Seq2SeqTrainer
    except ImportError:
        return set()
    return set(dir(Seq2SeqTrainer))

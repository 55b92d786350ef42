"""The methods of ``transformers.Trainer`` and ``Seq2SeqTrainer`` that a subclass of PipelineTrainer may define.

The Trainer's own loop calls its methods, and here devices run a schedule instead. So what a subclass defines is
captured, asked once before the run, or called by the script alone; anything else is refused when the trainer is made.
"""

from __future__ import annotations

from raypipe.trainer.library.row import LibraryRow, honoured, refuse, refused, table, without_effect

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
    honoured("create_optimizer", _OPTIMIZER),
    honoured("get_optimizer_cls_and_kwargs", _OPTIMIZER),
    honoured("get_decay_parameter_names", "weight decay by parameter (`train.groups`)"),
    honoured("create_scheduler", "asked once for the rates of the whole run"),
    honoured("train", _SCRIPT),
    honoured("predict", _SCRIPT),
    honoured("log_metrics", _SCRIPT),
    honoured("save_metrics", _SCRIPT),
    honoured("metrics_format", _SCRIPT),
    honoured("save_state", _SCRIPT),
    honoured("hyperparameter_search", _SCRIPT + "; without one of your own it is refused"),
    honoured("create_model_card", _SCRIPT),
    honoured("push_to_hub", _SCRIPT + "; without one of your own it is refused"),
    honoured("init_hf_repo", _SCRIPT),
    honoured("add_callback", "before `train`"),
    honoured("pop_callback", "before `train`"),
    honoured("remove_callback", "before `train`"),
    honoured("get_learning_rates", _SCRIPT),
    honoured("get_num_trainable_parameters", _SCRIPT),
    honoured("get_optimizer_group", _SCRIPT),
    without_effect("floating_point_ops", "the cost model counts them"),
    without_effect("store_flos", "the cost model counts them"),
    without_effect("is_local_process_zero", "the script's process is the only one"),
    without_effect("is_world_process_zero", "the script's process is the only one"),
    refused("training_step", _OWN_LOSS),
    refused("compute_loss_context_manager", 'use args.bf16, or job={"train": {"dtype": ...}}'),
    refused("autocast_smart_context_manager", 'use args.bf16, or job={"train": {"dtype": ...}}'),
    refused("create_optimizer_and_scheduler", "define create_optimizer and create_scheduler, which are called here"),
    refused("get_batch_samples", "order the rows by _get_train_sampler or get_train_dataloader"),
    refused("set_initial_training_values", "set args.max_steps or args.num_train_epochs"),
    refused("get_total_train_batch_size", "set args.per_device_train_batch_size and gradient_accumulation_steps"),
    refused("num_examples", "give datasets that have a length"),
    refused("evaluate", "name your method otherwise and call it after train; " + _FIGURES),
    refused("evaluation_loop", _FIGURES),
    refused("prediction_step", _FIGURES),
    refused("get_eval_dataloader", "give eval_dataset in the order that you want; " + _COLLATE),
    refused("get_test_dataloader", "give predict the rows in the order that you want; " + _COLLATE),
    refused("load_generation_config", "give args.generation_config"),
    refused("log", "read logs by a callback's on_log"),
    refused("save_model", _SAVED),
    refused("call_model_init", "give model_init"),
    refused("create_accelerator_and_postprocess", _MESH),
    refused("get_cp_size", _MESH),
    refused("get_sp_size", _MESH),
    refused("get_tp_size", _MESH),
    refused("end", "run your code after train"),
    # Hooks that scripts are known to define, although their names begin with an underscore.
    refused("_get_eval_sampler", "give eval_dataset in the order that you want"),
    refused("_prepare_inputs", _COLLATE),
    refused("_prepare_input", _COLLATE),
    refused("_remove_unused_columns", "choose columns in the dataset, or set args.remove_unused_columns"),
    refused("_inner_training_loop", _OWN_LOSS),
    refused("_maybe_log_save_evaluate", "set a callback's control flags"),
    refused("_save_checkpoint", _SAVED),
    refused("_save", _SAVED),
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

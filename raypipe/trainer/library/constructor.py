"""The arguments of ``transformers.Trainer.__init__``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raypipe.trainer.library.row import Row, honoured, refuse, refused, table

CONSTRUCTOR: dict[str, Row] = table(
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
    refused("optimizers", "choose one by args.optim, its rate by args.lr_scheduler_type or your create_scheduler"),
    refused("optimizer_cls_and_kwargs", "choose one by args.optim"),
)


def check_constructor(given: Mapping[str, Any], own: list[str]) -> None:
    """Check arguments that a PipelineTrainer has not; their defaults in the Trainer are accepted.

    Raises:
        TypeError: the Trainer has not got one either; ``own`` are those of a PipelineTrainer.
        SpecError: one is refused.
    """
    for name in given:
        if name not in CONSTRUCTOR:
            raise TypeError(f"PipelineTrainer has no argument {name}; it has {', '.join(own)}")
    refuse([CONSTRUCTOR[name] for name, value in given.items() if value is not None and value != (None, None)])

"""The arguments of ``transformers.Trainer.__init__``."""

from __future__ import annotations

from raypipe.trainer.library.row import LibraryRow, honoured, table

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

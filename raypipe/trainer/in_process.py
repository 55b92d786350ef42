"""``evaluate`` and ``predict``: the trained model, whole, in this process, by the Hugging Face Trainer itself.

With ``predict_with_generate`` it is the Seq2SeqTrainer, whose predictions are the tokens that the model generates.

Validations while a run goes on are made by its devices. What comes after is one pass of a model that has been trained
over rows that this process has, so the Trainer does it, and the figures are its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from raypipe.data.rows import Collator
from raypipe.errors import SpecError, install
from raypipe.trainer.datasets import Apart, PadRows


def trainer_of(
    module: nn.Module,
    args: Any,
    output: str,
    collator: Collator | None,
    processing_class: Any,
    compute_metrics: Callable[[Any], dict[str, Any]] | None,
    preprocess: Callable[..., Any] | None,
) -> Any:
    """Return a ``transformers.Trainer`` of a model that evaluates and predicts.

    Args:
        module: the trained model.
        args: ``transformers.TrainingArguments``, or a dict of their names.
        output: the run directory.
        collator: the data collator; None to choose as the Trainer does, or to pad as training here does.
        processing_class: the tokenizer; None if none was given.
        compute_metrics, preprocess: as the Trainer's.

    Raises:
        SpecError: the Trainer cannot be used.
    """
    try:
        from transformers import PreTrainedModel, Seq2SeqTrainer, Trainer
    except ImportError:
        raise SpecError("PipelineTrainer", "needs transformers to evaluate and predict", install("hf")) from None
    if collator is None and processing_class is None:
        config = getattr(module, "config", None)
        padding = getattr(config, "pad_token_id", None) if config is not None else None
        collator = PadRows(padding if isinstance(padding, int) and padding >= 0 else 0)
    own = training_arguments(args, output)
    own.eval_strategy, own.load_best_model_at_end = "no", False  # else the Trainer asks for what only training needs
    made = (Seq2SeqTrainer if generates(args) else Trainer)(
        model=module,
        args=own,
        data_collator=collator,
        processing_class=processing_class,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=preprocess,
    )
    if isinstance(module, PreTrainedModel):
        made.data_collator = Apart(made.data_collator)
    made.args._n_gpu = min(1, made.args.n_gpu)  # else it would put DataParallel around the model
    return made


def generates(args: Any) -> bool:
    """Return whether predictions are what the model generates (``Seq2SeqTrainingArguments``)."""
    return bool(getattr(args, "predict_with_generate", False))


def training_arguments(args: Any, output: str) -> Any:
    """Return ``TrainingArguments`` for this process alone: nothing is reported to loggers."""
    import torch
    from transformers import TrainingArguments

    if args is not None and not isinstance(args, Mapping):
        made = copy.copy(args)
        made.report_to = []
        return made
    known = {name: value for name, value in (args or {}).items() if name in TrainingArguments.__dataclass_fields__}
    try:
        return TrainingArguments(
            **{**known, "output_dir": output, "report_to": "none", "use_cpu": not torch.cuda.is_available()}
        )
    except ImportError as error:  # it needs accelerate
        raise SpecError("PipelineTrainer", str(error).strip().splitlines()[0], install("hf")) from None

"""``evaluate`` and ``predict``: the trained model, whole, in this process, by the Hugging Face Trainer itself.

With ``predict_with_generate`` it is the Seq2SeqTrainer, whose predictions are the tokens that the model generates.

Validations while a run goes on are made by its devices. What comes after is one pass of a model that has been trained
over rows that this process has, so the Trainer does it, and the figures are its own.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils.data import DataLoader

from raypipe.capture.meta import same_randomness
from raypipe.compat.transformers_private import check_sampler
from raypipe.data.ragged import Collator
from raypipe.errors import SpecError, install, nearest
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


# The rows of each step, as the Hugging Face Trainer takes them: its own samplers say the order.
#
# A run visits rows in the order of ``args.seed`` (or ``data_seed``, ``train_sampling_strategy``, a sampler of a
# subclass), in mini-batches that begin anew with every epoch, so that the last of an epoch is short unless
# ``dataloader_drop_last`` drops it. The order of a whole run is written down once, ``data.order`` of the job, so that
# every device reads the rows of any step without drawing anything.


SAMPLING = ("per_device_train_batch_size", "seed", "data_seed", "dataloader_drop_last", "train_sampling_strategy")
"""The arguments that say which rows a step reads."""
STRATEGIES = ("random", "sequential", "group_by_length")
NONE = -1
"""In place of a row, where an epoch's last mini-batch has none left."""


@dataclass(frozen=True)
class Epochs:
    """How many steps an epoch has, and which rows they read.

    Args:
        loader: a subclass's own, or the Trainer's.
        accumulation: mini-batches of the loader in a step.
        batch: rows of a step that is not short.
        seed: ``args.seed``.
    """

    loader: DataLoader[Any]
    accumulation: int
    batch: int
    seed: int

    @property
    def steps(self) -> int:
        """Steps of an epoch.

        Raises:
            SpecError: there are none.
        """
        result = math.ceil(len(self.loader) / self.accumulation)
        if result == 0:
            raise SpecError(
                "train_dataset",
                "has fewer rows than a mini-batch, and dataloader_drop_last drops them",
                "give more rows, or a smaller per_device_train_batch_size",
            )
        return result

    def order(self, steps: int) -> npt.NDArray[np.int64]:
        """Return the row numbers of the first ``steps`` steps, ``[steps, batch]``, filled up with ``NONE``."""
        result = np.full((steps, self.batch), NONE, dtype=np.int64)
        step = 0
        with same_randomness(self.seed):  # what draws from the process's generators begins as the Trainer's seed says
            for batches in self._epochs():
                for first in range(0, len(batches), self.accumulation):
                    if step == steps:
                        return result
                    rows = [row for one in batches[first : first + self.accumulation] for row in one]
                    if len(rows) > self.batch:
                        why = f"gives {len(rows)} rows to a step of {self.batch}"
                        raise SpecError("get_train_dataloader", why, "use args.per_device_train_batch_size")
                    result[step, : len(rows)] = rows
                    step += 1
        return result

    def _epochs(self) -> Iterator[list[list[int]]]:
        epoch = 0
        while True:
            holders: tuple[Any, ...] = (
                self.loader,
                self.loader.batch_sampler,
                getattr(self.loader.batch_sampler, "sampler", None),
            )
            for holder in holders:
                if hasattr(holder, "set_epoch"):
                    holder.set_epoch(epoch)
            torch.empty((), dtype=torch.int64).random_()  # the loader's base seed: its iterator draws it first
            assert self.loader.batch_sampler is not None, "checked when it was given"
            yield [list(map(int, one)) for one in self.loader.batch_sampler]
            epoch += 1


def trainers_loader(
    rows: Any, args: Any, given: Mapping[str, Any], output: str, sampler: Callable[[Any], Any] | None = None
) -> DataLoader[Any]:
    """Return the DataLoader of ``transformers.Trainer`` with these arguments, over the numbers of rows.

    Args:
        rows: the training dataset; only sampling by length reads it.
        args: ``transformers.TrainingArguments``, or a dict of their names.
        given: values of the arguments, from ``read_arguments``.
        output: the run directory.
        sampler: returns the sampler of a dataset instead of the Trainer's own.

    Raises:
        SpecError: transformers or accelerate is not installed, or there is no such strategy.
    """
    try:
        from transformers import Trainer
    except ImportError:
        raise SpecError("PipelineTrainer", "needs transformers for the order of the rows", install("hf")) from None
    check_sampler(Trainer)

    class RowOrder(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            if sampler is not None:
                return sampler(rows)
            return super()._get_train_sampler(rows)

    strategy = str(getattr(given["train_sampling_strategy"], "value", given["train_sampling_strategy"]))
    if strategy not in STRATEGIES:  # the Trainer itself takes the rows at random then
        raise SpecError("args.train_sampling_strategy", f"{strategy} is not available", nearest(strategy, STRATEGIES))
    if isinstance(args, Mapping) or not hasattr(args, "dataloader_drop_last"):
        chosen = {name: given[name] for name in SAMPLING if given[name] is not None}
        if given["group_by_length"]:
            chosen["train_sampling_strategy"] = "group_by_length"
        args = training_arguments(chosen, output)
    own = copy.copy(args)
    own.eval_strategy = own.save_strategy = "no"  # else the Trainer asks for what only training needs
    own.report_to, own.load_best_model_at_end, own.remove_unused_columns = [], False, False
    own.label_smoothing_factor = 0.0  # else it asks for the model that the labels are of
    own.dataloader_num_workers, own.dataloader_pin_memory, own.dataloader_prefetch_factor = 0, False, None
    own.dataloader_persistent_workers, own.dataloader_multiprocessing_context = False, None  # need workers
    own._n_gpu = min(1, own.n_gpu)
    with same_randomness(int(given["seed"])):
        made = RowOrder(model=nn.Linear(1, 1), args=own, train_dataset=range(len(rows)), data_collator=list)
        made.train_dataset = _Numbers(len(rows))
        loader: DataLoader[Any] = made.get_train_dataloader()
    return loader


def given_loader(loader: Any) -> DataLoader[Any]:
    """Check the DataLoader of a subclass's ``get_train_dataloader``.

    Raises:
        SpecError: it is none, or its rows have no numbers.
    """
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None or not hasattr(loader.dataset, "__len__"):
        why = f"returns {type(loader).__name__}, whose mini-batches are no numbers of a dataset's rows"
        raise SpecError("get_train_dataloader", why, "return a torch DataLoader of a dataset with a length, in batches")
    return loader


class _Numbers(Sequence[int]):
    """A dataset whose rows are their numbers."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Any) -> Any:
        return index

"""Training data: the driver finds, checks and prepares it once; each worker reads the rows it needs.

A device sees raw inputs by name, for any sample of any step.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raypipe.data.arrays import META as ARRAYS
from raypipe.data.arrays import Arrays, declared_fields, known_fields, mask_of, mean_tokens, prepare_arrays
from raypipe.data.documents import META as DOCUMENTS
from raypipe.data.packed import Packed, mean_tokens_of_step
from raypipe.data.ragged import Column, Ragged, columns_of, fill_of, flat
from raypipe.data.sample_order import SPLITS, Split, read_order, sample_keys, write_order
from raypipe.data.text import END, LINE, Corpus, prepare, prepare_lines
from raypipe.data.text import LINES_META as LINES
from raypipe.data.text import META as CORPUS
from raypipe.errors import SpecError
from raypipe.graph.placeholders import Placeholder
from raypipe.job import JobSpec
from raypipe.job.train_spec import TokenBudget, rows_needed
from raypipe.models.layered import LayeredModel
from raypipe.models.task import MASK, Task

__all__ = [
    "Arrays",
    "Corpus",
    "Dataset",
    "Ragged",
    "check_placeholders",
    "columns_of",
    "counts_tokens",
    "declared_fields",
    "extend_order",
    "flat",
    "has_short_steps",
    "is_prepared",
    "known_fields",
    "open_data",
    "prepare",
    "prepare_arrays",
    "prepare_data",
    "reads_bytes",
    "token_budget",
    "tokens_per_sample",
    "validation_places",
    "validation_weights",
    "write_order",
]

SOME_STEPS = 32
"""Steps of packed documents whose tokens are counted to know the mean."""


class Dataset(Protocol):
    """Prepared data in a run directory; every process opens it itself."""

    def batch(self, split: Split, seed: int, step: int, batch: int) -> dict[str, Tensor]:
        """Return the whole mini-batch of a step, one row per sample; samples of varying length are padded.

        It depends only on these arguments. Held-out samples do not depend on the seed either, so that validation losses
        can be compared.
        """

    def lengths(self, split: Split, seed: int, step: int, batch: int) -> Mapping[str, npt.NDArray[np.int64]]:
        """Return, per raw input of varying length, the padded length of each of the ``batch`` samples alone.

        A micro-batch is padded to the largest of its samples' lengths. Empty if all samples are equally long.
        """
        return {}

    def samples(self, split: Split) -> int:
        """Return the number of samples of an epoch."""


class Text(Dataset):
    """Text as the raw inputs of a task."""

    def __init__(self, corpus: Corpus, task: Task) -> None:
        self.corpus, self.task = corpus, task

    def batch(self, split: Split, seed: int, step: int, batch: int) -> dict[str, Tensor]:
        """Return windows of the text as the task's raw inputs."""
        rows = self.corpus.rows(split, seed, step, 0, batch, batch)
        return self.task.from_text(rows, sample_keys(split, seed, step, batch))

    def samples(self, split: Split) -> int:
        """Return the number of windows."""
        return self.corpus.windows(split)


class Table:
    """The user's arrays, completed by the task; lengths are rounded up to ``multiple``."""

    def __init__(self, arrays: Arrays, task: Task, multiple: int = 1, fields: Collection[str] | None = None) -> None:
        self.arrays, self.task, self.multiple = arrays, task, multiple
        self.skipped = frozenset() if fields is None else arrays.measures() - {*fields, "labels"}
        """Floating-point columns that this device does not need (images, say) and so does not read."""

    def batch(self, split: Split, seed: int, step: int, batch: int) -> dict[str, Tensor]:
        """Return rows of the arrays."""
        rows = self.arrays.batch(split, seed, step, batch, self.multiple, self.task.padding, self.skipped)
        return _once(self.task.complete(rows), self.task, self.arrays.repeats(split, step, batch))

    def lengths(self, split: Split, seed: int, step: int, batch: int) -> dict[str, npt.NDArray[np.int64]]:
        """Return the lengths of the rows, and of the raw inputs that the task derives from them."""
        return self.task.complete_lengths(self.arrays.lengths(split, seed, step, batch, self.multiple))

    def samples(self, split: Split) -> int:
        """Return the number of rows."""
        return self.arrays.rows(split)


class Lines(Table):
    """Lines of text as the raw inputs of a task; each line is a sample of its own length."""

    def __init__(self, arrays: Arrays, task: Task, multiple: int = 1) -> None:
        super().__init__(arrays, task, multiple)
        self.names = (*task.text_fields(1), MASK)

    def batch(self, split: Split, seed: int, step: int, batch: int) -> dict[str, Tensor]:
        """Return the bytes of the lines, each followed by ``END`` and padded, as the task's raw inputs and a mask."""
        column = self.arrays.columns[split][LINE]
        assert isinstance(column, Ragged)
        at = self.arrays.places(split, seed, step, batch)
        length = int(self.arrays.lengths(split, seed, step, batch, self.multiple)[LINE].max())
        rows = torch.from_numpy(column.padded(at, length + 1, END[0]).astype(np.int64))
        made = self.task.from_text(rows, sample_keys(split, seed, step, batch))
        mask = mask_of(column, at, length)
        made = {n: t.masked_fill(mask == 0, fill_of(n, self.task.padding)) for n, t in made.items()} | {MASK: mask}
        return _once(made, self.task, self.arrays.repeats(split, step, batch))

    def lengths(self, split: Split, seed: int, step: int, batch: int) -> dict[str, npt.NDArray[np.int64]]:
        """Return the number of bytes of each line, rounded up."""
        own = self.arrays.lengths(split, seed, step, batch, self.multiple)[LINE]
        return dict.fromkeys(self.names, own)


def _once(made: dict[str, Tensor], task: Task, repeated: Tensor | None) -> dict[str, Tensor]:
    """Have the loss ignore the samples that are ``repeated``, where it ignores any."""
    if repeated is not None and task.ignored is not None:
        for name in task.reads & made.keys():
            labels = made[name].clone()
            labels[repeated] = task.ignored
            made[name] = labels
    return made


def token_budget(job: JobSpec, copies: int, model: LayeredModel) -> TokenBudget | None:
    """Return how the documents of a job are taken and packed on so many copies; None where its samples are rows."""
    train = job.train
    if train.tokens_per_step is None:
        return None
    tokens, row = train.tokens_per_step, train.microbatch_tokens
    assert row != "auto", "a number is filled in with the job"
    rows = max(train.batch, rows_needed(tokens, row))  # a profile runs some rows of a step, which all have to be made
    return TokenBudget(tokens, row, rows, copies, model.even_length())


def open_data(
    directory: Path,
    task: Task,
    multiple: int = 1,
    fields: Collection[str] | None = None,
    whole: bool = True,
    budget: TokenBudget | None = None,
) -> Dataset:
    """Open the data that was prepared in a directory.

    Args:
        directory: the folder of the prepared data.
        task: the task that reads it.
        multiple: ``data.pad_to_multiple_of``.
        fields: the raw inputs that are needed; others may be returned too. None for all.
        whole: whether all of it may be read; else some samples do, where reading all would take long.
        budget: how rows are packed (``train.tokens_per_step``); None where the data's rows are samples.

    Raises:
        SpecError: there is no prepared data, or its rows cannot be packed.
    """
    if budget is not None:
        return Packed(Arrays.open(directory), task, multiple, budget)
    if (directory / ARRAYS).exists():
        return Table(Arrays.open(directory), task, multiple, fields)
    if (directory / LINES).exists():
        return Lines(Arrays.open(directory, LINES), task, multiple)
    if (directory / DOCUMENTS).exists():
        from raypipe.data.documents.prepared import Documents  # it loads pyarrow

        return Documents(directory, task, whole)
    return Text(Corpus.open(directory), task)


def prepare_data(job: JobSpec, task: Task, directory: Path) -> None:
    """Prepare a job's data in ``directory``, where every device reads it.

    Raises:
        SpecError: there is no data, or too little, or it cannot be used.
    """
    if job.data.type == "arrays":
        longest = job.train.microbatch_tokens if job.train.tokens_per_step is not None else None
        assert longest != "auto", "a number is filled in with the job"
        made = prepare_arrays(job.data, directory, task.per_token, longest)
        _check_order(job, task, made)
        _check_numbers(task, made)
        return
    assert job.model.sequence is not None, "checked with the job"
    if job.data.type == "lines":
        prepare_lines(job.data, job.model.sequence, directory)
    elif job.data.type == "documents":
        from raypipe.data.documents.prepared import prepare_documents

        prepare_documents(job, task.window(job.model.sequence), directory)
    else:
        prepare(job.data, task.window(job.model.sequence), directory)


def _check_order(job: JobSpec, task: Task, arrays: Arrays) -> None:
    """Raise an error if the order of the rows does not fit the job."""
    if arrays.order is None:
        return
    steps, batch = arrays.order.shape
    if job.train.steps > steps or batch != job.train.batch:
        why = f"is of {steps} steps of {batch} rows, and the job has {job.train.steps} of {job.train.batch}"
        raise SpecError("data.order", why, "give one for the job's steps and mini-batches")
    if task.ignored is None and bool((arrays.order < 0).any()):
        why = "a mini-batch is short, and of this model's loss no row can be left out"
        fix = "use mini-batches that divide the rows, or dataloader_drop_last (an order without short ones)"
        raise SpecError("data.order", why, fix)


def _check_numbers(task: Task, arrays: Arrays) -> None:
    """Raise an error if a label is not a number where the loss would take it for one that is left out."""
    if task.ignored is None or not math.isnan(task.ignored):
        return
    for split, columns in arrays.columns.items():
        labels = columns.get("labels")
        if not isinstance(labels, np.ndarray) or labels.dtype.kind != "f":
            continue
        wrong = np.flatnonzero(np.isnan(labels).reshape(len(labels), -1).any(-1))
        if len(wrong):
            where = "data.path" if split == "train" else "data.held_out"
            raise SpecError(where, f"labels of row {wrong[0]} are not a number (nan)", "leave out rows without labels")


def has_short_steps(directory: Path) -> bool:
    """Return whether the order of prepared rows leaves places of a mini-batch unfilled."""
    order = Arrays.open(directory).order if (directory / ARRAYS).exists() else None
    return order is not None and bool((order < 0).any())


def extend_order(job: JobSpec, task: Task, directory: Path) -> None:
    """Take the job's order of rows for a run that goes on with the rows in ``directory``, as it may be of more steps.

    Raises:
        SpecError: it does not fit the job.
    """
    if job.data.order is not None and (directory / ARRAYS).exists():
        arrays = Arrays.open(directory)
        if arrays.order is not None:
            write_order(read_order(job.data.order, arrays.rows("train")), directory)
            _check_order(job, task, Arrays.open(directory))


def tokens_per_sample(job: JobSpec, directory: Path) -> float:
    """Return the tokens per sample of prepared data, without padding, by which throughput is counted."""
    if job.train.tokens_per_step is not None:
        steps = min(job.train.steps, SOME_STEPS)
        tokens = mean_tokens_of_step(Arrays.open(directory), job.train.seed, job.train.tokens_per_step, steps)
        return tokens / job.train.batch
    result = mean_tokens(directory, LINE, LINES) if job.data.type == "lines" else mean_tokens(directory)
    return job.tokens_per_sample if result is None else result


def validation_places(job: JobSpec, directory: Path, samples: int) -> list[int] | None:
    """Return the row of each of a validation's first ``samples`` samples; None where samples are no rows of a file."""
    if job.data.type not in ("arrays", "lines"):
        return None
    return Arrays.open(directory, ARRAYS if job.data.type == "arrays" else LINES).places("val", 0, 0, samples)


def validation_weights(job: JobSpec, directory: Path) -> list[int]:
    """Return of each mini-batch of a validation how many samples no earlier one had; all, if there are none."""
    batches, batch = job.train.eval_batches, job.train.batch
    if job.data.type not in ("arrays", "lines") or job.train.tokens_per_step is not None:
        return [batch] * batches
    rows = Arrays.open(directory, ARRAYS if job.data.type == "arrays" else LINES).rows("val")
    return [left if 0 < (left := rows - number * batch) < batch else batch for number in range(batches)]


def counts_tokens(job: JobSpec, directory: Path) -> bool:
    """Return whether ``tokens_per_sample`` counts tokens; a sample of fixed-size arrays counts as one instead."""
    return job.data.type != "arrays" or job.train.tokens_per_step is not None or mean_tokens(directory) is not None


def reads_bytes(job: JobSpec, directory: Path) -> bool:
    """Return whether the tokens of prepared data are bytes of text.

    Raises:
        SpecError: the file that describes them is damaged.
    """
    if job.data.type != "documents":
        return job.data.type != "arrays"
    from raypipe.data.documents.prepared import PreparedDocuments

    train = PreparedDocuments.open(directory, check=False).splits["train"]
    return train.tokenizer is None and not train.is_tokens


def is_prepared(directory: Path) -> bool:
    """Return whether ``prepare_data`` has finished in a directory."""
    return any((directory / meta).exists() for meta in (ARRAYS, LINES, DOCUMENTS, CORPUS))


def check_placeholders(directory: Path, wanted: Sequence[Placeholder]) -> None:
    """Check the arrays that were prepared in a folder.

    Raises:
        SpecError: a row has fewer or more of a token than the model puts features in its places.
    """
    if not wanted or not (directory / ARRAYS).exists():
        return
    arrays = Arrays.open(directory)
    for name, token, each in wanted:
        for split in SPLITS:
            column = arrays.columns[split].get(name)
            if column is None:
                continue
            counts = _counts(column, token)
            wrong = np.flatnonzero(counts != each)
            if len(wrong):
                row = int(wrong[0])
                why = f"row {row} of the {split} rows has {counts[row]} times token {token} in {name}"
                why += f", and its image has {each} features to put there"
                raise SpecError("data", why, f"give each row {each} of them, as the model's processor does")


def _counts(column: Column, token: int) -> npt.NDArray[np.int64]:
    """Return how often each row has a token."""
    if not isinstance(column, Ragged):
        return np.asarray(np.count_nonzero(column == token, axis=tuple(range(1, column.ndim))), np.int64)
    hits = np.concatenate([[0], np.cumsum(column.values == token, dtype=np.int64)])
    result: npt.NDArray[np.int64] = hits[column.offsets[1:]] - hits[column.offsets[:-1]]
    return result

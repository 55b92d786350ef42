"""Datasets as the Hugging Face Trainer reads them: which columns, by which collator, padded how."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from raypipe.data.ragged import Collator, Rows, fill_of, is_packed
from raypipe.errors import SpecError
from raypipe.files import whole
from raypipe.models.task import MASK, POSITIONS

if TYPE_CHECKING:
    from raypipe.data.ragged import Collator

LABEL_NAMES = ("label", "label_ids")
"""Other names of the labels, which transformers' collators rename."""
LABELS = frozenset({"labels", *LABEL_NAMES})


@dataclass(frozen=True, slots=True)
class Columns:
    """A dataset with some of its columns, and ``labels`` by that name."""

    rows: Rows
    names: frozenset[str] | None
    """None for all."""
    renames: bool
    """Whether to rename the labels; a collator of transformers does so itself."""

    def check(self, where: str) -> None:
        """Check that there is something for the model to read in the first row.

        Raises:
            SpecError: no column is an argument of the model; ``where`` names the dataset.
        """
        row: Any = self.rows[0] if len(self.rows) else None
        if self.names is None or not isinstance(row, Mapping) or (self.names - LABELS) & row.keys():
            return
        reads = ", ".join(sorted(self.names - LABELS))
        why = f"none of its columns {', '.join(map(str, row))} is an argument of the model"
        raise SpecError(where, why, f"the model reads {reads}; args.remove_unused_columns=False keeps all columns")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        row: Any = self.rows[index]
        if not isinstance(row, Mapping):  # its error names the row
            return row  # type: ignore[no-any-return]
        kept = {str(k): v for k, v in row.items() if self.names is None or k in self.names}
        old = next((name for name in LABEL_NAMES if name in kept), None)
        if self.renames and old is not None and "labels" not in kept:
            kept["labels"] = kept.pop(old)
        return kept


def accepted(forward: Any) -> frozenset[str]:
    """Return the columns that a model reads: the arguments of its forward, and the labels by any name."""
    return LABELS.union(inspect.signature(forward).parameters)


def collator_of(given: Collator | None, processing_class: Any) -> Collator | None:
    """Return the collator as transformers chooses it: the given one, else one that pads as the tokenizer says."""
    if given is not None or processing_class is None or not hasattr(processing_class, "pad"):
        return given
    from transformers import DataCollatorWithPadding

    padding: Collator = DataCollatorWithPadding(processing_class)
    return padding


@dataclass(frozen=True, slots=True)
class PadRows:
    """A collator for rows of numbers that pads as training does: tokens with ``padding``, labels with -100."""

    padding: int

    def __call__(self, rows: list[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return a batch; labels by another name are renamed."""
        made = {}
        for given in rows[0]:
            name = "labels" if given in LABEL_NAMES else given
            values = [torch.as_tensor(np.asarray(row[given])) for row in rows]
            longest = max((len(v) for v in values if v.dim()), default=0)
            fill = fill_of(name, self.padding)
            ends = (v.new_full((longest - len(v), *v.shape[1:]), fill) if v.dim() else None for v in values)
            made[name] = torch.stack([v if e is None else torch.cat([v, e]) for v, e in zip(values, ends, strict=True)])
        if "input_ids" in made and "attention_mask" not in made and made["input_ids"].dim() == 2:
            lengths = torch.tensor([len(row["input_ids"]) for row in rows])
            made["attention_mask"] = (torch.arange(made["input_ids"].shape[1]) < lengths.unsqueeze(1)).long()
        return made


@dataclass(frozen=True, slots=True)
class Apart:
    """A collator for models of transformers, which see a block mask of packed documents where there is no other."""

    collator: Collator

    def __call__(self, rows: list[Any]) -> dict[str, Any]:
        """Return a batch, without its mask if positions restart."""
        made = dict(self.collator(rows))
        if is_packed({name: np.asarray(made[name]) for name in (POSITIONS, MASK) if name in made}):
            made.pop(MASK, None)
        return made


def write_rows(chosen: Columns, name: str, directory: Path, collator: Collator | None, seed: int, resume: bool) -> Path:
    """Write the rows of the dataset ``name``, and return the file.

    With ``resume`` the rows that are there stay: the order of the samples follows from them.

    Raises:
        SpecError: the rows are not what they should be.
    """
    path = directory / "datasets" / f"{name}.npz"
    if resume and path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    from raypipe.data import columns_of, flat

    chosen.check(f"{name}_dataset")
    columns = columns_of(chosen, f"{name}_dataset", collator, seed)
    with whole(path) as partial, partial.open("wb") as out:
        np.savez(out, **flat(columns))  # type: ignore[arg-type]
    return path


def differ_in_length(path: Path) -> bool:
    """Return whether rows of a file that ``write_rows`` wrote have unequal numbers of tokens."""
    from raypipe.data.ragged import OFFSETS, TOKENS

    with np.load(path) as held:
        return TOKENS + OFFSETS in held.files

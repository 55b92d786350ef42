"""The safetensors files of a directory: their tensors' shapes, and single tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raypipe.errors import SpecError
from raypipe.files import read_json

DTYPES = (
    {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16}
    | {"BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16}
    | {"I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool, "C64": torch.complex64}
)
"""Dtypes as safetensors writes them; those that quantised models alone use are not read."""


class TensorFiles:
    """The tensors of one file, or of several with an index.

    Args:
        directory: where the files are.
        one: name of a single file; ``one`` with ``.index.json`` is that of an index.
        where: the job's key that gives the directory.

    Raises:
        SpecError: there are no such files, or they cannot be read.
    """

    def __init__(self, directory: Path, one: str, where: str = "model.hf") -> None:
        self.directory, self.where = directory, where
        self.index = f"{one}.index.json"
        self.files = self._listed(one)
        """The file that holds each tensor."""

    def _listed(self, one: str) -> dict[str, str]:
        from safetensors import SafetensorError, safe_open

        try:
            if (self.directory / self.index).is_file():
                listed = dict(read_json(self.directory / self.index)["weight_map"])
                if not all(isinstance(file, str) and Path(file).name == file for file in listed.values()):
                    raise ValueError(f"{self.index} names a file outside the folder")
                return listed
            with safe_open(self.directory / one, framework="pt") as content:
                return dict.fromkeys(content.keys(), one)
        except FileNotFoundError:
            fix = "save the model with transformers' save_pretrained"
            raise SpecError(self.where, f"{self.directory} holds no {one}", fix) from None
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            why = f"{self.directory}'s weights can't be read: {error}"
            raise SpecError(self.where, why, "save the model again") from None

    def without_memory(self) -> dict[str, Tensor]:
        """Return all tensors on the meta device.

        Raises:
            SpecError: a file cannot be read, or lacks a tensor that the index lists.
        """
        from safetensors import SafetensorError, safe_open

        found: dict[str, Tensor] = {}
        for file in dict.fromkeys(self.files.values()):
            try:
                with safe_open(self.directory / file, framework="pt") as content:
                    for key in set(content.keys()):
                        if self.files.get(key) == file:
                            part = content.get_slice(key)
                            found[key] = torch.empty(part.get_shape(), dtype=DTYPES[part.get_dtype()], device="meta")
            except KeyError as error:
                why = f"{self.directory / file} holds values of type {error.args[0]}, as quantised models do"
                raise SpecError(self.where, why, "save the model in floating-point numbers") from None
            except (OSError, SafetensorError) as error:
                raise self._unreadable(file, error) from None
        if lost := [key for key in self.files if key not in found]:
            why = f"{self.directory / self.files[lost[0]]} lacks {', '.join(lost)}, which {self.index} lists"
            raise SpecError(self.where, why, "save the model again")
        return found

    @contextmanager
    def reader(self) -> Iterator[Callable[[str], Tensor]]:
        """Give a function that reads a tensor by name; each file is opened once, and closed at the end.

        Raises:
            SpecError: a file cannot be read.
        """
        from safetensors import SafetensorError, safe_open

        opened: dict[str, Any] = {}

        def read(key: str) -> Tensor:
            file = self.files[key]
            try:
                if file not in opened:
                    opened[file] = safe_open(self.directory / file, framework="pt")
                value: Tensor = opened[file].get_tensor(key)
            except (OSError, SafetensorError) as error:
                raise self._unreadable(file, error) from None
            return value

        try:
            yield read
        finally:
            opened.clear()

    def _unreadable(self, file: str, error: Exception) -> SpecError:
        return SpecError(self.where, f"{self.directory / file} can't be read: {error}", "save it again")

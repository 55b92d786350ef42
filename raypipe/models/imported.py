"""A model that a function of the user's builds."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from raypipe.errors import SpecError, nearest
from raypipe.job import ImportSpec
from raypipe.models.source import Identity
from raypipe.models.start_values import Constructed, StartValues
from raypipe.models.task import Field, Labels, NextToken, Task, Values
from raypipe.partition.empty import build_without_memory
from raypipe.partition.fingerprint import module_code, structure


class Imported:
    """``model: {import: "package.module:build", args: {...}}``.

    Raises:
        SpecError: no such module or function, or it returns no module.
    """

    outputs: Sequence[str] | None = None

    def __init__(self, spec: ImportSpec) -> None:
        self.spec = spec
        self.function: Callable[[], Any] = partial(_find(spec.function), **spec.args)

    def build(self) -> nn.Module:
        """Call the function."""
        made = self.function()
        if not isinstance(made, nn.Module):
            why = f"{self.spec.function} returned {type(made).__name__}"
            raise SpecError("model.import", why, "return a torch.nn.Module")
        return made

    def identity(self, build: Callable[[], nn.Module]) -> Identity:
        """The function's code and what it imports, and the structure of what it builds."""
        module = self.spec.function.partition(":")[0]
        says = structure(build_without_memory(build))
        return Identity(says, module_code(module), ("torch", module.partition(".")[0]))

    def task(self, arrays: Mapping[str, Field] | None, mask: float) -> Task:
        """As the job says; else by the labels: numbers with a point are values, whole ones are classes."""
        labels = (arrays or {}).get("labels")
        name = self.spec.task
        if name is None:
            name = "causal-lm" if arrays is None or labels is None else (
                "regression" if labels.dtype.is_floating_point else "classification"
            )  # fmt: skip
        if name == "causal-lm":
            return NextToken(arrays if arrays is not None else ("shift_labels",))
        if name == "regression":
            return Values()
        if name == "classification" or arrays is not None:
            return Labels()
        why = f"{name} on bytes needs to know special tokens, which only a Hugging Face configuration says"
        raise SpecError("model.task", why, "use data: {type: arrays, ...}, or task: causal-lm")

    def values(self, build: Callable[[], nn.Module]) -> StartValues:
        """What the function gives."""
        return Constructed(build)


def _find(name: str) -> Callable[..., Any]:
    module_name, _, function = name.partition(":")
    # As `python` itself does, and the installed command does not.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        fix = "start raypipe where the package is, set PYTHONPATH, or install it"
        raise SpecError("model.import", f"{module_name} can't be imported: {error}", fix) from None
    found = getattr(module, function, None)
    if not callable(found):
        callables = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise SpecError("model.import", f"{module_name} has no function {function}", nearest(function, callables))
    return found  # type: ignore[no-any-return]

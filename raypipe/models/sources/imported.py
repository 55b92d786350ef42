"""Models built by a function of the user's."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn

from raypipe.capture.meta import build_without_memory
from raypipe.errors import RaypipeError, SpecError, nearest
from raypipe.files import short
from raypipe.graph.fingerprint import Identity, module_code, structure
from raypipe.job import ImportSpec
from raypipe.models.losses import LossFunction
from raypipe.models.start_values import Constructed, StartValues
from raypipe.models.task import Field, Labels, NextToken, Pixels, Task, Values

STDLIB = Path(sysconfig.get_paths()["stdlib"])
MEND = "correct it; to see more, call it in Python by itself"


class Imported:
    """A model given as ``model: {import: "package.module:build", args: {...}}``.

    Raises:
        SpecError: the module or function does not exist, cannot build a model, or does not take these ``args``.
    """

    outputs: Sequence[str] | None = None
    own_loss = False
    loss: LossFunction | None = None
    constants: Mapping[str, object] = MappingProxyType({})

    def __init__(self, spec: ImportSpec) -> None:
        self.spec = spec
        result = find_function(spec.function)
        kind = _no_builder(result)
        if kind is not None:
            fix = "give a function of your own that returns a torch.nn.Module"
            raise SpecError("model.import", f"{spec.function} is {kind}", fix)
        _check_arguments(result, spec)
        self.function: Callable[[], Any] = partial(result, **spec.args)

    def build(self) -> nn.Module:
        """Call the function.

        Raises:
            SpecError: it fails, ends the process (``sys.exit``), or does not return a module.
        """
        try:
            made = self.function()
        except RaypipeError:
            raise
        except (Exception, SystemExit) as error:
            raise SpecError("model.import", f"{self.spec.function} failed: {_summary(error)}", MEND) from error
        if not isinstance(made, nn.Module):
            why = f"{self.spec.function} returned {type(made).__name__}"
            raise SpecError("model.import", why, "return a torch.nn.Module")
        return made

    def identity(self, build: Callable[[], nn.Module]) -> Identity:
        """Return the function's code with what it imports, and the structure of the module it builds."""
        module = self.spec.function.partition(":")[0]
        says = structure(build_without_memory(build))
        return Identity(says, module_code(module), ("torch", module.partition(".")[0]))

    def task(self, arrays: Mapping[str, Field] | None, mask: float) -> Task:
        """Return the job's task, or choose one by the labels: floats are values, integers are classes."""
        labels = (arrays or {}).get("labels")
        name = self.spec.task
        if name is None:
            if arrays is None or labels is None:
                name = "causal-lm"
            else:
                name = "regression" if labels.dtype.is_floating_point else "classification"
        if name == "causal-lm":
            return NextToken(arrays if arrays is not None else ("shift_labels",))
        if name == "regression":
            return Values()
        if name in ("ctc", "contrastive"):
            why = f"{name} is a task of transformers' models, and this one is a function's"
            raise SpecError("model.task", why, "return the loss from the forward, and set model.loss: model")
        if name == "segmentation":
            return Pixels(255)
        if name == "classification" or arrays is not None:
            return Labels()
        why = f"{name} on text needs special tokens, which only a Hugging Face configuration defines"
        raise SpecError("model.task", why, "use data: {type: arrays, ...}, or task: causal-lm")

    def values(self, build: Callable[[], nn.Module]) -> StartValues:
        """Return the start values that the function draws."""
        return Constructed(build)


def find_function(name: str, where: str = "model.import") -> Callable[..., Any]:
    """Import a function of the user's, given as ``package.module:function``.

    Raises:
        SpecError: the module cannot be imported or has no such function; ``where`` is the key that names it.
    """
    module_name, _, function = name.partition(":")
    # Python adds the current directory for `python -m`, but not for the installed `raypipe` command.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        if not isinstance(error, ImportError):
            raise SpecError(where, f"{module_name} can't be imported: {_summary(error)}", MEND) from error
        fix = "start raypipe in the package's folder, set PYTHONPATH, or install it"
        raise SpecError(where, f"{module_name} can't be imported: {error}", fix) from None
    result = getattr(module, function, None)
    if not callable(result):
        callables = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise SpecError(where, f"{module_name} has no function {function}", nearest(function, callables))
    return result  # type: ignore[no-any-return]


def _no_builder(found: Any) -> str | None:
    """Say what a callable is if it cannot build a model, else None. Calling it to find out could end the process."""
    if isinstance(found, nn.Module):
        return "already a module, not a function that builds one"
    if inspect.isbuiltin(found):
        return "a built-in function of Python, which builds no model"
    if inspect.isclass(found) and not issubclass(found, nn.Module):
        return "a class, but not a torch.nn.Module"
    # inspect.getsourcefile is not used, because it touches every loaded module and so triggers lazy imports.
    if inspect.isfunction(found) and _in_standard_library(found.__module__, Path(found.__code__.co_filename)):
        return "of Python's standard library, which builds no model"
    return None


def _in_standard_library(module: str, file: Path) -> bool:
    """Check name and folder: a user's file may have such a name, and installed packages are below that folder too."""
    return module.partition(".")[0] in sys.stdlib_module_names and file.is_relative_to(STDLIB)


def _check_arguments(found: Callable[..., Any], spec: ImportSpec) -> None:
    """Check ``args`` against the function's signature.

    Raises:
        SpecError: the function does not take one of them, or requires another.
    """
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):  # the function has no signature
        return
    try:
        signature.bind(**spec.args)
    except TypeError as error:
        fix = f"it is called as {spec.function.partition(':')[2]}{signature}"
        raise SpecError("model.args", f"{spec.function}: {error}", fix) from None


def _summary(error: BaseException) -> str:
    """Summarise an error of the user's code in one line, with the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    message = (str(error).strip().splitlines() or [""])[0]
    place = f", in {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{f': {short(message, 300)}' if message else ''}{place}"

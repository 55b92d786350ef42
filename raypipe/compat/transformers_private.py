"""Every private name of transformers that raypipe uses, and what happens where the installed version has it no more."""

from __future__ import annotations

from typing import Any

import torch

from raypipe.compat import PrivateName
from raypipe.errors import SpecError

CHECKED = "5.24"
"""The newest version of transformers whose private names were checked."""


NAMES = (
    PrivateName(
        "PreTrainedModel",
        "_from_config",
        "a model with random weights in float32, whatever precision its configuration names",
        "its class is called with the configuration, whose precision it may take",
    ),
    PrivateName(
        "PreTrainedConfig",
        "_attn_implementation",
        "whether two configurations compute attention by the same kernel",
        "configurations are compared by their keys alone",
    ),
    PrivateName(
        "Trainer",
        "_get_train_sampler",
        "the order of the rows is the Trainer's own, with the caller's rows",
        "an error that names it: the order would be another one",
    ),
)


def construct(kind: Any, config: Any) -> Any:
    """Construct a model of class ``kind`` with random weights in float32."""
    make = getattr(kind, "_from_config", None)
    return kind(config) if make is None else make(config, dtype=torch.float32)


def attention_of(config: Any) -> str | None:
    """Return which implementation of attention a configuration asks for; None where it does not say."""
    result: str | None = getattr(config, "_attn_implementation", None)
    return result


def check_sampler(trainer: type) -> None:
    """Check that ``trainer`` asks ``_get_train_sampler`` for the order of its rows.

    Raises:
        SpecError: it does not.
    """
    if not hasattr(trainer, "_get_train_sampler"):
        why = f"this transformers' Trainer has no _get_train_sampler, as {CHECKED} has"
        raise SpecError("PipelineTrainer", why, f"install transformers {CHECKED}")

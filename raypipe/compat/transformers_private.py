"""Every private name of transformers that raypipe uses, and what happens where the installed version has it no more."""

from __future__ import annotations

import sys
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
    PrivateName(
        "integrations.moe",
        "_can_use_grouped_mm",
        "experts are captured as grouped products where torch is older than 2.11",
        "they run as they are there, and no copies divide them",
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


def changed_while_traced() -> tuple[tuple[Any, str, Any], ...]:
    """Return what a traced forward has otherwise, as (owner, name, value).

    Below torch 2.11, whether experts take torch's kernel depends on addresses, which traced tensors have none of: they
    take the product of transformers' own, which has no such condition and is slower on GPUs.
    """
    moe = sys.modules.get("transformers.integrations.moe")
    old = torch.__version__ < "2.11" and hasattr(moe, "_can_use_grouped_mm")
    return ((moe, "_can_use_grouped_mm", lambda *_: False),) if old else ()


def check_sampler(trainer: type) -> None:
    """Check that ``trainer`` asks ``_get_train_sampler`` for the order of its rows.

    Raises:
        SpecError: it does not.
    """
    if not hasattr(trainer, "_get_train_sampler"):
        why = f"this transformers' Trainer has no _get_train_sampler, as {CHECKED} has"
        raise SpecError("PipelineTrainer", why, f"install transformers {CHECKED}")

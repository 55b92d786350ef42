"""The optimizer that the Hugging Face Trainer would make, and what of it is not carried."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from raypipe.errors import SpecError


def check_decay(model: Any, weight_decay: float) -> None:
    """Raise an error if other parameters than the matrices decay in the Trainer.

    Args:
        model: the model; one that is given by name is not looked at.
        weight_decay: ``args.weight_decay``.

    Raises:
        SpecError: a vector decays there (a scale that is named neither norm nor bias), or a matrix does not.
    """
    if not weight_decay or not isinstance(model, nn.Module):
        return
    from transformers import Trainer

    decays = set(Trainer.get_decay_parameter_names(None, model))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    others = [name for name, p in trained.items() if (p.dim() > 1) != (name in decays)]
    if others:
        what = "decays" if others[0] in decays else "does not decay"
        why = f"{others[0]} of {list(trained[others[0]].shape)} {what} in the Trainer, and here matrices alone decay"
        fix = 'use 0, or accept it by job={"train": {"decay": "matrices"}}'
        raise SpecError("args.weight_decay", why + (f" ({len(others)} such)" if len(others) > 1 else ""), fix)


def momentum(a: Mapping[str, Any], optimizer: str) -> float:
    """Return the momentum of ``optim_args``, such as ``momentum=0.9``, which sgd alone reads.

    Raises:
        SpecError: they say anything else.
    """
    fix = "give momentum=NUMBER with optim sgd, and what AdamW has as adam_beta1, adam_beta2, adam_epsilon"
    found = 0.0
    for one in str(a["optim_args"] or "").replace(" ", "").split(","):
        key, _, value = one.partition("=")
        if not one:
            continue
        try:
            if key != "momentum" or optimizer != "sgd":
                raise ValueError
            found = float(value)
        except ValueError:
            raise SpecError("args.optim_args", f"{one} is not available for {a['optim']}", fix) from None
    return found

"""The adapters that a client asks for, checked against those that the job has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from safetensors.torch import load_file
from torch import Tensor

from raypipe.errors import SpecError
from raypipe.runtime.session.slots import DOWN, UP, WEIGHTS, Adapters

LAYERS: Final = {
    "train_attn": "attn|attention",
    "train_mlp": "mlp|feed_forward|ffn|experts",
    "train_unembed": "lm_head|embed_out",
}
"""Patterns of the names of the layers that a client can leave out."""


def adapters_of(asked: Any, rank: int, start: Path) -> Adapters:
    """Return the adapters of a new model.

    Args:
        asked: the request's ``lora_config``; None for a model without adapters.
        rank: of the job's adapters; 0 where all weights are trained.
        start: folder with the job's start values.

    Raises:
        SpecError: the job's adapters do not include them.
    """
    wanted = 0 if asked is None else asked.rank
    if not rank:
        if wanted:
            why = f"has rank {wanted}, and this server trains all weights, without adapters"
            raise SpecError("lora_config", why, "ask for rank 0, or serve a job with model.lora")
        return Adapters(0)
    if not 1 <= wanted <= rank:
        why = f"has rank {wanted}, and this server trains adapters of rank 1 to {rank}"
        raise SpecError("lora_config", why, f"ask for at most {rank}, or serve a job with a larger model.lora.r")
    left_out = [kind for kind in LAYERS if not getattr(asked, kind)]
    if wanted < rank or left_out or asked.seed is not None:
        _check(start, rank, bool(left_out))
    without = "|".join(LAYERS[kind] for kind in left_out)
    if left_out and all(re.search(without, name) for name in _started(start)):
        raise SpecError("lora_config", f"leaves nothing to train without {', '.join(left_out)}", "leave one as it is")
    return Adapters(wanted, without, asked.seed)


def _started(start: Path) -> dict[str, Tensor]:
    """Return the start values of what is trained, by name."""
    files = start.glob(f"{WEIGHTS}-*.safetensors")
    return {name: value for file in files for name, value in load_file(file).items()}


def _check(start: Path, rank: int, by_kind: bool) -> None:
    """Raise SpecError where adapters cannot begin as a part of the job's, or as others than these."""
    for name, value in _started(start).items():
        down, up = DOWN in name and value.shape[0] == rank, UP in name and value.shape[1] == rank
        if value.ndim != 2 or not (down or (up and not value.any())):
            why = f"asks for a part of the job's adapters, or other start values, and {name} has no part"
            raise SpecError("lora_config", why, f"ask for rank {rank}, all layers and no seed")
        if by_kind and not any(re.search(pattern, name) for pattern in LAYERS.values()):
            why = f"chooses layers, and {name} is of none of the kinds attention, MLP and unembedding"
            raise SpecError("lora_config", why, "leave train_mlp, train_attn and train_unembed as they are")


def check_loaded(ours: Adapters, theirs: Adapters, path: str) -> None:
    """Raise SpecError where the adapters of a checkpoint are not those of the model that loads it."""
    if ours[:2] != theirs[:2]:
        why = f"{path} has adapters of rank {theirs.rank}, and the model of {ours.rank}, or for other layers"
        raise SpecError("load_weights", why, "make a model of the checkpoint instead")


def check_eps(adapters: Adapters, rank: int, eps: float) -> None:
    """Raise SpecError where AdamW would divide by zero at what is beyond a model's adapters."""
    if eps == 0 and (adapters.rank < rank or adapters.without):
        why = f"is 0, and the adapters are a part of the job's, whose rest has gradients of zero (rank {rank})"
        raise SpecError("optim_step.eps", why, "use a number above 0")

"""The model that a script gives, as the ``model`` section of a job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from raypipe.errors import SpecError
from raypipe.trainer.datasets import accepted


def given_model(model: Any, model_init: Callable[[], Any] | None, seed: int) -> Any:
    """Return the model, or what ``model_init`` returns after transformers' ``set_seed``.

    Raises:
        SpecError: neither or both are given.
    """
    if model_init is None:
        if model is None:
            raise SpecError("model", "is missing", "give a model, or model_init")
        return model
    if model is not None:
        raise SpecError("model_init", "and model are both given", "give one of them")
    from transformers import set_seed

    set_seed(seed)  # as the Trainer does
    return model_init()


def model_section(model: Any, directory: Path) -> dict[str, Any]:
    """Return the ``model`` section of the job; a model of transformers is written to the run's directory first.

    Raises:
        SpecError: workers cannot rebuild it.
    """
    if isinstance(model, str):
        return {"hf": model}
    if isinstance(model, Mapping):
        return dict(model)
    if hasattr(model, "save_pretrained") and hasattr(model, "config"):
        path = directory / "model"
        if hasattr(model, "peft_config"):
            from raypipe.models.sources.adapters import base_of

            base, state, lora = base_of(model)
            base.save_pretrained(path, state_dict=state)
            return {"hf": str(path), "lora": lora}
        model.save_pretrained(path)
        return {"hf": str(path)}
    raise SpecError(
        "model", f"a {type(model).__name__} cannot be rebuilt on the workers",
        'give {"import": "package.module:function"} for a function that builds it',
    )  # fmt: skip


def columns_read(model: Any, section: Callable[[], Any]) -> frozenset[str] | None:
    """Return the columns of the data that the model reads; None if that is not known.

    Args:
        model: the model that was given.
        section: returns the job's ``model`` section; called for models given by name.
    """
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    if hasattr(model, "forward"):
        return accepted(model.forward)
    from raypipe.job import HfSpec

    spec = section()
    if not isinstance(spec, HfSpec):
        return None
    from raypipe.models.sources.hugging_face import HuggingFace

    return accepted(HuggingFace(spec).kind.forward)

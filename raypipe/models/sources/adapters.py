"""Low-rank adapters (``model.lora``): Hugging Face's peft puts them into a model and reads what is saved of them.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from copy import copy
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from raypipe.errors import SpecError, install
from raypipe.files import read_json
from raypipe.job.model_spec import ADAPTERS, LoraSpec
from raypipe.models.sources.saved_values import TensorFiles
from raypipe.models.start_values import StartValues

ORIGINAL = ".original_module."
"""In the names of parameters that peft keeps beside those of a layer that trains whole; no forward reads them."""
WRAPPERS = (".base_layer.", ORIGINAL, ".modules_to_save.default.")
"""What peft adds to the names of parameters that the model has without adapters."""
HEADS = ("classifier", "score")
"""New layers of classifiers, which peft trains whole beside the adapters."""
TYPES = {
    "ForCausalLM": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
}
"""peft's task types by the end of a class's name; others have none."""
_ADAPTER = ".lora_"
_WHOLE = ".modules_to_save.default."
_ABOUT = (
    *("task_type", "base_model_name_or_path", "inference_mode", "revision"),
    *("peft_type", "auto_mapping", "fan_in_fan_out", "peft_version"),
)
"""Keys of peft's configuration that say nothing of the adapter, or that follow from the model."""


def with_adapters(module: nn.Module, spec: LoraSpec) -> nn.Module:
    """Put adapters into a model, in place; they and ``modules_to_save`` train, and nothing else does.

    Raises:
        SpecError: peft is not installed, or the model has no such layers.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise SpecError("model.lora", "needs peft, which is not installed", install("hf")) from None
    whole = spec.modules_to_save
    if whole is None:
        whole = [name for name in HEADS if isinstance(getattr(module, name, None), nn.Module)]
    kind = next((kind for end, kind in TYPES.items() if type(module).__name__.endswith(end)), None)
    config = LoraConfig(
        r=spec.r,
        lora_alpha=spec.lora_alpha,  # type: ignore[arg-type]
        lora_dropout=spec.lora_dropout,
        target_modules=spec.target_modules,
        use_rslora=spec.use_rslora,
        modules_to_save=whole or None,
        task_type=kind,
    )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "fan_in_fan_out is set to False")  # peft then sets what the layer needs
            return inject_adapter_in_model(config, module)
    except ValueError as error:
        fix = "name layers of the model, or give all-linear"
        raise SpecError("model.lora.target_modules", str(error).partition(".\n")[0], fix) from None


def _check_options(mine: Mapping[str, Any], where: str) -> None:
    from peft import LoraConfig

    plain = LoraConfig().to_dict()  # type: ignore[no-untyped-call]
    other = [k for k, v in mine.items() if v != plain.get(k) and k not in (*LoraSpec.model_fields, *_ABOUT)]
    if other:
        known = ", ".join(LoraSpec.model_fields)
        raise SpecError(where, f"its adapter sets {', '.join(sorted(other))}", f"use {known}")


def without_adapters(name: str) -> str:
    """Return the name that a parameter has in the model without adapters.

    >>> without_adapters("h.0.attn.c_attn.base_layer.weight")
    'h.0.attn.c_attn.weight'
    """
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, ".")
    return name


class AdapterValues:
    """Start values of a model with adapters, from those that its constructor draws.

    peft moves an adapter to the device of the layer that it belongs to, which is the meta device where a stage does not
    read that layer's weight from its constructor. So the constructor makes that weight too.
    """

    notices = ()

    def __init__(self, constructed: StartValues) -> None:
        self.constructed = constructed

    def read(self, parameters: Collection[str], buffers: Collection[str], seed: int) -> Mapping[str, Tensor]:
        """Return the values as ``StartValues`` does."""
        layers = {f"{name.partition(_ADAPTER)[0]}.base_layer.weight" for name in parameters if _ADAPTER in name}
        result = self.constructed.read({*parameters, *layers}, buffers, seed)
        return {name: value for name, value in result.items() if name not in layers or name in parameters}


class SavedAdapters:
    """Start values of a model with adapters that were saved by peft.

    Args:
        directory: peft's, with ``adapter_config.json``.
        skeleton: the model with adapters, without memory.
        others: start values of everything else.

    Raises:
        SpecError: the directory cannot be read, or does not fit the model.
    """

    def __init__(self, directory: Path, skeleton: nn.Module, others: StartValues) -> None:
        _check_options(read_json(directory / ADAPTERS), "model.adapters")
        self.others = others
        self.files = TensorFiles(directory, "adapter_model.safetensors", "model.adapters")
        shapes = self.files.without_memory()
        own = {name: value for name, value in skeleton.named_parameters() if _ADAPTER in name or _WHOLE in name}
        self.keys = {name: _peft_key(name) for name in own}
        problems = [f"holds no {key}" for key in self.keys.values() if key not in shapes]
        problems += [f"holds {key}, which the model lacks" for key in sorted(shapes.keys() - set(self.keys.values()))]
        problems += [
            f"{key} is {list(shapes[key].shape)} in the file and {list(own[name].shape)} in the model"
            for name, key in self.keys.items()
            if key in shapes and shapes[key].shape != own[name].shape
        ]
        if problems:
            fix = "give the model and the options of model.lora that it was made with"
            raise SpecError("model.adapters", f"{directory}: {'; '.join(problems)}", fix)

    @property
    def notices(self) -> tuple[str, ...]:
        """Return what the user should know of the model without adapters."""
        return self.others.notices

    def read(self, parameters: Collection[str], buffers: Collection[str], seed: int) -> Mapping[str, Tensor]:
        """Return the values as ``StartValues`` does."""
        result = dict(self.others.read([name for name in parameters if name not in self.keys], buffers, seed))
        with self.files.reader() as read:
            return result | {name: read(self.keys[name]) for name in parameters if name in self.keys}


def _peft_key(name: str) -> str:
    """Return the name that peft gives a parameter in its file.

    >>> _peft_key("h.0.q.lora_A.default.weight"), _peft_key("score.modules_to_save.default.weight")
    ('base_model.model.h.0.q.lora_A.weight', 'base_model.model.score.weight')
    """
    return "base_model.model." + name.replace(_WHOLE, ".").replace(".default", "")


def save_adapters(module: nn.Module, folder: Path, base: str) -> None:
    """Write the adapters of a model so that ``peft.PeftModel.from_pretrained`` opens them.

    Args:
        module: a model with adapters, all of it in memory.
        folder: an empty directory.
        base: type or directory of the model without adapters.
    """
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    holder: Any = module
    config = copy(holder.peft_config["default"])
    config.base_model_name_or_path, config.inference_mode = base, True
    config.save_pretrained(str(folder))
    state = get_peft_model_state_dict(module, save_embedding_layers=False)
    named = {f"base_model.model.{name}": value.contiguous() for name, value in state.items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})

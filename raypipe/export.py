"""A trained model as a directory that transformers loads: ``from_pretrained`` finds the weights of the newest
checkpoint (with ``train.load_best_at_end``, the best), the configuration, and the tokenizer that the run began with.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import nn

from raypipe.checkpoint import Checkpoint, buffer_key, open_checkpoint, outcome
from raypipe.errors import SpecError
from raypipe.job import HfSpec
from raypipe.models.hugging_face import HuggingFace
from raypipe.models.start_values import Constructed
from raypipe.partition.empty import build_without_memory
from raypipe.train import saved_job

BESIDE = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.model",
    "generation_config.json", "preprocessor_config.json", "processor_config.json", "chat_template*",
)  # fmt: skip
"""Files of a model directory that training does not change."""


def export(directory: Path, out: Path) -> Path:
    """Write the model of a run to ``out``, in float32; returns it.

    Holds the whole model in memory, once.

    Raises:
        SpecError: no run, no checkpoint, not a Hugging Face model, or ``out`` is there and not empty.
    """
    job = saved_job(directory)
    if not isinstance(job.model, HfSpec):
        raise SpecError(
            str(directory), "is no Hugging Face model", "only model: {hf: ...} has a form transformers reads"
        )
    found, notices = outcome(directory / "checkpoints", job.train.load_best_at_end)
    if found is None:
        raise SpecError(str(directory), "; ".join(notices) or "has no checkpoint yet", "train it first")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SpecError("--output", f"{out} is already there", "give a new directory")
    source = HuggingFace(job.model)
    module = build_without_memory(source.build)
    _fill(module, open_checkpoint(found, verify=False), source)
    if hasattr(source.config, "use_cache"):
        source.config.use_cache = True  # of no use in training, but in writing
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    module.save_pretrained(partial)  # type: ignore[operator]
    began = Path(job.model.hf)
    if began.is_dir():
        for file in {path for pattern in BESIDE for path in began.glob(pattern) if path.is_file()}:
            shutil.copy2(file, partial / file.name)
    if out.exists():
        out.rmdir()
    partial.replace(out)
    return out


def _fill(module: nn.Module, checkpoint: Checkpoint, source: HuggingFace) -> None:
    """Give the parameters the checkpoint's values, and the buffers too, or those that the run began with."""
    for name, parameter in list(module.named_parameters()):  # tied ones by their first name, as checkpoints do
        value = checkpoint.read([f"param/{name}"])[f"param/{name}"].to(torch.float32)
        _replace_everywhere(module, parameter, nn.Parameter(value))
    buffers = dict(module.named_buffers())
    values = source.values(source.build)
    if not isinstance(values, Constructed):
        for name, value in values.read((), buffers, 0).items():
            buffers[name].copy_(value)
    learned = {name: buffer_key(name) for name in buffers if buffer_key(name) in checkpoint.files}
    for name, key in learned.items():
        buffers[name].copy_(checkpoint.read([key])[key])


def _replace_everywhere(module: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    for part in module.modules():
        for name, held in part._parameters.items():
            if held is old:
                part._parameters[name] = new

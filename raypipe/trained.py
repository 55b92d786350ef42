"""Load the trained model of a run, as a transformers module or as one stage of layers."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from raypipe.capture.meta import build_without_memory
from raypipe.checkpoint import Checkpoint, at_step, buffer_key, open_checkpoint, outcome
from raypipe.data import known_fields, reads_bytes
from raypipe.errors import SpecError
from raypipe.files import expanded, is_url, whole
from raypipe.job import CapturedSpec, GivenSpec, HfSpec, JobSpec
from raypipe.launch.run_directory import saved_job
from raypipe.models import StageBody, build_model
from raypipe.models.layered import replace_parameter
from raypipe.models.sources.adapters import save_adapters
from raypipe.models.sources.hugging_face import HuggingFace

TOKENS = "raypipe_tokens"
"""Key of the exported config.json: ``bytes`` if the model was trained on bytes and so has no tokenizer. transformers
preserves unknown keys."""


def last_checkpoint(directory: Path, job: JobSpec, step: int | None = None) -> Checkpoint:
    """Open a run's newest checkpoint; with ``train.load_best_at_end``, its best; with ``step``, that one or none.

    A damaged newest one is passed over with a notice on standard error, which names it and the one that is used.

    Raises:
        SpecError: the run has no checkpoint yet, or none of that step.
        CheckpointError: the one of that step is damaged, or the best one.
    """
    if step is not None:
        return open_checkpoint(at_step(directory / "checkpoints", step), verify=False)
    result, notices = outcome(directory / "checkpoints", job.train.load_best_at_end)
    if result is None:
        raise SpecError(str(directory), "; ".join(notices) or "has no checkpoint yet", "train it first")
    for notice in notices:
        print(f"note: {notice}", file=sys.stderr)
    return open_checkpoint(result, verify=False)


def load_body(directory: Path, step: int | None = None) -> tuple[JobSpec, StageBody]:
    """Load all layers as one stage in evaluation mode. A model that computes its own loss ends with its output instead.

    Raises:
        SpecError: the directory holds no run, or the run has no checkpoint yet.
    """
    job = saved_job(directory)
    checkpoint = last_checkpoint(directory, job, step)
    if isinstance(job.model, CapturedSpec):
        job = job.model_copy(update={"model": job.model.model_copy(update={"loss": "task"})})
    model = build_model(job, known_fields(directory / "data"))
    body = model.build_stage(range(model.count), seed=0)
    with torch.no_grad():
        for name, parameter in body.named().items():
            key = f"param/{name}"
            parameter.copy_(checkpoint.read([key])[key])
        for one in body.statistics:
            for name, buffer in one.buffers_by_name.items():
                buffer.copy_(checkpoint.read([buffer_key(name)])[buffer_key(name)])
    return job, body.eval()


def load_hugging_face(
    directory: Path, job: JobSpec, spec: HfSpec, step: int | None = None
) -> tuple[HuggingFace, nn.Module]:
    """Load the trained model as a transformers module in float32. The full model is in memory once.

    Raises:
        SpecError: the run has no checkpoint yet.
    """
    checkpoint = last_checkpoint(directory, job, step)
    source = HuggingFace(spec)
    module = build_without_memory(source.build)
    _fill(module, checkpoint, source, job.train.seed)
    return source, module


def fill(module: nn.Module, directory: Path, job: JobSpec) -> None:
    """Put the trained values into a transformers model that the run began with, or one of ``peft.get_peft_model``.

    Raises:
        SpecError: the run has no checkpoint yet.
    """
    checkpoint = last_checkpoint(directory, job)
    inner: Any = module
    if hasattr(module, "peft_config"):
        inner = inner.base_model.model
    with torch.no_grad():
        for name, parameter in inner.named_parameters():
            if (key := f"param/{name}") in checkpoint.stored:
                parameter.copy_(checkpoint.read([key])[key])
        for name, buffer in inner.named_buffers():
            if (key := buffer_key(name)) in checkpoint.stored:
                buffer.copy_(checkpoint.read([key])[key])


def _fill(module: nn.Module, checkpoint: Checkpoint, source: HuggingFace, seed: int) -> None:
    """Fill the module from the checkpoint, and with start values where that holds none since forward reads none."""
    values = source.values(source.build)
    parameters = dict(module.named_parameters())  # tied parameters by their first name, as in checkpoints
    unused = [name for name in parameters if f"param/{name}" not in checkpoint.stored]
    others = values.read(unused, (), seed) if unused else {}
    for name, parameter in parameters.items():
        value = others[name] if name in others else checkpoint.read([f"param/{name}"])[f"param/{name}"]
        replace_parameter(module, parameter, nn.Parameter(value.to(torch.float32), parameter.requires_grad))
    buffers = dict(module.named_buffers())
    for name, value in values.read((), buffers, seed).items():
        parent, _, leaf = name.rpartition(".")  # replaced, for one that is made like a parameter has no memory either
        buffers[name] = module.get_submodule(parent)._buffers[leaf] = value.to(buffers[name].dtype)
    learned = {name: buffer_key(name) for name in buffers if buffer_key(name) in checkpoint.stored}
    for name, key in learned.items():
        buffers[name].copy_(checkpoint.read([key])[key])


# Export a trained Hugging Face model, or its adapters, to a directory for ``from_pretrained``.
#
# The directory holds the weights of the newest checkpoint (with ``train.load_best_at_end``: the best), the
# configuration, and the tokenizer that the run started with.


BESIDE = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.model",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "chat_template*",
)
"""Files of a model directory that training does not change."""


def export_into(directory: Path) -> Path:
    """Write the model of a run into its own directory, beside the run's files, and return that; see ``export``."""
    made = export(directory, directory / ".export")
    for file in made.iterdir():
        os.replace(file, directory / file.name)
    made.rmdir()
    return directory


def export(directory: Path, out: Path, step: int | None = None) -> Path:
    """Write the model of a run to ``out`` in float32, and return ``out``. The full model is in memory once.

    Of a run with ``model.lora``, what trained is written, in peft's format. ``step`` asks for that checkpoint.

    Raises:
        CheckpointError: the checkpoint of ``step``, or the best one, is damaged.
        SpecError: there is no run or no checkpoint, the model is not a Hugging Face model, or ``out`` is not empty.
    """
    given = out
    job = saved_job(directory)
    if isinstance(job.model, GivenSpec):
        why = "is the run of a model instance, which only its script can construct"
        raise SpecError(str(directory), why, "call PipelineTrainer.save_model in the script")
    if not isinstance(job.model, HfSpec):
        raise SpecError(str(directory), "is not the run of a Hugging Face model", "export a run with model: {hf: ...}")
    out = out.absolute()
    if is_url(given):
        raise SpecError("--output", f"{given} is a URL", "give a directory on this machine")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SpecError("--output", f"{out} is already there", "give a new directory")
    source, module = load_hugging_face(directory, job, job.model, step)
    if hasattr(source.config, "use_cache"):
        source.config.use_cache = True  # switched off for training, needed for generation
    setattr(source.config, TOKENS, "bytes" if reads_bytes(job, directory / "data") else None)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with whole(out, folder=True) as partial:
            if job.model.lora is not None:
                save_adapters(module, partial, job.model.hf)
            else:
                module.save_pretrained(partial)  # type: ignore[operator]
            for folder in (Path(job.model.hf), expanded(Path(job.data.tokenizer or job.model.hf))):
                if folder.is_dir():
                    for file in {path for pattern in BESIDE for path in folder.glob(pattern) if path.is_file()}:
                        shutil.copy2(file, partial / file.name)
    except OSError as error:
        raise SpecError("--output", f"{out} can't be written: {error.strerror}", "give another directory") from None
    return given

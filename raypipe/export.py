"""Export a trained Hugging Face model, or its adapters, to a directory for ``from_pretrained``.

The directory holds the weights of the newest checkpoint (with ``train.load_best_at_end``: the best), the configuration,
and the tokenizer that the run started with.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from raypipe.atomic_write import whole
from raypipe.data import reads_bytes
from raypipe.errors import SpecError
from raypipe.files import expanded, is_url
from raypipe.job import GivenSpec, HfSpec
from raypipe.launch.run_directory import saved_job
from raypipe.models.sources.adapters import save_adapters
from raypipe.trained import TOKENS, load_hugging_face

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

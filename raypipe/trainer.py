"""``PipelineTrainer``: a Python API in the style of the Hugging Face Trainer.

    import raypipe

    raypipe.init(pp=2)                      # optional; by default the planner chooses
    trainer = raypipe.PipelineTrainer(model="gpt2", args={"max_steps": 100, "output_dir": "runs/tune"},
                                      train_dataset=rows, eval_dataset=others)
    result = trainer.train()                # ray.train.Result

Datasets are written to the run directory as plain arrays, so neither code nor pickles are sent to the workers.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raypipe.arguments import read_arguments, recomputes, train_keys
from raypipe.atomic_write import whole
from raypipe.errors import SpecError
from raypipe.job import JobSpec, job_from
from raypipe.launch.callbacks import Callback, Callbacks
from raypipe.observe.run_dir import place
from raypipe.train import Prepared, claim, prepare_run, run

if TYPE_CHECKING:
    from ray.train import Result

    from raypipe.data.rows import Collator, Rows


@dataclass(frozen=True, slots=True)
class Degrees:
    """Degrees of data, tensor and pipeline parallelism; None if the planner chooses."""

    dp: int | None = None
    tp: int | None = None
    pp: int | None = None


_degrees = Degrees()


def init(dp: int | None = None, tp: int | None = None, pp: int | None = None) -> None:
    """Set the degrees of data, tensor and pipeline parallelism for trainers created afterwards.

    Without ``pp``, the planner chooses the schedule, stages and micro-batches, and also the replicas unless ``dp`` is
    given. For that, it profiles the model on the available devices for some seconds before training. With ``pp``,
    degrees that are not given are 1. ``tp`` requires ``pp``, because the planner does not choose tensor parallelism.

    Raises:
        SpecError: a degree is below 1, or ``tp`` is given without ``pp``.
    """
    global _degrees
    for name, value in (("dp", dp), ("tp", tp), ("pp", pp)):
        if value is not None and value < 1:
            raise SpecError(f"raypipe.init({name}=)", f"{value} is not a number of devices", "give 1 or more")
    if tp is not None and tp > 1 and pp is None:
        raise SpecError("raypipe.init(tp=)", "tensor parallelism needs pp", "add pp=; 1 for no pipeline")
    _degrees = Degrees(dp, tp, pp)


class PipelineTrainer:
    """Trains a model with pipeline parallelism; the result does not depend on the number of stages.

    The mini-batch is per_device_train_batch_size * gradient_accumulation_steps * dp (``dp`` of ``init``, else 1), for
    any plan; the trainer or the planner chooses the micro-batch size.

    Args:
        model: a transformers model type or local directory, a transformers model, whose weights are the initial ones,
            one with LoRA adapters of ``peft.get_peft_model``, which are drawn anew, or the ``model`` section of a job
            file as a dict.
        args: ``transformers.TrainingArguments``, or a dict with names from ``arguments.READ``.
        train_dataset: a ``torch.utils.data.Dataset``, a Hugging Face dataset or a list of dicts; all rows have the same
            names. Rows may differ in length: each micro-batch is padded to its longest row, tokens with the model's
            padding token, labels with -100, masks with 0. A missing ``attention_mask`` is added.
        eval_dataset: rows to validate on; by default a tenth of ``train_dataset``.
        data_collator: converts rows to the model's arguments. It is called in this process, once per row before
            training, so it is not sent to the workers; its padding is used.
        callbacks: instances of ``raypipe.Callback``; of ``ray.train.UserCallback``, which hear of every checkpoint and
            failure in Ray Train's controller; and a ``transformers.EarlyStoppingCallback``. Others are refused.
        job: further keys of a job file by section, such as ``{"parallel": {"schedule": "zb-h1"}}``.

    Raises:
        SpecError: an argument is invalid.
    """

    def __init__(
        self,
        model: Any,
        args: Any = None,
        train_dataset: Rows | None = None,
        eval_dataset: Rows | None = None,
        *,
        data_collator: Collator | None = None,
        callbacks: Sequence[Any] = (),
        job: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        if train_dataset is None:
            raise SpecError("train_dataset", "is missing", "give a dataset of dicts")
        self.arguments = read_arguments(args)
        output = self.arguments["output_dir"]
        if not output:
            raise SpecError("args.output_dir", "is missing", "give a directory for the run's files")
        self.directory = place(output, "args.output_dir")
        self.degrees = _degrees
        self._callbacks = [callback for callback in callbacks if isinstance(callback, Callback)]
        others = [callback for callback in callbacks if not isinstance(callback, Callback)]
        self._ray_callbacks = [callback for callback in others if _is_rays(callback)]
        self._early_stop = _early_stop([callback for callback in others if not _is_rays(callback)])
        self._model, self._train, self._eval, self._more = model, train_dataset, eval_dataset, job or {}
        self._collator = data_collator

    def train(self, resume_from_checkpoint: bool = False) -> Result:
        """Train and return Ray Train's result (metrics, newest checkpoint, path).

        Args:
            resume_from_checkpoint: go on from the newest checkpoint in ``output_dir``, with the rows that the run there
                began with; for more steps, with a larger ``max_steps``.

        Raises:
            SpecError: the model or the data cannot be trained with these arguments, or there is nothing to resume.
            RunError: the run failed and was not restarted, or a callback raised an error.
        """
        prepared = self.prepare(resume_from_checkpoint)
        callbacks = Callbacks(self._callbacks, self.directory)
        try:
            result, _ = run(prepared, None, callbacks.update, self._ray_callbacks)
            callbacks.update()  # what was logged since the last call
        finally:
            callbacks.raise_error()
        return result

    def save_model(self, output_dir: str) -> Path:
        """Write the trained model to a new directory for transformers' ``from_pretrained``; return the directory.

        Of a model with adapters, these are written, for ``peft.PeftModel.from_pretrained``.

        Raises:
            SpecError: nothing has been trained, it is not a model of transformers, or the directory is not empty.
        """
        from raypipe.export import export

        return export(self.directory, Path(output_dir))

    def prepare(self, resume: bool = False) -> Prepared:
        """Create the run directory, write the data and make the plan: the part of ``train`` before Ray Train starts."""
        claim(self.directory, resume=resume)  # check the directory before writing into it
        data = {"type": "arrays", "path": str(self._write(self._train, "train", resume))}
        if self._eval is not None:
            data["held_out"] = str(self._write(self._eval, "eval", resume))
        return prepare_run(self._job(data), self.directory, resume=resume, say=_say)

    def _write(self, rows: Rows, name: str, resume: bool) -> Path:
        path = self.directory / "datasets" / f"{name}.npz"
        if resume and path.is_file():  # the order of the samples is a function of these rows
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        from raypipe.data import columns_of, flat

        columns = columns_of(rows, f"{name}_dataset", self._collator, int(self.arguments["seed"]))
        with whole(path) as partial, partial.open("wb") as out:
            np.savez(out, **flat(columns))  # type: ignore[arg-type]
        return path

    def _job(self, data: dict[str, str]) -> JobSpec:
        a = self.arguments
        dp = self.degrees.dp or 1
        held_out = len(self._eval) if self._eval is not None else None
        train = train_keys(a, len(self._train), held_out, dp, self._early_stop)
        parallel: dict[str, Any] = {"auto": True}
        if self.degrees.pp is not None:
            stages = self.degrees.pp
            parallel = {
                "schedule": "1f1b", "stages": stages, "replicas": dp, "tensor": self.degrees.tp or 1,
                "microbatch": microbatch(train["batch"] // dp, stages),
            }  # fmt: skip
        elif self.degrees.dp is not None:
            parallel["replicas"] = dp
        if recomputes(a):
            parallel["recompute"] = "full"
        sections: dict[str, Any] = {"model": self._spec(), "data": data, "train": train, "parallel": parallel}
        for name, keys in self._more.items():
            sections[name] = {**sections.get(name, {}), **keys}
        return job_from({"name": self.directory.name, **sections}, "PipelineTrainer")

    def _spec(self) -> dict[str, Any]:
        """The ``model`` section of the job."""
        model = self._model
        if isinstance(model, str):
            return {"hf": model}
        if isinstance(model, Mapping):
            return dict(model)
        if hasattr(model, "save_pretrained") and hasattr(model, "config"):
            path = self.directory / "model"
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


def _is_rays(callback: Any) -> bool:
    """Return whether a callback is one of Ray Train's."""
    from ray.train import UserCallback

    return isinstance(callback, UserCallback)


def _early_stop(callbacks: Sequence[Any]) -> dict[str, Any] | None:
    """Translate transformers' callback to ``train.early_stop``, which also watches the validation loss."""
    found: dict[str, Any] | None = None
    for callback in callbacks:
        if not hasattr(callback, "early_stopping_patience"):
            raise SpecError(
                "callbacks", f"a {type(callback).__name__} is not supported: training runs in other processes",
                "derive it from raypipe.Callback or ray.train.UserCallback; EarlyStoppingCallback is supported too",
            )  # fmt: skip
        found = {
            "patience": int(callback.early_stopping_patience),
            "min_delta": float(callback.early_stopping_threshold or 0.0),
        }
    return found


def _say(text: str) -> None:
    """Print the progress of profiling and planning."""
    print(text, file=sys.stderr, flush=True)


def microbatch(share: int, stages: int) -> int:
    """Return the largest micro-batch size that divides ``share`` into at least two micro-batches per stage, else 1.

    >>> microbatch(32, 4), microbatch(12, 2), microbatch(4, 8)
    (4, 3, 1)
    """
    most = max(1, share // (2 * stages))
    return max(size for size in range(1, most + 1) if share % size == 0)

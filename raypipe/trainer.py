"""``PipelineTrainer``: the Python API, shaped like a Hugging Face Trainer.

    import raypipe

    raypipe.init(pp=2)                      # or leave it out: the planner chooses
    trainer = raypipe.PipelineTrainer(model="gpt2", args={"max_steps": 100, "output_dir": "runs/tune"},
                                      train_dataset=rows, eval_dataset=others)
    result = trainer.train()                # ray.train.Result

Datasets are written to the run directory as plain arrays: no code and no pickle travels to the stage actors.
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
from raypipe.observe.run_dir import place
from raypipe.train import Prepared, claim, prepare_run, run

if TYPE_CHECKING:
    from ray.train import Result

    from raypipe.data.rows import Collator, Rows


@dataclass(frozen=True, slots=True)
class Degrees:
    """How many devices each kind of parallelism takes; None where that is left to the planner."""

    dp: int | None = None
    tp: int | None = None
    pp: int | None = None


_degrees = Degrees()


def init(dp: int | None = None, tp: int | None = None, pp: int | None = None) -> None:
    """Set the degrees of data, tensor and pipeline parallelism for the trainers made from here on.

    Without ``pp`` the planner chooses the schedule, its stages and micro-batches, and the replicas unless ``dp`` says
    how many: it measures the model on the devices there are, for some seconds, before training starts. With ``pp``,
    what is not given is 1. ``tp`` needs ``pp``: the planner does not divide layers.

    Raises:
        SpecError: a degree below 1, or ``tp`` without ``pp``.
    """
    global _degrees
    for name, value in (("dp", dp), ("tp", tp), ("pp", pp)):
        if value is not None and value < 1:
            raise SpecError(f"raypipe.init({name}=)", f"{value} is no number of devices", "give 1 or more")
    if tp is not None and tp > 1 and pp is None:
        raise SpecError("raypipe.init(tp=)", "layers are divided only where pp is given", "add pp=, 1 for no pipeline")
    _degrees = Degrees(dp, tp, pp)


class PipelineTrainer:
    """Trains a model over the stages of a pipeline; the result does not depend on how many there are.

    ``model``: a transformers model type or local directory, a transformers model (its weights are the start), or what
    a job file has under ``model`` as a dict. ``args``: ``transformers.TrainingArguments``, or a dict of the names in
    ``arguments.READ``. ``train_dataset``, ``eval_dataset``: ``torch.utils.data.Dataset``, Hugging Face dataset or list
    of dicts; every row has the same names. Rows may have lengths of their own: each micro-batch is padded to its
    longest row, tokens with the model's padding token, labels with -100, masks with 0; where there is no
    ``attention_mask``, one is made. Without ``eval_dataset`` a tenth is held out.
    ``data_collator``: makes the model's arguments of rows that are not yet those. It is called here on each row alone,
    once before training, so no code of yours travels; padding is as it pads.
    The mini-batch is per_device_train_batch_size * gradient_accumulation_steps * dp (1 unless ``init`` was given one),
    whatever the plan; the trainer or the planner picks micro-batches. ``callbacks`` may hold a
    ``transformers.EarlyStoppingCallback``, and nothing else. ``job`` holds further keys of a job file, section by
    section: ``{"parallel": {"schedule": "zb-h1"}}``.

    Raises:
        SpecError: whatever is wrong with these.
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
            raise SpecError("args.output_dir", "is missing", "say where the run's files go")
        self.directory = place(output, "args.output_dir")
        self.degrees = _degrees
        self._early_stop = _early_stop(callbacks)
        self._model, self._train, self._eval, self._more = model, train_dataset, eval_dataset, job or {}
        self._collator = data_collator

    def train(self) -> Result:
        """Run to the end; returns Ray Train's result (metrics, newest checkpoint, path).

        Raises:
            SpecError: the model or the data can't be trained like this.
            RunError: the run failed for good.
        """
        prepared = self.prepare()
        result, _ = run(prepared, None, lambda: None)
        return result

    def prepare(self) -> Prepared:
        """Write the data, make the plan, lay out the run directory; what ``train`` does before Ray starts."""
        claim(self.directory, resume=False)  # before anything is written there
        data = {"type": "arrays", "path": str(self._write(self._train, "train"))}
        if self._eval is not None:
            data["held_out"] = str(self._write(self._eval, "eval"))
        return prepare_run(self._job(data), self.directory, resume=False, say=_say)

    def _write(self, rows: Rows, name: str) -> Path:
        path = self.directory / "datasets" / f"{name}.npz"
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
        """What a job file would say of the model."""
        model = self._model
        if isinstance(model, str):
            return {"hf": model}
        if isinstance(model, Mapping):
            return dict(model)
        if hasattr(model, "save_pretrained") and hasattr(model, "config"):
            path = self.directory / "model"
            model.save_pretrained(path)
            return {"hf": str(path)}
        raise SpecError(
            "model", f"a {type(model).__name__} can't be built again on every stage",
            'give {"import": "package.module:function"} for a function that builds it',
        )  # fmt: skip


def _early_stop(callbacks: Sequence[Any]) -> dict[str, Any] | None:
    """transformers' callback as a job file says it. There the loss is what stopping goes by as well."""
    found: dict[str, Any] | None = None
    for callback in callbacks:
        if not hasattr(callback, "early_stopping_patience"):
            raise SpecError(
                "callbacks", f"a {type(callback).__name__} is not run here: the driver trains, in another process",
                "leave it out; only an EarlyStoppingCallback is read",
            )  # fmt: skip
        found = {
            "patience": int(callback.early_stopping_patience),
            "min_delta": float(callback.early_stopping_threshold or 0.0),
        }
    return found


def _say(text: str) -> None:
    """How measuring and planning go."""
    print(text, file=sys.stderr, flush=True)


def microbatch(share: int, stages: int) -> int:
    """Samples of a micro-batch: the most that divide one pipeline's share of the mini-batch into two per stage.

    >>> microbatch(32, 4), microbatch(12, 2), microbatch(4, 8)
    (4, 3, 1)
    """
    most = max(1, share // (2 * stages))
    return max(size for size in range(1, most + 1) if share % size == 0)

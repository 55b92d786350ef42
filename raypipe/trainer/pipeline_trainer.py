"""``PipelineTrainer``: a Python API in the style of the Hugging Face Trainer.

    import raypipe

    raypipe.init(pp=2)                      # optional; by default the planner chooses
    trainer = raypipe.PipelineTrainer(model=model, args=arguments, train_dataset=rows, eval_dataset=others,
                                      processing_class=tokenizer, compute_metrics=accuracy)
    result = trainer.train()                # ray.train.Result, with what transformers.TrainOutput has
    print(trainer.evaluate(), trainer.predict(more_rows).predictions)

Datasets are written to the run directory as plain arrays, so neither code nor pickles are sent to the workers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch.utils.data import DataLoader, default_collate

from raypipe.data import write_order
from raypipe.errors import SpecError
from raypipe.job import GivenSpec, JobSpec, job_from
from raypipe.launch.followers import Callback, Callbacks
from raypipe.observe.run_dir import RECORD, place
from raypipe.signals import Terminated, end_on_signals
from raypipe.train import Prepared, claim, prepare_run, run, saved_job
from raypipe.trainer.arguments import degrees, every, microbatch, read_arguments, recomputes, run_steps, train_keys
from raypipe.trainer.callbacks import Figures, GivenCallbacks, History, PrintedLog, state_of, steps_of
from raypipe.trainer.datasets import Columns, collator_of, differ_in_length, write_rows
from raypipe.trainer.given_model import (
    capture_given,
    columns_read,
    given_model,
    model_section,
    noisy_embeddings,
    save_given,
    script_loss,
    smoothing_loss,
    trainers_loss,
    training_dtype,
    with_script_loss,
)
from raypipe.trainer.in_process import Epochs, generates, given_loader, trainers_loader
from raypipe.trainer.library import check_overrides
from raypipe.trainer.optimization import Optimization

if TYPE_CHECKING:
    from raypipe.data.ragged import Collator, Rows
    from raypipe.trainer.callbacks import TrainerCallbacks, TrainResult


@contextmanager
def _in_order() -> Iterator[None]:
    """Have a signal end this block in order, and say so: the interpreter says nothing of a SystemExit."""
    try:
        with end_on_signals():
            yield
    except Terminated as error:
        print(error.message, file=sys.stderr, flush=True)
        raise


class PipelineTrainer(Optimization, Figures):
    """Trains a model with pipeline parallelism; the result does not depend on the number of stages.

    The arguments are those of ``transformers.Trainer``, in its order. The mini-batch is per_device_train_batch_size *
    gradient_accumulation_steps * dp (``dp`` of ``init``, else 1), for any plan; the trainer or the planner chooses the
    micro-batch size.

    Args:
        model: a ``torch.nn.Module`` whose forward returns the loss, also one that the script defines; it has the
            trained weights after ``train``. Also one of ``peft.get_peft_model``; a transformers model type or
            local directory; or the ``model`` section of a job file as a dict.
        args: ``transformers.TrainingArguments``, or a dict of those fields that are translated to a job.
        data_collator: converts rows to the model's arguments. It is called in this process, once per row before
            training, so it is not sent to the workers; its padding is used. By default, with a ``processing_class``, as
            the Trainer: ``DataCollatorWithPadding``.
        train_dataset: a ``torch.utils.data.Dataset``, a Hugging Face dataset or a list of dicts; all rows have the same
            names. Rows may differ in length: each micro-batch is padded to its longest row, tokens with the model's
            padding token, labels with -100, masks with 0. A missing ``attention_mask`` is added.
        eval_dataset: rows to validate on. Without, ``val_loss`` is of rows that are trained on.
        processing_class: a tokenizer (or a processor), for the default collator and ``save_model``.
        model_init: returns the model, instead of ``model``.
        compute_loss_func: the loss, of the model's outputs, the labels and ``num_items_in_batch``, as the Trainer's. It
            is captured with the model, like ``compute_loss`` of a subclass: one loss of each
            per_device_train_batch_size rows, or a sum divided by ``num_items_in_batch``.
        compute_metrics: returns figures of a validation from an object with ``predictions`` and ``label_ids``. While
            training goes on it runs in the driver's process.
        callbacks: instances of ``raypipe.Callback``; of ``transformers.TrainerCallback`` (or classes); of
            ``ray.train.UserCallback``, which hear of every checkpoint and failure in Ray Train's controller.
        optimizers: an optimizer over the model's parameters and a scheduler of it, as the Trainer's, or None for
            either; class, options, parameter groups and rates are read off them.
        optimizer_cls_and_kwargs: class and options of the optimizer, instead of ``args.optim``.
        preprocess_logits_for_metrics: from logits and labels to what ``compute_metrics`` gets; runs on the devices.
        job: further keys of a job file by section, such as ``{"parallel": {"schedule": "zb-h1"}}``.

    Raises:
        SpecError: an argument is invalid, or a subclass defines a method that would not be called.
    """

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        data_collator: Collator | None = None,
        train_dataset: Rows | None = None,
        eval_dataset: Rows | None = None,
        processing_class: Any = None,
        model_init: Callable[[], Any] | None = None,
        *,
        compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: Callable[[Any], dict[str, Any]] | None = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        job: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        check_overrides(type(self), PipelineTrainer)
        if train_dataset is None:
            raise SpecError("train_dataset", "is missing", "give a dataset of dicts")
        if isinstance(eval_dataset, Mapping):
            raise SpecError("eval_dataset", "is a dict of datasets", "give one, and call evaluate for the others")
        self.args, self.arguments = args, read_arguments(args)
        output = self.arguments["output_dir"]
        if not output:
            raise SpecError("args.output_dir", "is missing", "give a directory for the run's files")
        self.directory = place(output, "args.output_dir")
        self.degrees = degrees()
        self._model = given_model(model, model_init, int(self.arguments["seed"]))
        self.compute_loss_func = compute_loss_func
        self._metrics, self._preprocess = compute_metrics, preprocess_logits_for_metrics
        self._generates = generates(args)
        self.processing_class, self.data_collator = processing_class, data_collator
        self._collator = collator_of(data_collator, processing_class)
        self.train_dataset, self.eval_dataset, self._more = train_dataset, eval_dataset, job or {}
        self._train, self._eval = train_dataset, eval_dataset
        if type(self).get_train_dataloader is not PipelineTrainer.get_train_dataloader:
            loader = self._loader = given_loader(self.get_train_dataloader())
            self._train = cast("Rows", loader.dataset)
            self._collator = None if loader.collate_fn is default_collate else loader.collate_fn
        self._callbacks = GivenCallbacks(callbacks or ())
        self._watched = self._followed()
        if self._watched is not None:
            self._watched.made()
        self._loaded: tuple[Path, Any] | None = None
        self._take_optimizers(optimizers, optimizer_cls_and_kwargs)

    @_in_order()
    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainResult:
        """Train and return Ray Train's result (metrics, newest checkpoint, path), with ``training_loss``.

        Args:
            resume_from_checkpoint: go on from the newest checkpoint in ``output_dir``, with the rows that the run there
                began with; for more steps, with a larger ``max_steps``. A path means the same: it is in ``output_dir``.

        Raises:
            SpecError: the model or the data cannot be trained with these arguments, or there is nothing to resume.
            RunError: the run failed and was not restarted, or a callback raised an error.
            SystemExit, KeyboardInterrupt: SIGTERM (status 143) or SIGINT ended it, with a checkpoint of its last step.
        """
        from raypipe.trainer.callbacks import result_of

        began = time.monotonic()
        prepared = self.prepare(bool(resume_from_checkpoint))
        done = len(steps_of(self.directory))
        followers: list[Callback] = [PrintedLog(self._history()), *self._callbacks.own]
        callbacks = Callbacks([*followers, *([] if self._watched is None else [self._watched])], self.directory)
        if self._watched is not None:
            self._watched.begin(done)
        try:
            result, _ = run(prepared, None, callbacks.update, self._callbacks.rays)
            callbacks.update()  # what was logged since the last call
        finally:
            callbacks.raise_error()
        if self._watched is not None:
            self._watched.end()
        self._fill_given()
        steps = steps_of(self.directory)
        epochs = self._history().epoch(len(steps))
        return result_of(result, steps[done:], prepared.job, time.monotonic() - began, epochs)

    def evaluate(
        self,
        eval_dataset: Rows | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **generation: Any,
    ) -> dict[str, float]:
        """Return loss and figures of the trained model on a dataset, by default ``eval_dataset``.

        The Hugging Face Trainer makes them, in this process, with the whole model; with ``predict_with_generate`` its
        Seq2SeqTrainer, which takes arguments of ``generate`` (``max_length``, ``num_beams``).

        Raises:
            SpecError: there is no dataset, nothing has been trained, or nothing is generated that takes arguments.
        """
        self._check_generation(generation)
        rows = self._eval if eval_dataset is None else eval_dataset
        if rows is None:
            raise SpecError("eval_dataset", "is missing", "give rows to evaluate")
        found: dict[str, float] = self._in_process().evaluate(rows, ignore_keys, metric_key_prefix, **generation)
        found.pop(f"{metric_key_prefix}_model_preparation_time", None)  # of a Trainer that has not trained
        if self._watched is not None:
            self._watched.evaluated(found)
        return found

    def predict(
        self,
        test_dataset: Rows,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
        **generation: Any,
    ) -> Any:
        """Return ``transformers.trainer_utils.PredictionOutput``: predictions, label_ids, metrics; see ``evaluate``.

        Raises:
            SpecError: nothing has been trained, or nothing is generated that takes arguments.
        """
        self._check_generation(generation)
        found = self._in_process().predict(test_dataset, ignore_keys, metric_key_prefix, **generation)
        found.metrics.pop(f"{metric_key_prefix}_model_preparation_time", None)
        if self._watched is not None:
            self._watched.predicted(found.metrics)
        return found

    def get_train_dataloader(self) -> Any:
        """Return the DataLoader of the training rows, as the Trainer's. A subclass may return another.

        Its sampler is asked for the order of the whole run before training, and its collator called once per row.
        """
        rows: Any = self._train
        return DataLoader(rows, batch_sampler=self._loader.batch_sampler, collate_fn=self._collator)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Return the sampler of a dataset, which a subclass may choose; None for the Trainer's own."""
        return None

    @cached_property
    def _loader(self) -> Any:
        own = type(self)._get_train_sampler is not PipelineTrainer._get_train_sampler
        sampler = self._get_train_sampler if own else None
        return trainers_loader(self._train, self.args, self.arguments, str(self.directory), sampler)

    @cached_property
    def _epochs(self) -> Epochs:
        a, copies = self.arguments, self.degrees.dp or 1
        accumulation = int(a["gradient_accumulation_steps"]) * copies
        batch = int(a["per_device_train_batch_size"]) * accumulation
        return Epochs(self._loader, accumulation, batch, int(a["seed"]))

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss of a batch, as the Trainer's; a subclass may compute another one.

        Training calls it once, to capture it with the model. So it may read what does not change while training.
        """
        smoothing = float(self.arguments["label_smoothing_factor"] or 0.0)
        return trainers_loss(model, inputs, self.compute_loss_func, return_outputs, num_items_in_batch, smoothing)

    def add_callback(self, callback: Any) -> None:
        """Add a callback, an instance or a class, before ``train``.

        Raises:
            SpecError: it is none.
        """
        self._callbacks.add(callback)
        if self._watched is None:
            self._watched = self._followed()

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback, an instance or the first one of a class, and return it; None if there is none."""
        return self._callbacks.pop(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, an instance or the first one of a class; of a class that has none, nothing is removed.

        Raises:
            ValueError: the instance is not among the callbacks.
        """
        if self._callbacks.pop(callback) is None and not isinstance(callback, type):
            raise ValueError(f"{callback} is not among the callbacks")

    def push_to_hub(self, *_: Any, **__: Any) -> None:
        """Refuse, because nothing is uploaded.

        Raises:
            SpecError: always; it says what to do instead.
        """
        fix = "upload the directory that save_model returns, by huggingface_hub's upload_folder"
        raise SpecError("push_to_hub", "is not available: nothing is uploaded", fix)

    def hyperparameter_search(self, *_: Any, **__: Any) -> None:
        """Refuse, because a trainer here is one run with one directory.

        Raises:
            SpecError: always; it says what to do instead.
        """
        why = "is not available: a PipelineTrainer is one run, with one directory and one plan"
        fix = "make one for each setting, with an output_dir of its own, and compare what evaluate() returns"
        raise SpecError("hyperparameter_search", why, fix)

    def _check_generation(self, given: Mapping[str, Any]) -> None:
        if given and not self._generates:
            fix = "give Seq2SeqTrainingArguments(predict_with_generate=True)"
            raise SpecError(min(given), "is an argument of generate, and nothing is generated", fix)

    @property
    def model(self) -> Any:
        """The model, with the trained weights once there are any.

        Raises:
            SpecError: it was given by name, and nothing has been trained.
        """
        if hasattr(self._model, "named_parameters"):
            return self._model
        from raypipe.job import HfSpec
        from raypipe.trained import last_checkpoint, load_hugging_face

        job = self._trained_job()
        newest = last_checkpoint(self.directory, job).path
        if self._loaded is None or self._loaded[0] != newest:
            if not isinstance(job.model, HfSpec):
                raise SpecError("model", "is no model of transformers", "load its checkpoint by raypipe export")
            self._loaded = (newest, load_hugging_face(self.directory, job, job.model)[1])
        return self._loaded[1]

    @property
    def state(self) -> Any:
        """``transformers.TrainerState`` of the run so far: steps, epochs, ``log_history``, the best checkpoint."""
        return state_of(self.directory, self._history())

    def save_model(self, output_dir: str | None = None) -> Path:
        """Write the trained model for transformers' ``from_pretrained``, and the tokenizer; return the directory.

        Of a model with adapters, these are written, for ``peft.PeftModel.from_pretrained``.

        Args:
            output_dir: a new directory; by default ``args.output_dir``, beside the run's files, as the Trainer does.

        Raises:
            SpecError: nothing has been trained, it is not a model of transformers, or the directory is not empty.
        """
        from raypipe.trained import export, export_into

        out = None if output_dir is None else Path(output_dir)
        if isinstance(self._trained_job().model, GivenSpec):
            made = save_given(self.model, self.directory, out)
        else:
            made = export_into(self.directory) if out is None else export(self.directory, out)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(str(made))
        return made

    def prepare(self, resume: bool = False) -> Prepared:
        """Create the run directory, write the data and make the plan: the part of ``train`` before Ray Train starts."""
        claim(self.directory, resume=resume)  # check the directory before writing into it
        with noisy_embeddings(self._model, self.arguments["neftune_noise_alpha"]):
            return self._prepare(resume)

    def _prepare(self, resume: bool) -> Prepared:
        script = script_loss(self, PipelineTrainer, self.compute_loss_func)
        model = model_section(self._model, self.directory, script, _say)
        smoothing = float(self.arguments["label_smoothing_factor"] or 0.0)
        if smoothing and script is None and model.get("given") and model["loss"] == "model":
            script = smoothing_loss(smoothing)
        data = {"type": "arrays", "path": str(self._written(self._train, "train", resume))}
        if self.arguments["neftune_noise_alpha"] and differ_in_length(Path(data["path"])):
            why = "its noise is scaled by the padded length, which here is the micro-batch's, and rows differ in length"
            raise SpecError("args.neftune_noise_alpha", why, "pad the rows to one length, or leave it out")
        data["held_out"] = data["path"] if self._eval is None else str(self._written(self._eval, "eval", resume))
        if self._eval is None:
            _say("no eval_dataset: val_loss is of rows that are trained on")
        order = self._epochs.order(self._job(data, model).train.steps)
        data["order"] = str(write_order(order, Path(data["path"]).parent))
        validation = None
        if self._metrics is not None and self._generates:
            _say("validations while training have the loss alone: evaluate() and predict() generate")
        elif self._metrics is not None:
            from raypipe.runtime.executor.metrics import ValidationMetrics

            validation = ValidationMetrics(self._metrics, self._preprocess)
        job = self._job(data, model)
        capture_given(self._model, job, script, resume, _say)
        return prepare_run(job, self.directory, resume=resume, say=_say, validation=validation)

    def _written(self, rows: Rows, name: str, resume: bool) -> Path:
        names = None
        if self.arguments["remove_unused_columns"]:
            names = columns_read(self._model, lambda: self._job({"type": "arrays", "path": "unread"}).model)
        chosen = Columns(rows, names, renames=self._collator is None)
        return write_rows(chosen, name, self.directory, self._collator, int(self.arguments["seed"]), resume)

    def _job(self, data: dict[str, str], model: dict[str, Any] | None = None) -> JobSpec:
        a = self.arguments
        dp = self.degrees.dp or 1
        held_out = len(self._eval) if self._eval is not None else None
        train = train_keys(a, self._epochs.steps, held_out, dp, self._callbacks.early_stop)
        more = self._more.get("train", {})
        train = self._optimized(train, more)
        if "dtype" not in more:
            train["dtype"] = self._dtype
        if train["best_metric"] != "loss" and (self._metrics is None or self._generates):
            without = "without compute_metrics" if self._metrics is None else "that generates nothing while training"
            why = f"{train['best_metric']} is no figure of a validation {without}"
            fix = "give compute_metrics, or use eval_loss" if self._metrics is None else "use eval_loss"
            raise SpecError("args.metric_for_best_model", why, fix)
        parallel: dict[str, Any] = {"auto": True}
        if self.degrees.pp is not None:
            stages = self.degrees.pp
            parallel = {
                "schedule": "1f1b",
                "stages": stages,
                "replicas": dp,
                "tensor": self.degrees.tp or 1,
                "microbatch": microbatch(train["batch"] // dp, stages),
            }
        elif self.degrees.dp is not None:
            parallel["replicas"] = dp
        if recomputes(a):
            parallel["recompute"] = "full"
        model = model or model_section(self._model, self.directory, None, _say)
        if model.get("given") and model["loss"] == "model":
            parallel["microbatch"] = int(a["per_device_train_batch_size"])  # what the Trainer computes one loss of
            train["label_smoothing"] = 0.0  # it is in the captured loss
        sections: dict[str, Any] = {
            "model": model,
            "data": data,
            "train": train,
            "parallel": parallel,
        }
        for name, keys in self._more.items():
            sections[name] = {**sections.get(name, {}), **keys}
        return job_from({"name": self.directory.name, **sections}, "PipelineTrainer")

    @cached_property
    def _dtype(self) -> str:
        """``train.dtype``; a line says once what becomes of a bfloat16 instance."""
        return training_dtype(self._model, "bfloat16" if self.arguments["bf16"] else "float32", _say)

    def _in_process(self) -> Any:
        """Return a ``transformers.Trainer`` of the model as it is now."""
        from raypipe.trainer.in_process import trainer_of

        made = trainer_of(
            self.model,
            self.args,
            str(self.directory),
            self.data_collator,
            self.processing_class,
            self._metrics,
            self._preprocess,
        )
        made = with_script_loss(made, self, script_loss(self, PipelineTrainer, self.compute_loss_func))
        made.state.epoch = self._history().epoch(len(steps_of(self.directory)))
        return made

    def _followed(self) -> TrainerCallbacks | None:
        """Return what tells the Trainer's callbacks of the run; None without any."""
        if not self._callbacks.theirs:
            return None
        from transformers import TrainerState

        from raypipe.trainer.callbacks import TrainerCallbacks
        from raypipe.trainer.in_process import training_arguments

        history, given = self._history(), {"processing_class": self.processing_class}
        given["model"] = self._model if hasattr(self._model, "named_parameters") else None
        args = self.args if hasattr(self.args, "output_dir") else training_arguments(self.args, str(self.directory))
        state = TrainerState(max_steps=run_steps(self.arguments, self._epochs.steps), logging_steps=history.every)
        return TrainerCallbacks(self._callbacks, args, state, history, self.directory, given)

    def _history(self) -> History:
        a, per_epoch = self.arguments, self._epochs.steps
        steps = every(a, "logging", a["logging_steps"], run_steps(a, per_epoch), per_epoch)
        return History(steps, per_epoch, bool(a["logging_first_step"]))

    def _trained_job(self) -> JobSpec:
        if not (self.directory / RECORD).exists():
            raise SpecError("PipelineTrainer", "nothing has been trained", "call train first, or give a model to it")
        return saved_job(self.directory)

    def _fill_given(self) -> None:
        """Put the trained weights into the model that was given, as the Trainer trains it in place."""
        if hasattr(self._model, "named_parameters"):
            from raypipe.trained import fill

            fill(self._model, self.directory, saved_job(self.directory))


def _say(text: str) -> None:
    """Print the progress of profiling and planning."""
    print(text, file=sys.stderr, flush=True)

"""The Trainer table: every name of the installed transformers has a row, and each row is true."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch

import raypipe
from raypipe.errors import SpecError
from raypipe.trainer import library, pipeline_trainer
from raypipe.trainer.library import ARGUMENTS, CONSTRUCTOR, HONOURED, METHODS, REFUSED, SECTIONS, defaults
from tests.trainer.test_trainer import SMALL, Sums

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
FIELDS = {f.name: f for f in dataclasses.fields(transformers.Seq2SeqTrainingArguments) if f.init}
LIBRARY = {
    name for name, value in inspect.getmembers(transformers.Seq2SeqTrainer)
    if callable(value) and not name.startswith("_")
}  # fmt: skip


OLDER = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24)
"""Whether the table has names, and defaults, that the installed library does not have yet."""


def without_a_row(removed: str = "") -> list[str]:
    own = inspect.signature(transformers.Trainer.__init__).parameters.keys() - {"self"}
    rows = [table.keys() - {removed} for table in (ARGUMENTS, METHODS, CONSTRUCTOR)]
    return sorted((FIELDS.keys() - rows[0]) | (LIBRARY - rows[1]) | (own - rows[2]))


def given(tmp_path, **fields: Any) -> Any:
    cpu = not torch.cuda.is_available()
    own = {"output_dir": str(tmp_path / "run"), "max_steps": 2, "use_cpu": cpu}
    return transformers.Seq2SeqTrainingArguments(**{**own, **fields})


def made(args: Any, kind: type = raypipe.PipelineTrainer, **more: Any) -> Any:
    more = {"model": {"hf": "gpt2", "config": SMALL}, "train_dataset": Sums(20), **more}
    return kind(args=args, **more)


def test_every_name_of_the_installed_transformers_has_a_row() -> None:
    assert not without_a_row(), "a release of transformers brought names: give each a row"


@pytest.mark.parametrize("name", ["bf16", "training_step", "model"])
def test_a_row_that_is_removed_is_missed(name: str) -> None:
    assert without_a_row(name) == [name]


@pytest.mark.skipif(OLDER, reason="the table is of transformers 5.24")
def test_no_row_is_of_a_name_that_the_library_has_not() -> None:
    assert {name for name in ARGUMENTS if name not in FIELDS} == {row.name for row in ARGUMENTS.values() if row.old}
    assert [name for name in METHODS if not hasattr(transformers.Seq2SeqTrainer, name)] == []
    assert sum(map(len, SECTIONS.values())) == len(ARGUMENTS), "a name has two rows"


@pytest.mark.skipif(OLDER, reason="the table is of transformers 5.24")
def test_defaults_are_the_librarys() -> None:
    for name, default in defaults().items():
        if name in FIELDS and name not in ("output_dir", "optim", "report_to"):
            assert FIELDS[name].default == default, name


OTHER = {
    "fp16": True, "bf16_full_eval": True, "fp16_full_eval": True,
    "debug": [transformers.debug_utils.DebugOption.UNDERFLOW_OVERFLOW],
    "eval_do_concat_batches": False, "include_for_metrics": ["inputs"], "label_names": ["y"],
    "include_num_input_tokens_seen": "all", "eval_delay": 2, "optim_target_modules": ["a"],
    "torch_compile_mode": "default", "torch_compile_backend": "eager",
    "liger_kernel_config": {"rope": True}, "fsdp": "full_shard", "fsdp_config": {"version": 2},
    "deepspeed": {"a": 1}, "parallelism_config": object(),
}  # fmt: skip
"""Values that differ from the defaults of fields that are refused; True of the others."""


@pytest.mark.parametrize("name", [row.name for row in ARGUMENTS.values() if row.answer == REFUSED])
def test_a_field_that_is_refused_is_one_error(name, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(library, "ARGUMENTS", {**ARGUMENTS, name: dataclasses.replace(ARGUMENTS[name], only_if=None)})
    args = given(tmp_path, use_cpu=True)
    setattr(args, name, OTHER.get(name, True))  # its own checks may want another machine
    with pytest.raises(SpecError, match="not supported") as caught:
        made(args)
    assert caught.value.where == f"args.{name}"
    assert ARGUMENTS[name].words in str(caught.value)


def test_what_older_releases_leave_in_fsdp_config_asks_for_nothing(tmp_path) -> None:
    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    args.fsdp_config = {"min_num_params": 0, "xla": False, "xla_fsdp_v2": False, "xla_fsdp_grad_ckpt": False}
    library.check_fields(args)
    args.fsdp_config["min_num_params"] = 10
    with pytest.raises(SpecError, match="fsdp_config"):
        library.check_fields(args)


def test_a_field_of_another_release_is_refused_by_name(tmp_path) -> None:
    @dataclasses.dataclass
    class Newer(transformers.TrainingArguments):
        half_the_layers: bool = False

    own = {"output_dir": str(tmp_path / "run"), "max_steps": 2, "use_cpu": not torch.cuda.is_available()}
    made(Newer(**own))
    with pytest.raises(SpecError, match="not known") as caught:
        made(Newer(**own, half_the_layers=True))
    assert caught.value.where == "args.half_the_layers"


@pytest.mark.parametrize("name", [row.name for row in ARGUMENTS.values() if row.answer not in (HONOURED, REFUSED)])
def test_a_field_without_effect_changes_no_job(name, tmp_path) -> None:
    plain, args = given(tmp_path), given(tmp_path)
    if name not in FIELDS:
        return
    text = "error" if name.startswith("log_level") else "other"
    setattr(args, name, text if isinstance(getattr(args, name), str) else not getattr(args, name))
    jobs = [made(one)._job({"type": "arrays", "path": "x"}) for one in (plain, args)]
    assert jobs[0] == jobs[1]


class Read(dict[str, Any]):
    """Notes the names that are read."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)


@pytest.mark.slow
def test_a_field_that_is_honoured_is_read(tmp_path, monkeypatch) -> None:
    """By the translation to a job, or by the Trainer's own code in the loader of rows, or in `evaluate`."""
    seen: set[str] = set()
    quiet = [False]

    class Watched(transformers.Seq2SeqTrainingArguments):
        def __getattribute__(self, name: str) -> Any:
            if not quiet[0]:
                seen.add(name)
            return super().__getattribute__(name)

    def read(args: Any, plain: Any = pipeline_trainer.read_arguments) -> Read:
        quiet[0] = True  # it copies all of them
        result = Read(plain(args))
        seen.clear()
        quiet[0] = False
        return result

    monkeypatch.setattr(pipeline_trainer, "read_arguments", read)
    config = transformers.T5Config(
        vocab_size=40, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    rows = [{"input_ids": [3, 4, 5 + i], "labels": [6, 7], "length": 3} for i in range(8)]
    args = Watched(
        output_dir=str(tmp_path / "run"), max_steps=2, predict_with_generate=True, eval_strategy="steps",
        train_sampling_strategy="group_by_length", use_cpu=True,
    )  # fmt: skip
    job = {"parallel": {"auto": False, "schedule": "1f1b", "stages": 1, "replicas": 1, "microbatch": 8}}
    model = transformers.T5ForConditionalGeneration(config)
    one = made(args, model=model, train_dataset=rows, eval_dataset=rows, job=job)
    one.prepare()
    one._history()
    one.evaluate()
    honoured = {row.name for row in ARGUMENTS.values() if row.answer == HONOURED}
    translated = {name for name in defaults() if not ARGUMENTS[name].old}
    # What the Trainer makes of a batch size or a seed it reads itself, from the same arguments.
    assert sorted(translated - one.arguments.names - seen) == []
    assert sorted(honoured - defaults().keys() - seen) == ["length_column_name"]  # read of Hugging Face's datasets


def subclass(name: str, body: Any = None) -> type:
    return type("Mine", (raypipe.PipelineTrainer,), {name: body or (lambda self, *a, **k: None)})


@pytest.mark.parametrize("name", [row.name for row in METHODS.values() if row.answer == REFUSED])
def test_a_method_that_is_refused_is_one_error(name, tmp_path) -> None:
    with pytest.raises(SpecError) as caught:
        made(given(tmp_path), subclass(name))
    assert caught.value.where == f"Mine.{name}"
    assert METHODS[name].words in str(caught.value)


def test_a_method_of_the_library_without_a_row_is_refused(tmp_path) -> None:
    with pytest.raises(SpecError, match="use another name if it is your own") as caught:
        made(given(tmp_path), subclass("_clip_grad_norm"))
    assert caught.value.where == "Mine._clip_grad_norm"


def test_methods_of_ones_own_are_fine(tmp_path) -> None:
    class Mine(raypipe.PipelineTrainer):
        figures = ("a", "b")

        def report(self) -> str:
            return "mine"

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            return super().compute_loss(model, inputs, return_outputs, **more)

        def train(self, *given: Any, **more: Any) -> Any:
            return super().train(*given, **more)

    assert made(given(tmp_path), Mine).report() == "mine"


def test_a_mixin_counts_before_and_after(tmp_path) -> None:
    class Stepping:
        def training_step(self, *given: Any) -> None: ...

    for bases in ((Stepping, raypipe.PipelineTrainer), (raypipe.PipelineTrainer, Stepping)):
        with pytest.raises(SpecError, match="training_step"):
            made(given(tmp_path), type("Mine", bases, {}))


def test_the_constructor_has_the_arguments_of_the_trainers() -> None:
    assert inspect.signature(raypipe.PipelineTrainer.__init__).parameters.keys() - {"self", "job"} == CONSTRUCTOR.keys()

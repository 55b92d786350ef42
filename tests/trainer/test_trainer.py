"""PipelineTrainer: what it makes of a Trainer's arguments, and a run through it."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import raypipe
from raypipe.errors import SpecError
from raypipe.runtime.update.optimizer import learning_rate
from raypipe.trainer.callbacks import History
from raypipe.trainer.datasets import PadRows

SMALL = {
    "vocab_size": 96,
    "n_embd": 16,
    "n_head": 2,
    "n_layer": 2,
    "n_positions": 16,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


class Sums(torch.utils.data.Dataset):
    """Rows of tokens that count upwards: easily learned; the last places are padding without labels."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self.rows:
            raise IndexError
        ids = (torch.arange(12) + index) % 90
        mask = (torch.arange(12) < 12 - index % 4).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@pytest.fixture(autouse=True)
def degrees():
    raypipe.init(pp=2)
    yield
    raypipe.init()


def trainer(tmp_path, args=None, **more):
    defaults = {"output_dir": str(tmp_path / "run"), "max_steps": 3}
    given = {"model": {"hf": "gpt2", "config": SMALL}, "train_dataset": Sums(20), **more}
    return raypipe.PipelineTrainer(args={**defaults, **(args or {})}, **given)


def test_importing_raypipe_loads_neither_torch_nor_ray() -> None:
    code = "import sys, raypipe; sys.exit(bool({'torch', 'ray'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    with pytest.raises(AttributeError, match="has no attribute 'Trainer'"):
        raypipe.Trainer  # noqa: B018


def real(tmp_path, **args):
    """The library's own class, which needs accelerate."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    cpu = not torch.cuda.is_available()  # it asks for this word before it believes in bfloat16 there
    return transformers.TrainingArguments(**{"output_dir": str(tmp_path / "run"), "use_cpu": cpu, **args})


def test_a_trainers_arguments_mean_the_same_here(tmp_path) -> None:
    args = {
        "num_train_epochs": 2, "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2, "learning_rate": 0.01, "weight_decay": 0.1, "adam_beta2": 0.95,
        "max_grad_norm": 0.5, "warmup_steps": 1, "lr_scheduler_type": "cosine", "seed": 7, "eval_strategy": "steps",
        "eval_steps": 2, "save_steps": 2, "save_total_limit": 1,
    }  # fmt: skip
    # Much else says nothing of what is trained.
    as_object = real(tmp_path, **args, logging_steps=3, dataloader_num_workers=2)
    as_dict = {**args, "output_dir": str(tmp_path / "run")}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jobs = [job_of(a) for a in (as_dict, as_object)]
    assert jobs[0] == jobs[1]
    train = jobs[0].train
    assert (train.steps, train.batch, train.lr, train.weight_decay, train.betas) == (6, 8, 0.01, 0.1, (0.9, 0.95))
    assert train.decay == "matrices"
    assert job_of({"output_dir": str(tmp_path / "run")}).train.keep_checkpoints is None  # no limit
    assert (train.clip, train.warmup_steps, train.lr_schedule, train.seed) == (0.5, 1, "cosine", 7)
    assert (train.eval_every, train.checkpoint_every, train.keep_checkpoints) == (2, 2, 1)
    assert (jobs[0].parallel.stages, jobs[0].parallel.microbatch) == (2, 2)


def test_early_stopping_is_transformers(tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    args = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
    }
    callback = transformers.EarlyStoppingCallback(3, 0.5)
    train = trainer(tmp_path, args, callbacks=[callback])._job({"type": "arrays", "path": "x"}).train
    assert (train.early_stop.patience, train.early_stop.min_delta, train.load_best_at_end) == (3, 0.5, True)
    assert trainer(tmp_path)._job({"type": "arrays", "path": "x"}).train.early_stop is None


def test_the_log_is_the_trainers() -> None:
    """Means since the entry before, epochs by samples, a validation's figures by its names."""
    history = History(every=2, per_epoch=4, first=True)
    rows = [{"step": k, "loss": float(k), "grad_norm": 1.0, "lr": 0.1} for k in range(1, 5)]
    rows.insert(3, {"step": 3, "val_loss": 2.5, "val_accuracy": 0.5})
    assert [history.take(row) for row in rows] == [
        {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 0.1, "epoch": 0.25},
        {"loss": 2.0, "grad_norm": 1.0, "learning_rate": 0.1, "epoch": 0.5},
        None,
        {"eval_loss": 2.5, "eval_accuracy": 0.5, "epoch": 0.75},
        {"loss": 3.5, "grad_norm": 1.0, "learning_rate": 0.1, "epoch": 1.0},
    ]
    assert [entry["step"] for entry in history.entries] == [1, 2, 3, 4]


def test_the_best_by_another_figure_and_rows_by_length(tmp_path) -> None:
    args = {
        "output_dir": str(tmp_path / "run"), "metric_for_best_model": "eval_f1", "load_best_model_at_end": True,
        "eval_strategy": "epoch", "warmup_steps": 3, "train_sampling_strategy": "group_by_length",
    }  # fmt: skip
    job = job_of(args, compute_metrics=lambda p: {"f1": 1.0})
    assert (job.train.best_metric, job.train.best_is, job.train.warmup_from_zero) == ("f1", "highest", True)
    assert [learning_rate(job.train, step) / job.train.lr for step in range(4)] == pytest.approx([0, 1 / 3, 2 / 3, 1])
    lowest = job_of({**args, "greater_is_better": False}, compute_metrics=lambda p: {"f1": 1.0})
    assert lowest.train.best_is == "lowest"


def test_rows_that_nothing_collates_are_padded_as_in_training() -> None:
    batch = PadRows(7)([{"input_ids": [1, 2, 3], "label": [1, 2, 3]}, {"input_ids": [4], "label": [5]}])
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 7, 7]]
    assert batch["labels"].tolist() == [[1, 2, 3], [5, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


def job_of(args, **more):
    given = {"model": {"hf": "gpt2", "config": SMALL}, "train_dataset": Sums(20), **more}
    return raypipe.PipelineTrainer(args=args, **given)._job({"type": "arrays", "path": "x"})


def test_transformers_defaults_are_its_own(tmp_path) -> None:
    assert job_of(real(tmp_path)) == job_of({"output_dir": str(tmp_path / "run")})


def test_epochs_shares_and_checkpointing(tmp_path) -> None:
    args = real(
        tmp_path, per_device_train_batch_size=5, num_train_epochs=4, warmup_steps=0.25, eval_strategy="epoch",
        save_strategy="steps", save_steps=0.5, bf16=True, gradient_checkpointing=True, full_determinism=False,
        max_grad_norm=0.0, optim="sgd", lr_scheduler_type="constant_with_warmup",
    )  # fmt: skip
    job = job_of(args, eval_dataset=Sums(11))
    train = job.train
    assert (train.steps, train.warmup_steps, train.eval_every, train.checkpoint_every) == (16, 4, 4, 8)
    assert (train.eval_batches, train.clip, train.optimizer, train.dtype) == (3, None, "sgd", "bfloat16")
    assert (job.parallel.recompute, train.lr_schedule) == ("full", "constant")


def test_arguments_without_a_counterpart_are_named(tmp_path) -> None:
    with pytest.raises(SpecError, match="not supported") as caught:
        job_of(real(tmp_path, label_names=["target"], eval_delay=2))
    assert caught.value.where == "args.eval_delay, args.label_names"
    with pytest.raises(SpecError, match=r"args\.eval_on_start: is not supported"):
        job_of(real(tmp_path, eval_strategy="epoch", eval_on_start=True))
    with pytest.warns(UserWarning, match=r"args\.report_to=trackio$"):
        assert job_of(real(tmp_path, report_to=["trackio", "tensorboard"])).train.report_to == ("tensorboard",)
    with pytest.raises(SpecError, match="best is not available"):
        job_of(real(tmp_path, save_strategy="best"))


@pytest.mark.slow
def test_a_model_as_an_object_is_where_training_starts(tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    from raypipe.data import declared_fields
    from raypipe.models import build_model

    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SMALL))
    prepared = trainer(tmp_path, model=model).prepare()
    built = build_model(prepared.job, declared_fields(prepared.job.data)).build_stage([0], seed=0)
    assert torch.equal(built.named()["transformer.wte.weight"], model.transformer.wte.weight)
    assert not [path for path in prepared.directory.rglob("*") if path.suffix in (".pkl", ".pt", ".bin")]


def test_a_model_of_peft_trains_its_own_adapters(tmp_path) -> None:
    """Also where they are not new: their values are where training starts, and nothing else trains."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    from raypipe.data import declared_fields
    from raypipe.models import build_model

    base = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SMALL))
    wanted = {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True, "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(base, peft.LoraConfig(**wanted, init_lora_weights="gaussian"))
    with torch.no_grad():
        base.transformer.h[0].attn.c_attn.lora_B["default"].weight += 1
    prepared = trainer(tmp_path, model=model).prepare()
    built = build_model(prepared.job, declared_fields(prepared.job.data))
    named = built.build_stage(range(built.count), seed=0).named()
    own = dict(base.named_parameters())
    assert all(torch.equal(value, own[name]) for name, value in named.items())
    assert {name for name, p in named.items() if p.requires_grad} == {name for name in own if ".lora_" in name}
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    prompted = peft.get_peft_model(transformers.GPT2LMHeadModel(transformers.GPT2Config(**SMALL)), prompts)
    with pytest.raises(SpecError, match="its adapters are prompts"):
        trainer(tmp_path / "b", model=prompted).prepare()


TWO = [{"input_ids": [1, 2], "labels": [1, 2]}, {"input_ids": [1, 2, 3], "labels": [1, 2, 3]}]


def collate(rows, left=False):
    """As tokenizers pad, with a padding token of their own."""
    longest = max(len(row["input_ids"]) for row in rows)

    def filled(values, fill):
        more = [fill] * (longest - len(values))
        return more + list(values) if left else list(values) + more

    return {
        "input_ids": torch.tensor([filled(row["input_ids"], 7) for row in rows]),
        "labels": torch.tensor([filled(row["input_ids"], -100) for row in rows]),
    }


WRONG = {
    "an argument that is not read": ({"args": {"learning_rat": 1}}, 'did you mean "learning_rate"'),
    "another optimizer": ({"args": {"optim": "lion_32bit"}}, "lion_32bit is not available"),
    "no output_dir": ({"args": {"output_dir": ""}}, "output_dir"),
    "rows of two widths": (
        {"train_dataset": [{"inputs_embeds": [[1, 2]], "labels": 0}, {"inputs_embeds": [[1]], "labels": 1}]},
        "only the first size may differ",
    ),
    "a row that is no box": ({"train_dataset": [{"input_ids": [[1, 2], [3]]}] * 2}, "not a number or tensor"),
    "an empty row": ({"train_dataset": [TWO[0], {"input_ids": [], "labels": []}]}, "input_ids of row 1 is empty"),
    "rows of values that nothing can pad": (
        {"train_dataset": [{"inputs_embeds": [0.5, 1.0], "labels": 0}, {"inputs_embeds": [0.5], "labels": 1}]},
        "which is not padded",
    ),
    "labels that are too few": (
        {"train_dataset": [*TWO, {"input_ids": [1, 2, 3], "labels": [1]}]},
        "row 2 has 3 input_ids and 1 labels",
    ),
    "a row longer than the positions": (
        {"train_dataset": [*TWO, {"input_ids": [1] * 17, "labels": [1] * 17}]},
        "longest row has 17 input_ids, but the model has positions for 16",
    ),
    "one value of a collator": (
        {"data_collator": lambda rows: {**collate(rows), "return_loss": True}},
        "return_loss, one value for all rows",
    ),
    "a collator that fails": ({"data_collator": lambda rows: rows[0]["nothing"]}, "data_collator fails on row 0"),
    "a collator that pads on the left": (
        {"train_dataset": TWO * 2, "data_collator": lambda rows: collate(rows, left=True)},
        "pad on the right",
    ),
    "rows of other names": ({"train_dataset": [{"input_ids": [1]}, {"ids": [1]}]}, "the same names"),
    "columns that the model does not read": (
        {"train_dataset": [{"sentence": "a b", "label": 1}] * 4},
        "none of its columns sentence, label is an argument of the model",
    ),
    "text": ({"train_dataset": [{"input_ids": "abc"}, {"input_ids": "abd"}]}, "tokenize it"),
    "rows that are tuples": ({"train_dataset": [(1, 2), (3, 4)]}, "give dicts"),
    "no dataset": ({"train_dataset": None}, "is missing"),
    "a module without a loss": ({"model": torch.nn.Linear(1, 1)}, "none of its columns|takes no labels|argument input"),
    "another callback": ({"callbacks": [object()]}, "derive it from raypipe.Callback"),
    "the best by a figure that nothing computes": (
        {"args": {"metric_for_best_model": "accuracy", "load_best_model_at_end": True, "eval_strategy": "epoch"}},
        "give compute_metrics, or use eval_loss",
    ),
    "another sampler": ({"args": {"train_sampling_strategy": "reversed"}}, "reversed is not available"),
    "validation on several datasets": ({"eval_dataset": {"a": TWO}}, "call evaluate for the others"),
    "no labels": ({"train_dataset": [{"input_ids": [1, 2]}] * 20}, "labels"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_error(case, tmp_path) -> None:
    pytest.importorskip("transformers")
    given, words = WRONG[case]
    with pytest.raises(SpecError, match=words):
        trainer(tmp_path, **given).prepare()


def test_what_only_the_trainers_script_can_do_is_refused_by_name(tmp_path) -> None:
    pytest.importorskip("transformers")
    one = trainer(tmp_path)
    with pytest.raises(SpecError, match="one for each setting, with an output_dir of its own"):
        one.hyperparameter_search(direction="minimize", n_trials=3)
    for method in (one.evaluate, one.predict):
        with pytest.raises(SpecError, match="num_beams: is an argument of generate, and nothing is generated"):
            method(TWO, num_beams=2)
    pytest.importorskip("accelerate")
    from transformers import Seq2SeqTrainingArguments

    args = Seq2SeqTrainingArguments(
        output_dir=str(tmp_path / "b"), predict_with_generate=True, metric_for_best_model="hits", use_cpu=True,
        load_best_model_at_end=True, eval_strategy="steps", report_to="none",
    )  # fmt: skip
    with pytest.raises(SpecError, match="generates nothing while training"):
        raypipe.PipelineTrainer(
            model={"hf": "gpt2", "config": SMALL}, args=args, train_dataset=Sums(20), compute_metrics=len
        ).prepare()


def test_degrees_are_counts() -> None:
    with pytest.raises(SpecError, match="give 1 or more"):
        raypipe.init(pp=0)
    with pytest.raises(SpecError, match="add pp="):
        raypipe.init(tp=2)


def test_what_init_leaves_out_is_the_planners(tmp_path) -> None:
    args = {"output_dir": str(tmp_path / "run"), "per_device_train_batch_size": 4}
    raypipe.init()
    job = job_of(args)
    assert (job.parallel.auto, job.parallel.given, job.train.batch) == (True, {}, 4)
    raypipe.init(dp=3)
    job = job_of({**args, "gradient_checkpointing": True}, job={"parallel": {"schedule": "zb-v"}})
    assert job.parallel.given == {"replicas": 3, "recompute": "full", "schedule": "zb-v"}
    assert (job.parallel.auto, job.train.batch) == (True, 12)
    raypipe.init(dp=2, tp=2, pp=2)
    job = job_of(args)
    assert (job.parallel.stages, job.parallel.replicas, job.parallel.tensor) == (2, 2, 2)
    assert (job.parallel.auto, job.parallel.microbatch, job.train.batch) == (False, 1, 8)


@pytest.mark.slow
def test_a_collator_makes_the_rows_and_says_what_pads_them(tmp_path) -> None:
    """Rows keep their lengths, and get what the collator makes of them; text columns are its own business."""
    pytest.importorskip("transformers")
    from raypipe.data import declared_fields, open_data
    from raypipe.models import build_model

    rows = [{"input_ids": [9] * n, "text": "x"} for n in range(1, 13)]
    made = trainer(tmp_path, {"seed": 5}, train_dataset=rows, eval_dataset=rows[:3], data_collator=collate)
    prepared = made.prepare()
    model = build_model(prepared.job, declared_fields(prepared.job.data))
    data = open_data(prepared.directory / "data", model.task, 4)
    batch = data.batch("train", 5, 0, 12)
    own = (batch["input_ids"] == 9).sum(1)
    assert sorted(own.tolist()) == list(range(1, 13))
    places = torch.arange(12)
    assert torch.equal(batch["input_ids"], torch.where(places < own[:, None], 9, 7))
    assert torch.equal(batch["labels"], torch.where(places < own[:, None], 9, -100))
    assert torch.equal(batch["attention_mask"], (places < own[:, None]).long())
    lengths = data.lengths("train", 5, 0, 12)
    assert lengths["labels"].tolist() == [-(-n // 4) * 4 for n in own.tolist()]


@pytest.mark.runs
def test_a_run_returns_ray_trains_result(local_ray, tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    from ray.train import Result, UserCallback

    from raypipe.checkpoint import open_checkpoint
    from raypipe.observe.run_log import METRICS, read_rows

    args = real(
        tmp_path, max_steps=12, learning_rate=0.02, save_steps=4, eval_strategy="steps", eval_steps=4,
        load_best_model_at_end=True, report_to=["tensorboard"],
    )  # fmt: skip

    class Reported(UserCallback):
        def __init__(self, path: str) -> None:
            self.path = path

        def after_report(self, run_context, metrics, checkpoint) -> None:
            with open(self.path, "a", encoding="utf-8") as told:
                told.write(f"{metrics[0]['step']} {Path(checkpoint.path).name}\n")

    ids = [[(i + k) % 90 for k in range(12 - i % 4)] for i in range(20)]
    rows = [{"input_ids": row, "attention_mask": [1] * len(row), "labels": row} for row in ids]  # of four lengths
    given = {"model": {"hf": "gpt2", "config": SMALL}, "train_dataset": rows, "eval_dataset": Sums(6)}
    told, mine = tmp_path / "told", Follower()
    result = raypipe.PipelineTrainer(args=args, callbacks=[Reported(str(told)), mine], **given).train()
    assert isinstance(result, Result)
    assert [line.split()[0] for line in told.read_text().splitlines()] == ["4", "8", "12"]
    assert list((tmp_path / "run" / "tensorboard").glob("events.out.tfevents.*"))
    assert result.metrics["step"] == 12
    assert result.metrics["val_loss"] < 4.0  # a uniform guess is 4.56
    assert result.checkpoint is not None
    assert result.error is None
    rows = read_rows(tmp_path / "run" / METRICS)
    assert mine.losses == [row["loss"] for row in rows if "loss" in row]
    assert mine.saved == [4, 8, 12]
    losses = [row["val_loss"] for row in rows if "val_loss" in row]
    assert len(losses) == 3
    assert open_checkpoint(result.checkpoint.path).meta["val_loss"] == min(losses)

    args.max_steps = 14
    again = raypipe.PipelineTrainer(args=args, **given)
    assert again.train(resume_from_checkpoint=True).metrics["step"] == 14
    assert [row["loss"] for row in read_rows(tmp_path / "run" / METRICS) if "loss" in row][:12] == mine.losses
    saved = transformers.AutoModelForCausalLM.from_pretrained(again.save_model(str(tmp_path / "saved")))
    assert saved.config.vocab_size == SMALL["vocab_size"]


class Follower(raypipe.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.saved: list[int] = []

    def on_step_end(self, step: int, metrics: dict[str, float]) -> None:
        assert step == len(self.losses) + 1
        self.losses.append(metrics["loss"])

    def on_save(self, step: int, path: object) -> None:
        self.saved.append(step)

"""Scripts written for transformers' Trainer, run with it and, with that one import changed, with PipelineTrainer.

Each step takes all training rows, so that the order of the rows makes no difference.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import raypipe

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
THEIRS, OURS = "from transformers import {}\n", "from raypipe import PipelineTrainer as {}\n"


@pytest.fixture
def both(tmp_path, monkeypatch, local_ray):
    """Run a script of ``scripts/`` with both classes; return what it defined."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    raypipe.init(pp=2)

    def run(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        source = (HERE / "scripts" / name).read_text(encoding="utf-8")
        result = []
        kind = "Seq2SeqTrainer" if name == "seq2seq.py" else "Trainer"
        import_line = THEIRS.format(kind)
        for folder, line in (("theirs", import_line), ("ours", OURS.format(kind))):
            where = tmp_path / folder
            where.mkdir()
            (where / "corpus.txt").write_bytes((ROOT / "LICENSE").read_bytes())
            monkeypatch.chdir(where)
            defined: dict[str, Any] = {"__name__": "script"}
            assert source.count(import_line) == 1
            exec(compile(source.replace(import_line, line), name, "exec"), defined)
            result.append({**defined, "folder": where})
        return result[0], result[1]

    yield run
    raypipe.init()


def training(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def validation(trainer: Any) -> list[float]:
    return [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry][:6]


def rates(trainer: Any) -> list[float]:
    return [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]


def logits(model: torch.nn.Module, **inputs: list[list[int]]) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**{name: torch.tensor(value) for name, value in inputs.items()}).logits


@pytest.mark.runs
def test_a_classifier(both, capfd) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    theirs, ours = both("classification.py")
    printed = [line for line in capfd.readouterr().out.splitlines() if line.startswith("{'")]
    assert [sum(line.startswith(f"{{'{name}'") for line in printed) for name in ("loss", "eval_loss")] == [12, 14]
    assert training(ours["trainer"]) == pytest.approx(training(theirs["trainer"]), abs=2e-5)
    assert rates(ours["trainer"]) == pytest.approx(rates(theirs["trainer"]))
    # 13 rows in one mini-batch of 32, in which every row comes at least twice
    assert validation(ours["trainer"]) == pytest.approx(validation(theirs["trainer"]), abs=1e-4)
    assert dict(ours["followed"].losses) == pytest.approx(dict(theirs["followed"].losses), abs=2e-5)
    assert [step for step, _ in ours["followed"].losses] == [1, 2, 3, 4, 5, 6]
    assert ours["followed"].accuracies == theirs["followed"].accuracies
    assert ours["followed"].ends == 1
    for one in (theirs, ours):
        assert one["result"].global_step == 6
        assert one["result"].training_loss == pytest.approx(theirs["result"].training_loss, abs=2e-5)
        assert {"train_runtime", "train_loss", "train_samples_per_second", "epoch"} <= one["result"].metrics.keys()
    for state in (theirs["trainer"].state, ours["trainer"].state):
        assert state.best_metric == theirs["trainer"].state.best_metric
        assert state.best_global_step == theirs["trainer"].state.best_global_step
        assert state.epoch == 6
    assert ours["evaluated"].keys() == theirs["evaluated"].keys()
    for name in ("eval_loss", "eval_accuracy", "epoch"):
        assert ours["evaluated"][name] == pytest.approx(theirs["evaluated"][name], abs=1e-4)
    assert ours["predicted"].predictions == pytest.approx(theirs["predicted"].predictions, abs=1e-3)
    assert (ours["predicted"].label_ids == theirs["predicted"].label_ids).all()
    assert ours["predicted"].metrics["test_accuracy"] == theirs["predicted"].metrics["test_accuracy"]
    ids = [[5, 6, 7, 8]]
    saved = AutoModelForSequenceClassification.from_pretrained(ours["folder"] / "saved")
    assert logits(saved, input_ids=ids) == pytest.approx(logits(ours["model"], input_ids=ids), abs=1e-6)
    assert logits(saved, input_ids=ids) == pytest.approx(logits(theirs["model"], input_ids=ids), abs=1e-3)
    assert AutoTokenizer.from_pretrained(ours["folder"] / "saved").pad_token == "[PAD]"
    for name in ("train_results.json", "all_results.json", "trainer_state.json"):
        assert json.loads((ours["folder"] / "out" / name).read_text())


@pytest.mark.exhaustive
@pytest.mark.runs
def test_adapters(both) -> None:
    """The script's own adapters train, and are saved for peft.

    Of a model in peft's wrapper, the Trainer divides the loss by all labels, although each row's first is no target.
    """
    from peft import PeftModel

    theirs, ours = both("lora.py")
    first, *others = training(ours["trainer"])
    labels = [len(row["input_ids"]) for row in ours["rows"][:24]]
    share = sum(n - 1 for n in labels) / sum(labels)
    assert first * share == pytest.approx(training(theirs["trainer"])[0], abs=2e-5)
    assert others[-1] < first
    assert ours["evaluated"]["eval_loss"] == pytest.approx(theirs["evaluated"]["eval_loss"], abs=0.02)
    assert rates(ours["trainer"]) == pytest.approx(rates(theirs["trainer"]))
    ids = [[5, 6, 7, 8]]
    mine = logits(ours["model"], input_ids=ids)
    opened = PeftModel.from_pretrained(ours["model"].unload(), ours["folder"] / "saved")
    assert logits(opened, input_ids=ids) == pytest.approx(mine, abs=1e-6)


@pytest.mark.exhaustive
@pytest.mark.runs
def test_one_sequence_from_another(both) -> None:
    from transformers import T5ForConditionalGeneration

    theirs, ours = both("seq2seq.py")
    assert training(ours["trainer"]) == pytest.approx(training(theirs["trainer"]), abs=2e-5)
    assert ours["evaluated"]["eval_loss"] == pytest.approx(theirs["evaluated"]["eval_loss"], abs=1e-3)
    assert ours["evaluated"].keys() == theirs["evaluated"].keys()
    for name in ("eval_hits", "eval_tokens"):  # of what is generated
        assert ours["evaluated"][name] == pytest.approx(theirs["evaluated"][name])
    assert (ours["predicted"].predictions == theirs["predicted"].predictions).all()
    assert ours["predicted"].predictions[:, :6].any()
    assert not ours["predicted"].predictions[:, 6:].any(), "no more than max_length, whatever the arguments say"
    saved = T5ForConditionalGeneration.from_pretrained(ours["folder"] / "out")
    given = {"input_ids": [[5, 6, 7]], "decoder_input_ids": [[0, 7]]}
    assert logits(saved, **given) == pytest.approx(logits(theirs["model"], **given), abs=1e-3)

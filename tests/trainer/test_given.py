"""Model instances as they are: modules of the script, frozen and edited ones, losses of the script."""

from __future__ import annotations

import random
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import raypipe
from raypipe.errors import SpecError
from raypipe.models.given.check import check_state, state_of
from raypipe.models.keyed_operations import keyed_uniform
from raypipe.models.keyed_random import RandomKeys, with_keys
from raypipe.trainer.given_model import model_section
from tests.exhaustive import crossed
from tests.trainer.three_steps import arguments, assert_alike, bert, degrees, hugging_face, pipelined, plain, rows_of

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

ROWS = rows_of()
SEED = 3
"""That of ``one_device``."""
BATCH = {name: torch.tensor([row[name] for row in ROWS]) for name in ROWS[0]}


class Own(nn.Module):
    """A module that no worker can import: the tests' file is no module of theirs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.e = nn.Embedding(50, 16)
        self.l = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
        self.h = nn.Linear(16, 3)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.e(input_ids).mean(1)
        for layer in self.l:
            x = x + torch.tanh(layer(x))
        logits = self.h(x)
        assert labels is not None
        return {"loss": F.cross_entropy(logits, labels) * 2, "logits": logits}


def own() -> nn.Module:
    return Own().double()


def frozen() -> nn.Module:
    model = bert()
    for parameter in model.bert.parameters():
        parameter.requires_grad = False
    return model


def dropout() -> nn.Module:
    model = bert(0.5)
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return model


def head() -> nn.Module:
    model = bert()
    transformers.set_seed(5)
    model.classifier = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    return model


def activation() -> nn.Module:
    model = bert()
    model.bert.pooler.activation = nn.ReLU()
    return model


def patched() -> nn.Module:
    model = bert()
    before = model.bert.pooler.forward
    model.bert.pooler.forward = lambda hidden: before(hidden) * 2 + hidden.mean(1)
    return model


def patched_method() -> nn.Module:
    model = bert()

    def forward(self: Any, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias).sin()

    model.classifier.forward = types.MethodType(forward, model.classifier)
    return model


def removed() -> nn.Module:
    model = bert()
    del model.bert.encoder.layer[1]
    model.bert.encoder.layer.append(nn.Sequential())  # a module in its place that does nothing
    model.bert.encoder.layer[1].forward = lambda hidden, *_, **__: hidden
    return model


def by_loss(model: nn.Module) -> Tensor:
    names = ("input_ids", "labels") if isinstance(model, Own) else tuple(BATCH)
    return model(**{name: BATCH[name] for name in names})["loss"]


MODELS = {
    "a module of the script": own, "frozen": frozen, "dropout": dropout, "head": head, "activation": activation,
    "patched": patched, "a patched method": patched_method, "removed": removed,
}  # fmt: skip


@pytest.mark.parametrize(("name", "schedule"), crossed(list(MODELS), ["1f1b", "zb-h1"]))
def test_an_instance_trains_as_it_is(name: str, schedule: str, tmp_path: Path) -> None:
    make = MODELS[name]
    mine = pipelined(make(), ROWS, tmp_path / "run", 8, split=schedule == "zb-h1")
    assert_alike(mine, plain(make(), by_loss), 1e-9)
    assert_alike(mine, hugging_face(make(), ROWS, tmp_path / "hf", 8), 1e-7)


def test_what_transformers_notes_of_a_first_forward_is_no_state() -> None:
    model = bert()
    before = state_of(model)
    model(input_ids=BATCH["input_ids"], output_hidden_states=True)
    check_state(before, model)
    model.bert.pooler.calls = 1
    with pytest.raises(SpecError, match="calls"):
        check_state(before, model)


WEIGHT = torch.tensor([1.0, 5.0, 10.0], dtype=torch.float64)


def weighted(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
    labels = inputs.pop("labels")
    outputs = model(**inputs)
    loss = F.cross_entropy(outputs.logits, labels, weight=WEIGHT.to(outputs.logits.dtype))
    return (loss, outputs) if return_outputs else loss


class Weighted(raypipe.PipelineTrainer):
    compute_loss = weighted


class Doubled(raypipe.PipelineTrainer):
    """Calls the Trainer's own, and reads an attribute of the trainer."""

    factor = 2.0

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return self.factor * super().compute_loss(model, inputs)


def summed(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return F.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch


def smoothed(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return F.cross_entropy(outputs.logits, labels, label_smoothing=0.1, weight=WEIGHT)


def of_logits(function: Any) -> Any:
    def loss(model: nn.Module) -> Tensor:
        inputs = {name: value for name, value in BATCH.items() if name != "labels"}
        return function(model(**inputs), BATCH["labels"])

    return loss


@pytest.mark.parametrize("split", [False, True], ids=["1f1b", "zb-h1"])
def test_compute_loss_of_a_subclass_trains(split: bool, tmp_path: Path) -> None:
    """A weighted mean, which is no mean over micro-batches: the Trainer's batch of a device is the micro-batch."""
    mine = pipelined(bert(), ROWS, tmp_path / "run", 8, trainer=Weighted, split=split)
    right = plain(bert(), of_logits(lambda o, labels: F.cross_entropy(o.logits, labels, weight=WEIGHT)))
    assert_alike(mine, right, 1e-9)
    theirs = type("Theirs", (transformers.Trainer,), {"compute_loss": weighted})
    assert_alike(mine, hugging_face(bert(), ROWS, tmp_path / "hf", 8, trainer=theirs), 1e-7)


def test_compute_loss_may_call_the_trainers_own(tmp_path: Path) -> None:
    mine = pipelined(bert(), ROWS, tmp_path / "run", 4, 2, trainer=Doubled)
    assert_alike(mine, plain(bert(), lambda model: 2 * by_loss(model)), 1e-9)


@pytest.mark.parametrize("split", [False, True], ids=["1f1b", "zb-h1"])
def test_compute_loss_func_trains(split: bool, tmp_path: Path) -> None:
    """A sum divided by the labels of the mini-batch, for two micro-batches, and a mean for one."""
    mine = pipelined(bert(), ROWS, tmp_path / "a", 4, 2, compute_loss_func=summed, split=split)
    assert_alike(mine, plain(bert(), of_logits(lambda o, labels: summed(o, labels, 8))), 1e-9)
    one = pipelined(bert(), ROWS, tmp_path / "b", 8, compute_loss_func=smoothed, split=split)
    assert_alike(one, plain(bert(), of_logits(smoothed)), 1e-9)
    if not split:
        theirs = hugging_face(bert(), ROWS, tmp_path / "c", 4, 2, compute_loss_func=summed)
        theirs.losses = mine.losses  # it logs a share of them
        assert_alike(mine, theirs, 1e-7)
        assert_alike(one, hugging_face(bert(), ROWS, tmp_path / "d", 8, compute_loss_func=smoothed), 1e-7)


@pytest.mark.parametrize("stages", [1, 2])
def test_noise_on_embeddings_is_neftunes(stages: int, tmp_path: Path) -> None:
    """Against a plain loop in which a hook adds the same draws; mini-batch 8, L = 10, d = 16."""
    noisy = types.SimpleNamespace(step=-1)

    def hook(part: nn.Module, _: Any, output: Tensor) -> Tensor:
        noisy.step += 1
        with with_keys(RandomKeys(SEED, noisy.step, range(8), True)):
            draws = keyed_uniform(output.shape, 0)
        return output + (2 * draws - 1) * 5.0 / (10 * 16) ** 0.5

    model = bert()
    mine = pipelined(model, ROWS, tmp_path, 4, 2, stages=stages, fields={"neftune_noise_alpha": 5.0})
    assert not model.get_input_embeddings()._forward_hooks
    model.train().get_input_embeddings().register_forward_hook(hook)
    other = plain(model, lambda m: m(**mine.rows).loss)
    assert_alike(mine, other, 1e-9)


def test_noise_is_refused_for_rows_of_unequal_length_and_named_models(tmp_path: Path) -> None:
    rows = [{**ROWS[0]}, {name: value[:4] if isinstance(value, list) else value for name, value in ROWS[1].items()}]
    with pytest.raises(SpecError, match="rows differ in length"):
        pipelined(bert(), rows, tmp_path / "a", 1, fields={"neftune_noise_alpha": 5.0})
    with pytest.raises(SpecError, match="give a model of transformers as an instance"):
        pipelined(own(), ROWS, tmp_path / "b", 4, fields={"neftune_noise_alpha": 5.0})


def test_an_instance_that_its_configuration_makes_is_constructed_by_the_workers(tmp_path: Path) -> None:
    said: list[str] = []
    for model in (bert(), bert(0.5), bert().eval()):
        assert model_section(model, tmp_path, None, said.append) == {"hf": str(tmp_path / "model")}
    model.save_pretrained(tmp_path / "saved")
    read = type(model).from_pretrained(tmp_path / "saved")
    assert model_section(read, tmp_path, None, said.append) == {"hf": str(tmp_path / "model")}
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    llama = transformers.LlamaForCausalLM(config)
    assert model_section(llama, tmp_path, None, said.append) == {"hf": str(tmp_path / "model")}
    assert said == []
    llama.model.rotary_emb.inv_freq[0] = 2.0
    assert model_section(llama, tmp_path, None, said.append) == {"given": str(tmp_path / "model"), "loss": "task"}
    assert "buffer inv_freq has other values" in said[0]


def test_the_instance_is_as_before_and_modes_are_kept(tmp_path: Path) -> None:
    model = dropout()
    model.bert.encoder.layer[0].attention.self.dropout.p = 0.5
    model.bert.encoder.layer[0].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    mine = pipelined(model, ROWS, tmp_path / "run", 8)
    assert not model.bert.encoder.layer[0].training
    assert model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert_alike(mine, plain(model, by_loss), 1e-9)


def test_bfloat16_is_trained_as_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The products are bfloat16's; weights are updated in float32, and the loss of the logits is float32."""
    mine = pipelined(bert().to(torch.bfloat16), ROWS, tmp_path / "run", 8)
    assert capsys.readouterr().err.count("trains in bfloat16") == 1
    model = bert().to(torch.bfloat16)
    precise = [p.detach().float() for p in model.parameters()]
    losses = []
    for _ in range(3):
        logits = model(**{name: value for name, value in BATCH.items() if name != "labels"}).logits
        loss = F.cross_entropy(logits.float(), BATCH["labels"])
        losses.append(loss.item())
        with torch.no_grad():
            for one, p, gradient in zip(
                precise, model.parameters(), torch.autograd.grad(loss, model.parameters()), strict=True
            ):
                p.copy_(one.sub_(0.05 * gradient.float()))
    assert mine.losses[0] == pytest.approx(losses[0], abs=1e-7)
    assert mine.losses == pytest.approx(losses, abs=2e-3)  # micro-batches add their gradients up in another order
    assert {p.dtype for p in mine.parameters.values()} == {torch.bfloat16}


def hooked(model: Any) -> Any:
    model.bert.pooler.register_forward_hook(lambda module, given, made: made * 2)
    return model


def counting(model: Any) -> Any:
    calls: list[int] = []
    before = model.classifier.forward

    def forward(x: Tensor) -> Tensor:
        calls.append(1)
        return before(x)

    model.classifier.forward = forward
    return model


def branching(model: Any) -> Any:
    before = model.classifier.forward
    model.classifier.forward = lambda x: before(x) if x.sum() > 0 else before(-x)
    return model


def of_another_tensor(model: Any) -> Any:
    weight = nn.Parameter(torch.ones(3, 16, dtype=torch.float64))
    model.classifier.forward = lambda x: F.linear(x, weight)
    return model


def mixed(model: Any) -> Any:
    model.classifier.to(torch.bfloat16)
    return model


def drawing(model: Any) -> Any:
    before = model.classifier.forward
    model.classifier.forward = lambda x: before(x) * random.random()
    return model


class Remembers(Own):
    calls = 0

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        self.calls += 1
        return super().forward(input_ids, labels)


CALLS: list[int] = []


class Notes(Own):
    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        CALLS.append(1)
        return super().forward(input_ids, labels)


class ByStep(raypipe.PipelineTrainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        return model(**inputs).loss * self.state.global_step


class Keeps(raypipe.PipelineTrainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        self.last = model(**inputs).loss
        return self.last


def uneven(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return outputs.logits.sum() / (num_items_in_batch + 1)


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a hook": (hooked, {}, r"model\.bert\.pooler: has a forward hook"),
    "a closure over a list": (counting, {}, r"model\.classifier\.forward: reads calls, a list of the script"),
    "a branch on values": (branching, {}, r"depends on the values of a tensor"),
    "a tensor that is no parameter": (of_another_tensor, {}, "reads weight, a tensor that trains and is no parameter"),
    "numbers of Python's generator": (drawing, {}, "draws numbers from Python's or numpy's generator"),
    "two dtypes": (mixed, {}, "of several dtypes: .* is float64, classifier.weight is bfloat16"),
    "state of a module": (lambda _: Remembers().double(), {}, r"model\.calls: changes in every forward"),
    "a variable of the script": (lambda _: Notes().double(), {}, r"Notes.forward, which reads CALLS: changes"),
    "a loss by the step": (lambda model: model, {"trainer": ByStep}, r"ByStep.compute_loss: reads self\.state"),
    "a loss that is kept": (lambda model: model, {"trainer": Keeps}, r"Keeps.compute_loss: assigns to self\.last"),
    "another use of the count": (
        lambda model: model, {"compute_loss_func": uneven}, "uses num_items_in_batch for more than a division",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_carried_is_refused_by_name(name: str, tmp_path: Path) -> None:
    change, more, words = REFUSED[name]
    with pytest.raises(SpecError, match=words) as caught:
        pipelined(change(bert()), ROWS, tmp_path / "run", 8, **more)
    assert caught.value.fix


def test_numbers_that_another_thread_draws_are_not_the_forwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws, state = [np.random.random] * 5, np.random.get_state

    def drawing_beside() -> Any:  # what the thread of a server's client may do while a model is traced
        if draws:
            draws.pop()()
        return state()

    monkeypatch.setattr(np.random, "get_state", drawing_beside)
    mine = pipelined(head(), ROWS, tmp_path / "run", 8)
    assert not draws
    assert_alike(mine, plain(head(), by_loss), 1e-9)


class Tied(nn.Module):
    """A batch norm, a layer that is called twice, and a tied matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.e = nn.Embedding(50, 16)
        self.norm = nn.BatchNorm1d(16)
        self.mix = nn.Linear(16, 16)
        self.out = nn.Linear(16, 50, bias=False)
        self.out.weight = self.e.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.mix(torch.tanh(self.mix(self.norm(self.e(input_ids).mean(1)))))
        logits = self.out(x)
        return F.cross_entropy(logits, labels), logits


def test_tied_parameters_and_batch_norms_of_a_module_of_the_script(tmp_path: Path) -> None:
    def loss(model: nn.Module) -> Tensor:
        return model(BATCH["input_ids"], BATCH["labels"])[0]

    mine = pipelined(Tied().double(), ROWS, tmp_path / "run", 8)
    assert set(mine.parameters) == {"e.weight", "norm.weight", "norm.bias", "mix.weight", "mix.bias"}
    assert_alike(mine, plain(Tied().double(), loss), 1e-9)


def test_a_method_that_is_replaced_in_a_librarys_class_is_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pooler = type(bert().bert.pooler)
    monkeypatch.setattr(pooler, "forward", lambda self, hidden: self.dense(hidden[:, 0]).sin())
    said: list[str] = []
    assert "given" in model_section(bert(), tmp_path / "a", None, said.append)
    assert "forward has been replaced in its class" in said[0]
    assert_alike(pipelined(bert(), ROWS, tmp_path / "run", 8), plain(bert(), by_loss), 1e-9)


def test_a_resumed_run_has_the_instance_that_it_began_with(tmp_path: Path) -> None:
    from raypipe.data import declared_fields
    from raypipe.models.given.write import write_given

    with degrees(pp=2):
        made = raypipe.PipelineTrainer(model=own(), args=arguments(tmp_path / "run", 8, 1), train_dataset=ROWS)
        job = made.prepare().job
    fields = declared_fields(job.data)
    assert fields is not None
    write_given(own(), job.model, fields, torch.float64, None, resume=True)
    other = own()
    other.h = nn.Sequential(nn.Tanh(), other.h)
    with pytest.raises(SpecError, match="another one than the run began with"):
        write_given(other, job.model, fields, torch.float64, None, resume=True)

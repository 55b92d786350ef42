"""A partitioned model is the whole one: loss and every gradient, float64, 1e-9, against the eager model unmodified."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypipe.errors import RunError, SpecError
from raypipe.job import JobSpec
from raypipe.job.spec import job_from
from raypipe.models import LayeredModel, build_model
from raypipe.models.task import IGNORED, Field, NextToken
from tests.capture.models import FAMILIES, Residual
from tests.exhaustive import ONLY
from tests.runtime.runs.eager_reference import assert_step_of, keyed
from tests.runtime.runs.one_device import even_cut, run_step
from tests.runtime.runs.small_runs import job_for

transformers = pytest.importorskip("transformers")

BATCH, SEQUENCE, MICROBATCH = 6, 12, 2
SEED, STEP = 3, 5
LENGTHS = [5, 7, 9, SEQUENCE, 2, 3]
DRAW = torch.Generator().manual_seed(0)


def tokens(extra: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Rows of unequal length, padded on the right: so labels of a micro-batch are unequally many."""
    ids = torch.randint(3, 96, (BATCH, SEQUENCE), generator=DRAW)
    lengths = torch.tensor(LENGTHS).unsqueeze(1)
    places = torch.arange(SEQUENCE).expand(BATCH, -1)
    mask = (places < lengths).long()
    rows = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORED)}
    if "position_ids" in extra:
        rows["position_ids"] = (places + torch.arange(BATCH).unsqueeze(1)) % SEQUENCE
    if "token_type_ids" in extra:
        rows["token_type_ids"] = (places > lengths // 2).long()
    return rows


def images(classes: int = 2) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(BATCH, 3, 16, 16, generator=DRAW, dtype=torch.float64),
        "labels": torch.randint(classes, (BATCH,), generator=DRAW),
    }


class GroupNormNet(nn.Module):
    """A residual net whose norms have no running statistics."""

    def __init__(self, classes: int = 10, batch_norm: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(Residual(8, 8, 1), Residual(8, 16, 2), Residual(16, 16, 1))
        if not batch_norm:
            for block in self.blocks:
                for name, part in list(block.named_children()):
                    if isinstance(part, nn.BatchNorm2d):
                        setattr(block, name, nn.GroupNorm(4, part.num_features))
        self.drop = nn.Dropout(0.2)
        self.classify = nn.Linear(16, classes)

    def forward(self, image: Tensor) -> Tensor:
        return self.classify(self.drop(self.blocks(self.stem(image)).mean((2, 3))))


def mlp(inside: int, outside: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inside, 32), nn.ReLU(inplace=True), nn.Dropout(0.1), nn.Linear(32, 32), nn.GELU(),
        nn.Linear(32, 32, bias=False), nn.LayerNorm(32), nn.Linear(32, outside),
    )  # fmt: skip


def half_frozen(inside: int) -> nn.Module:
    """As in fine-tuning: what comes first stays as it is, and one matrix in between."""
    made = mlp(inside, 3)
    for part in (made[0], made[5]):
        part.requires_grad_(False)
    return made


HERE = "tests.runtime.runs.test_any_model"
IMAGES = images(10)
CASES: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
    **{
        name: ({"hf": name, "config": FAMILIES[name]}, tokens(("position_ids",)))
        for name in ("gpt2", "llama", "qwen3", "mistral", "gemma")
    },
    "opt": ({"hf": "opt", "config": FAMILIES["opt"]}, tokens()),
    "bert": ({"hf": "bert", "config": FAMILIES["bert"]}, tokens(("position_ids", "token_type_ids"))),
    "roberta": ({"hf": "roberta", "config": FAMILIES["roberta"]}, tokens()),
    "t5": ({"hf": "t5", "config": FAMILIES["t5"]}, tokens()),
    "vit": ({"hf": "vit", "config": {**FAMILIES["vit"], "hidden_dropout_prob": 0.1}}, images()),
    "cnn": ({"import": f"{HERE}:GroupNormNet", "args": {"classes": 10}},
            {"image": IMAGES["pixel_values"], "labels": IMAGES["labels"]}),
    "frozen batch norm": ({"import": f"{HERE}:GroupNormNet", "args": {"batch_norm": True}, "batch_norm": "frozen"},
                          {"image": IMAGES["pixel_values"], "labels": IMAGES["labels"]}),
    "mlp": ({"import": f"{HERE}:mlp", "args": {"inside": 5, "outside": 3}},
            {"features": torch.randn(BATCH, 5, generator=DRAW), "labels": torch.tensor([0, 1, 2, 0, 1, 2])}),
    "regression": ({"import": f"{HERE}:mlp", "args": {"inside": 5, "outside": 1}},
                   {"features": torch.randn(BATCH, 5, generator=DRAW), "labels": torch.randn(BATCH, generator=DRAW)}),
}  # fmt: skip
CASES["half frozen"] = ({"import": f"{HERE}:half_frozen", "args": {"inside": 5}}, CASES["mlp"][1])
DROPS = {"gpt2", "opt", "bert", "roberta", "t5", "vit", "cnn", "frozen batch norm", "mlp", "regression", "half frozen"}
"""Models that drop values in training; the others have no dropout of their own."""


def job_of(model: dict[str, Any]) -> JobSpec:
    return job_for(model, "unused.npz", {}, steps=1, batch=BATCH)


def fields_of(rows: dict[str, Tensor]) -> dict[str, Field]:
    return {name: Field(tuple(values.shape[1:]), values.dtype) for name, values in rows.items()}


_models: dict[str, LayeredModel] = {}


def model_of(case: str) -> LayeredModel:
    if case not in _models:
        spec, rows = CASES[case]
        _models[case] = build_model(job_of(spec), fields_of(rows))
    return _models[case]


def whole_loss(model: LayeredModel, module: nn.Module, rows: dict[str, Tensor]) -> Tensor:
    """The loss of the whole eager model, as the model or PyTorch means it."""
    assert module.training
    rows = {name: t.double() if t.is_floating_point() else t for name, t in rows.items()}
    with keyed(SEED, STEP, BATCH):
        if isinstance(model.task, NextToken):  # the library would take this loss in float32
            logits = module(**{name: t for name, t in rows.items() if name != "labels"}).logits
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), rows["labels"][:, 1:].flatten())
        if isinstance(module, transformers.PreTrainedModel):
            return module(**rows).loss
        output, labels = module(rows["image" if "image" in rows else "features"]), rows["labels"]
        return F.mse_loss(output.squeeze(-1), labels) if labels.is_floating_point() else F.cross_entropy(output, labels)


ALIKE = {"qwen3", "mistral", "gemma", "opt", "roberta"}
"""Families that another one here is like."""
WAYS = [
    pytest.param(case, split, marks=ONLY if case in ALIKE or split != (n % 2 == 0) else ())
    for n, case in enumerate(c for c in CASES) for split in (False, True)
]  # fmt: skip
"""Every other case is of an ordinary, and every other of a split backward."""


@pytest.mark.slow
@pytest.mark.parametrize(("case", "split"), WAYS)
def test_loss_and_gradients_are_the_whole_models(case: str, split: bool) -> None:
    """With split backward, micro-batches of tokens are as long as their longest row, which differs between them."""
    stages = 4 if split else 2
    model, rows = model_of(case), CASES[case][1]
    rows = model.task.complete(rows)
    own = {name: np.array(LENGTHS) for name in rows} if split and "attention_mask" in rows else None
    cut = even_cut(model, min(stages, model.count))
    outcome = run_step(model, cut, rows, torch.float64, MICROBATCH, split=split, seed=SEED, step=STEP, lengths=own)
    module = assert_step_of(outcome, model, lambda whole: whole_loss(model, whole, CASES[case][1]))
    assert bool(model.sites) == (case in DROPS)
    assert sum(p.grad is not None for p in module.parameters()) >= len(outcome.gradients) / 2


@pytest.mark.slow
def test_pipedream_refuses_a_parameter_on_two_stages() -> None:
    from raypipe.train import make_plan

    text = {"type": "bytes", "path": "stdlib"}
    train = {"steps": 1, "batch": 4, "dtype": "float64"}

    def job(tied: bool) -> JobSpec:
        config = {**FAMILIES["gpt2"], "vocab_size": 256, "tie_word_embeddings": tied}
        model = {"hf": "gpt2", "config": config, "sequence": 16}
        parallel = {"schedule": "pipedream", "stages": 2}
        return job_from({"name": "any", "model": model, "data": text, "train": train, "parallel": parallel})

    with pytest.raises(SpecError, match=r"copies of transformer\.wte\.weight would differ"):
        make_plan(job(tied=True))
    assert len(make_plan(job(tied=False)).cut) == 2


class Branching(nn.Module):
    """Its code looks at the length, as some attention implementations do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(96, 8), nn.Linear(8, 96)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(x.tanh() if tokens.shape[1] > 8 else x)


@pytest.mark.slow
def test_a_branch_on_the_length_is_not_taken_for_short_samples() -> None:
    rows = {name: t for name, t in tokens().items() if name != "attention_mask"}
    spec = {"import": f"{HERE}:Branching", "task": "causal-lm"}
    model = build_model(job_of(spec), fields_of(rows))
    cut, long = even_cut(model, 1), {name: np.array([9] * BATCH) for name in rows}
    run_step(model, cut, rows, torch.float64, MICROBATCH, lengths=long)
    with pytest.raises(RunError, match=r"length 8, but below 9 .*(?s:.*)pad_to_multiple_of: 9"):
        run_step(model, cut, rows, torch.float64, MICROBATCH, lengths={n: own - 1 for n, own in long.items()})


WRONG = {
    "no such type": ({"hf": "gpt3"}, "model.hf", "did you mean"),
    "no such key": ({"hf": "gpt2", "config": {"n_layr": 2}}, "model.config.n_layr", 'did you mean "n_layer"'),
    "too few tokens": ({"hf": "gpt2", "config": {"vocab_size": 100}}, "model.config.vocab_size", "use 256"),
    "no room for a mask": ({"hf": "bert", "config": {"vocab_size": 256}}, "model.config.vocab_size", "use 257"),
    "too few positions": ({"hf": "gpt2", "config": {"n_positions": 8}}, "model.sequence", "positions for 8"),
    "another task": ({"hf": "t5", "task": "causal-lm"}, "model.task", "can't be trained for causal-lm"),
    "no such module": ({"import": "no.such:build"}, "model.import", "can't be imported"),
    "no such function": ({"import": f"{HERE}:mpl"}, "model.import", 'did you mean "mlp"'),
    "no module": ({"import": "builtins:dict"}, "model.import", "is a class, but not a torch.nn.Module"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_built_is_one_error(case: str) -> None:
    model, where, words = WRONG[case]
    train = {"steps": 1, "batch": 4}
    job = job_from({"name": "any", "model": {"sequence": 16, **model}, "data": {"path": "stdlib"}, "train": train})
    with pytest.raises(SpecError, match=re.escape(words)) as caught:
        build_model(job, None)
    assert caught.value.where == where
    assert caught.value.fix


def test_a_missing_array_is_named() -> None:
    rows = {"pixels": CASES["vit"][1]["pixel_values"], "labels": CASES["vit"][1]["labels"]}
    with pytest.raises(SpecError, match="none of pixels is an argument"):
        build_model(job_of(CASES["vit"][0]), fields_of(rows))
    with pytest.raises(SpecError, match="holds no labels"):
        build_model(job_of(CASES["vit"][0]), {"pixel_values": fields_of(CASES["vit"][1])["pixel_values"]})

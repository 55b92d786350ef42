"""A profile that is damaged, edited or of another job is refused, and the message names where; never a traceback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raypipe.cli import run
from raypipe.cost.profile import Profile
from raypipe.cost.profile_check import check_profile, doubts
from raypipe.errors import SpecError
from raypipe.job.spec import JobSpec, job_from

MODEL = {"type": "gpt", "layers": 2, "hidden": 32, "heads": 2, "sequence": 32}
Edit = Callable[[dict[str, Any]], object]


def job(**model: Any) -> JobSpec:
    train = {"steps": 2, "batch": 8, "optimizer": model.pop("optimizer", "adamw")}
    data = {"type": "bytes", "path": "stdlib"}
    return job_from({"name": "j", "model": {**MODEL, **model}, "data": data, "train": train, "parallel": "auto"})


def written() -> dict[str, Any]:
    times = {kind: 1e-3 for kind in ("forward", "input_grad", "weight_grad", "joint", "recompute")}
    layer = {"parameters": 1000, "kept_bytes": 1000.0, "output_bytes": 100.0}
    link = {"alpha_s": 1e-5, "beta_s_per_byte": 1e-9}
    named = [{"name": f"l{i}", "times": {"1": dict(times), "4": dict(times)}, **layer} for i in range(4)]
    taken = {"model": job().model.model_dump(mode="json"), "optimizer": "adamw"}
    return {
        "source": "measured", "device": "cpu", "dtype": "float32", "taken_for": taken, "devices": 2,
        "devices_per_host": 2, "memory_bytes": 1e9, "layers": named, "update_s_per_parameter": 1e-9,
        "inside": dict(link), "between": dict(link),
    }  # fmt: skip


def first(kind: str, value: object) -> Edit:
    return lambda p: p["layers"][0]["times"]["1"].update({kind: value})


def renamed(where: Callable[[dict[str, Any]], dict[str, Any]], old: str, new: str) -> Edit:
    return lambda p: where(p).update({new: where(p).pop(old)})


EDITS: list[tuple[Edit, str]] = [
    (first("forward", -1.0), "layers.0.times.1.forward: is -1.0"),
    (first("forward", float("nan")), "layers.0.times.1.forward: is nan"),
    (first("joint", None), "layers.0.times.1.joint: is empty"),
    (first("joint", 1e308), "layers.0.times.1.joint: is 1e+308"),
    (renamed(lambda p: p, "devices", "devicess"), 'did you mean "devices"?'),
    (renamed(lambda p: p["layers"][1], "kept_bytes", "kept_byte"), 'did you mean "kept_bytes"?'),
    (renamed(lambda p: p["layers"][0]["times"], "1", "0"), 'layers.0.times: has the key "0"'),
    (renamed(lambda p: p["layers"][0]["times"], "1", "one"), 'layers.0.times: has the key "one"'),
    (lambda p: p.pop("inside"), "inside: missing"),
    (lambda p: p.update(layers=[]), "layers: is empty"),
    (lambda p: p["inside"].update(beta_s_per_byte=-1.0), "inside.beta_s_per_byte: is -1.0"),
    (lambda p: [t["times"]["1"].update(joint=0.0) for t in p["layers"]], "no layer's joint takes any time"),
    (lambda p: [t["times"]["4"].update(forward=0) for t in p["layers"]], "no layer's forward takes any time"),
    (lambda p: p.update(tied_parameters=10**6), "tied_parameters"),
    (lambda p: p["layers"].pop(), "has 3 layers, the job's model 4"),
    (lambda p: p.update(dtype="bfloat16"), "was taken for bfloat16"),
    (lambda p: p["taken_for"].update(optimizer="sgd"), "train.optimizer: sgd, the job has adamw"),
    (lambda p: p["taken_for"].update(compiled=True), "train.compile: inductor, the job has none"),
    (lambda p: p["taken_for"]["model"].update(hidden=64), "model.hidden: 64, the job has 32"),
]


def planned(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What planning with the file says; it must refuse, properly."""
    spec = path.parent / "job.yaml"
    spec.write_text(json.dumps(job().model_dump(mode="json", exclude={"parallel"}) | {"parallel": "auto"}))
    assert run(["autoconfigure", str(spec), "--profile", str(path), "--search", "0", "--json"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    message, fix = said.err.rstrip("\n").split("\n")
    assert fix.startswith("  fix: ")
    return message + fix


@pytest.mark.parametrize(("edit", "words"), EDITS, ids=[words for _, words in EDITS])
def test_an_edited_profile_is_one_message(edit, words, tmp_path: Path, capsys) -> None:
    profile = written()
    edit(profile)
    (tmp_path / "p.json").write_text(json.dumps(profile))
    assert words in planned(tmp_path / "p.json", capsys)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("{", "cut short"),
        ("[]", "holds a list"),
        ("hello", "is not valid JSON"),
        ("null", "holds empty"),
    ],
)
def test_what_is_no_profile_is_one_message(text: str, words: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "p.json").write_text(text)
    said = planned(tmp_path / "p.json", capsys)
    assert words in said
    assert "raypipe profile JOB.yaml -o PROFILE.json" in said


@pytest.mark.parametrize(
    "other", [{"hidden": 64}, {"sequence": 64}, {"vocabulary": 300}, {"tie_embeddings": False}, {"optimizer": "sgd"}]
)
def test_a_profile_of_another_model_of_as_many_layers_is_refused(other: dict[str, Any]) -> None:
    profile = Profile.model_validate_json(json.dumps(written()))
    check_profile(job(), profile)
    with pytest.raises(SpecError, match=rf"was taken for .*{next(iter(other))}"):
        check_profile(job(**other), profile)


def test_what_a_profile_takes_for_granted_is_said() -> None:
    whole = written()
    assert doubts(job(), Profile.model_validate_json(json.dumps(whole))) == []
    assert "16 devices" in doubts(job(), Profile.model_validate_json(json.dumps(whole)), 16)[0]
    for layer in whole["layers"]:
        del layer["times"]["1"]
    assert "micro-batches of 4 only" in doubts(job(), Profile.model_validate_json(json.dumps(whole)))[0]
    del whole["taken_for"]
    assert any("of which model" in said for said in doubts(job(), Profile.model_validate_json(json.dumps(whole))))

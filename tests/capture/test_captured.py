"""The cache gives back what was captured, notices damage, and knows when something has changed."""

from __future__ import annotations

import json
import os
import stat

import pytest
import torch
from torch import nn

from raypipe.capture.captured import DOCUMENTS, CapturedDocument, cache_folder, captured_once, load_kept
from raypipe.graph.fingerprint import fingerprint, module_code, structure, transformers_code
from raypipe.graph.subgraphs import shard
from tests.capture.chain import build_chain, run_chain
from tests.capture.models import CASES


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", "resnet", "llama"])
def test_what_is_read_back_is_what_was_captured(name, captured, tmp_path):
    one = captured(name)
    made = captured_once("key", lambda: one, tmp_path)
    again = captured_once("key", lambda: pytest.fail("captured twice"), tmp_path)
    assert made is one
    assert again.graph == one.graph
    assert shard(again.graph) == shard(one.graph)
    torch.manual_seed(0)
    whole, data = CASES[name].build(), CASES[name].data(3, 12)
    cut = shard(again.graph)
    spans = [cut.operations(range(i, i + 1)) for i in range(cut.count)]
    got = run_chain(again, build_chain(again, spans, dict(whole.named_parameters())), data)
    torch.testing.assert_close(got["loss"], whole(**data)["loss"], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "key.json").write_text("{"),
        lambda folder: (folder / "key.json").write_bytes(b"\xff\xfe\x00"),
        lambda folder: (folder / "key.json").write_text(
            (folder / "key.json").read_text().replace('"op":', '"op":9', 1)
        ),
        lambda folder: (folder / "key.json").write_text("[]"),
        lambda folder: (folder / "key.safetensors").write_bytes(b"short"),
        lambda folder: (folder / "key.safetensors").unlink(),
    ],
)
def test_damage_is_noticed_and_repaired(damage, captured, tmp_path):
    one = captured("llama")
    captured_once("key", lambda: one, tmp_path)
    damage(tmp_path)
    said: list[str] = []
    assert captured_once("key", lambda: one, tmp_path, said.append) is one
    assert len(said) == 1
    assert said[0].startswith(f"ignored {tmp_path / 'key'}")
    assert captured_once("key", lambda: pytest.fail("captured again"), tmp_path).graph == one.graph


def test_a_document_that_means_nothing_is_refused(captured):
    document = DOCUMENTS.dump_python(CapturedDocument(captured("mlp").graph, ""), mode="json")
    graph = document["graph"]
    for change in (
        {"form": 0}, {"graph": {**graph, "outputs": {"output": 99}}}, {"graph": {**graph, "sources": {}}}, {"graph": {}}
    ):  # fmt: skip
        with pytest.raises(ValueError):  # noqa: PT011 - of pydantic, or of the graph
            DOCUMENTS.validate_json(json.dumps({**document, **change})).graph.check()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_no_error(captured, tmp_path):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    said: list[str] = []
    assert captured_once("key", lambda: captured("mlp"), tmp_path / "cache", said.append) is captured("mlp")
    assert "not kept" in said[0]


def test_nothing_is_left_where_the_file_cannot_be_made(captured, tmp_path):
    (tmp_path / "file").write_text("")
    said: list[str] = []
    captured_once("key", lambda: captured("mlp"), tmp_path / "file", said.append)
    assert len(said) == 2  # it can neither be looked up nor kept
    assert load_kept("key", tmp_path) is None


def test_the_key_follows_code_configuration_and_versions(tmp_path, monkeypatch):
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "__init__.py").write_text("")
    (tmp_path / "net" / "model.py").write_text("import torch\nfrom . import parts\n\ndef build(): ...\n")
    (tmp_path / "net" / "parts.py").write_text("WIDTH = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    code = module_code("net.model")
    assert {path.name for path in code} == {"model.py", "parts.py", "__init__.py"}
    first = fingerprint({"layers": 2}, code)
    assert first == fingerprint({"layers": 2}, reversed(code))
    assert first != fingerprint({"layers": 3}, code)
    assert first != fingerprint({"layers": 2}, code, ["torch", "numpy"])
    (tmp_path / "net" / "parts.py").write_text("WIDTH = 2\n")
    assert first != fingerprint({"layers": 2}, code)
    assert any(path.name == "modeling_gpt2.py" for path in transformers_code("gpt2"))


def test_packages_installed_in_another_environment_are_not_the_users_code(tmp_path, monkeypatch):
    elsewhere = tmp_path / "lib" / "site-packages"
    (elsewhere / "big").mkdir(parents=True)
    (elsewhere / "big" / "__init__.py").write_text("")
    (tmp_path / "mine.py").write_text("import big\n")
    monkeypatch.syspath_prepend(elsewhere)
    monkeypatch.syspath_prepend(tmp_path)
    assert [path.name for path in module_code("mine")] == ["mine.py"]


def test_where_it_is_kept(monkeypatch, tmp_path):
    monkeypatch.delenv("RAYPIPE_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "raypipe" / "captured"
    monkeypatch.setenv("RAYPIPE_CACHE_DIR", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine" / "captured"


def test_the_structure_tells_models_of_the_same_code_apart():
    def said(module):
        return structure(module)

    assert said(nn.Linear(3, 4)) == said(nn.Linear(3, 4))
    assert said(nn.Linear(3, 4)) != said(nn.Linear(3, 5))
    assert said(nn.Dropout(0.1)) != said(nn.Dropout(0.2))
    assert said(nn.Dropout(0.1)) != said(nn.Dropout(0.1).eval())
    assert said(nn.BatchNorm1d(2)) == said(nn.BatchNorm1d(2))
    other = nn.BatchNorm1d(2)
    other.running_mean += 1
    assert said(other) != said(nn.BatchNorm1d(2))

"""What a job names as its model: whatever it is instead, one error says so, and nothing ends the process."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypipe.errors import SpecError
from raypipe.job import HfSpec, ImportSpec
from raypipe.models.sources.hugging_face import HuggingFace
from raypipe.models.sources.imported import Imported

CODE = """
import functools, sys
from torch import nn
NET = nn.Linear(2, 2)
def leaves(): sys.exit(3)
def fails(): raise ValueError("no such width")
def text(): return "a net"
def needs(width): return nn.Linear(width, width)
def good(width=2): return nn.Linear(width, width)
class Plain: pass
class Net(nn.Module): pass
partly = functools.partial(needs, 2)
"""


@pytest.fixture
def user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_models.py").write_text(CODE)
    (tmp_path / "own_exit.py").write_text("raise SystemExit(3)")
    (tmp_path / "own_fault.py").write_text("x = 1 / 0")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        ("sys:exit", {}, "sys:exit is a built-in function of Python"),
        ("os:abort", {}, "a built-in function of Python"),
        ("subprocess:run", {"args": ["true"]}, "of Python's standard library"),
        ("collections:OrderedDict", {}, "a class, but not a torch.nn.Module"),
        ("own_models:NET", {}, "already a module"),
        ("own_models:Plain", {}, "a class, but not a torch.nn.Module"),
        ("own_models:needs", {}, "missing a required argument: 'width'"),
        ("own_models:good", {"depth": 2}, "unexpected keyword argument 'depth'"),
        ("own_models:leaves", {}, "own_models:leaves failed: SystemExit: 3, in .*own_models.py:5"),
        ("own_models:fails", {}, "own_models:fails failed: ValueError: no such width, in .*own_models.py:6"),
        ("own_models:text", {}, "returned str"),
        ("own_exit:build", {}, "own_exit can't be imported: SystemExit: 3"),
        (
            "own_fault:build",
            {},
            "own_fault can't be imported: ZeroDivisionError: division by zero, in .*own_fault.py:1",
        ),
    ],
)
def test_what_builds_no_model(user_code, name: str, args: dict, words: str) -> None:
    with pytest.raises(SpecError, match=words) as caught:
        Imported(ImportSpec.model_validate({"import": name, "args": args})).build()
    assert caught.value.where in ("model.import", "model.args")
    assert caught.value.fix


@pytest.mark.parametrize("name", ["own_models:good", "own_models:partly", "own_models:Net", "torch.nn:Identity"])
def test_what_builds_one(user_code, name: str) -> None:
    Imported(ImportSpec.model_validate({"import": name})).build()


def test_a_directory_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="holds no model that transformers reads: it has no config"):
        HuggingFace(HfSpec(hf=str(tmp_path)))
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(SpecError, match=f"is a run of raypipe.*\n.*raypipe export {tmp_path} -o DIR"):
        HuggingFace(HfSpec(hf=str(tmp_path)))
    for content in ("", "{", "[]", "{}", '{"model_type": 3}', '{"model_type": "none"}', "[" * 100_000):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(SpecError, match=r"model\.hf"):
            HuggingFace(HfSpec(hf=str(tmp_path)))

"""Private names of transformers: each is there; without them models are made by their class, or an error names one."""

from __future__ import annotations

import importlib

import pytest

from raypipe.compat import PrivateName
from raypipe.compat.transformers_private import CHECKED, NAMES, attention_of, check_sampler, construct
from raypipe.errors import SpecError


@pytest.mark.parametrize("one", NAMES, ids=lambda one: one.name)
def test_the_installed_transformers_has_it(one: PrivateName) -> None:
    transformers = pytest.importorskip("transformers")
    owner = getattr(transformers, one.where, None) or importlib.import_module(f"transformers.{one.where}")
    assert hasattr(owner, one.name), f"{transformers.__version__}, not {CHECKED}"


def test_without_them() -> None:
    class Model:
        def __init__(self, config: object) -> None:
            self.config = config

    assert construct(Model, "config").config == "config"
    assert attention_of(object()) is None
    with pytest.raises(SpecError, match="_get_train_sampler"):
        check_sampler(Model)

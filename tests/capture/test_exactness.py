"""Sub-graphs run in a row give the whole model's outputs and gradients, for every family, at other sizes too."""

import pytest
import torch

from raypipe.graph.subgraphs import shard
from tests.capture.chain import build_chain, parameters, run_chain
from tests.capture.models import ALIKE, CASES
from tests.exhaustive import exhaustive


@pytest.mark.slow
@pytest.mark.parametrize("name", [*(name for name in CASES if name not in ALIKE), *exhaustive(*ALIKE)])
def test_the_parts_are_the_whole(name, captured):
    one, case = captured(name), CASES[name]
    cut = shard(one.graph)
    assert list(cut.labels) == case.subgraphs
    torch.manual_seed(0)
    whole = case.build()
    spans = [cut.operations(range(i, i + 1)) for i in range(cut.count)]
    chain = build_chain(one, spans, dict(whole.named_parameters()))
    for batch, size in ((2, 16), (5, 13)):
        data = case.data(batch, size)
        wanted, got = whole(**data), run_chain(one, chain, data)
        wanted = {"output": wanted} if isinstance(wanted, torch.Tensor) else wanted
        assert set(got) == set(wanted)
        for key, value in got.items():
            torch.testing.assert_close(value, wanted[key], rtol=0, atol=1e-12)
        mark = "loss" if "loss" in got else "output"
        for model, value in ((whole, wanted[mark]), (chain, got[mark])):
            result = dict(model.named_parameters()) if model is whole else parameters(chain)
            for p in result.values():
                p.grad = None
            value.pow(2).sum().backward()
        for key, p in whole.named_parameters():
            torch.testing.assert_close(parameters(chain)[key].grad, p.grad, rtol=0, atol=1e-12, msg=key)
    for key, buffer in whole.named_buffers():  # running statistics have moved alike
        for part in chain:
            mine = dict(part.module.named_buffers()).get(key)
            if mine is not None:
                torch.testing.assert_close(mine, buffer, rtol=0, atol=1e-12, msg=key)

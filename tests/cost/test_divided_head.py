"""Costs of a head whose rows devices divide: against formulas of a smaller head, and against every byte allocated."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from raypipe.cost.analytic import analytic_profile
from raypipe.cost.divided_head import divided_cut, divided_head
from raypipe.cost.gpt_work import RAYPIPE, gpt_work
from raypipe.cost.kernels import Kernels
from raypipe.cost.memory import device_memory
from raypipe.cost.stages import stage_costs
from raypipe.errors import SpecError
from raypipe.job import GptSpec
from raypipe.job.cluster import load_cluster
from raypipe.models import DTYPES, GptLayers
from raypipe.models.divided_head import DividedHead
from raypipe.schedule.families.vocabulary import graph_of
from raypipe.schedule.forms.text import from_text
from raypipe.schedule.verify import verify
from tests.cost.test_memory_of_a_step import MACHINE, executor, measured
from tests.exhaustive import exhaustive

SPEC = GptSpec(layers=2, hidden=128, heads=4, sequence=128, vocabulary=8000, tie_embeddings=False)
IN_FLIGHT = "device 0: " + " ".join(
    f"0F{m} 1F{m} 2F{m} 3F{m} 0F{m + 1} 1F{m + 1} 2F{m + 1} 3F{m + 1} 4F{m} 4B{m} 2B{m} 3B{m} 1BW{m} 0BW{m} "
    f"4F{m + 1} 4B{m + 1} 2B{m + 1} 3B{m + 1} 1BW{m + 1} 0BW{m + 1} 2W{m} 3W{m} 2W{m + 1} 3W{m + 1}"
    for m in (0, 2)
)
"""All stages on one device, two micro-batches in flight and their weight gradients late."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "chunk"), [("float32", None), *exhaustive(("float32", 32), ("bfloat16", None), ("float64", None))]
)
def test_every_byte_is_accounted_for(dtype: str, chunk: int | None) -> None:
    text = f"schedule 1f1b\nfrozen 4\nedges {' '.join(f'{a}>{b}' for a, b in graph_of(2).edges)}\n{IN_FLIGHT}"
    schedule = from_text(text)
    verify(schedule)
    cut = divided_cut([range(2), range(2, 4)], 2)
    whole = GptLayers(SPEC, DTYPES[dtype])
    model = DividedHead(whole if chunk is None else whole.in_chunks(chunk), 2)
    profile = divided_head(analytic_profile(SPEC, MACHINE, dtype, [2], loss_chunk=chunk), 2)
    (predicted,) = device_memory(profile, cut, schedule, 2)
    made = partial(executor, model, schedule, cut, 2, dtype)
    assert predicted.total == pytest.approx(measured(made, schedule), rel=0.04), predicted.terms()


@pytest.mark.parametrize("hidden", [2048, 4096])
def test_a_share_takes_what_its_own_formulas_say(hidden: int) -> None:
    """From the times of a whole head; against those of a head of as many rows that is computed in chunks."""
    cluster = load_cluster(Path("cluster/devices/a100.yaml"))
    spec = GptSpec(layers=2, hidden=hidden, heads=16, sequence=4096, vocabulary=128256, tie_embeddings=False)
    kernels = Kernels.of(cluster.device, "bfloat16-true", RAYPIPE)
    share = spec.model_copy(update={"vocabulary": 128256 // 8})
    work = gpt_work(share, "bfloat16-true", loss_chunk=4096)[-1]
    profile = divided_head(analytic_profile(spec, cluster, "bfloat16-true", [1]), 8)
    made = profile.layers[-2].times[1]
    assert made.forward == pytest.approx(kernels.seconds(work.forward, 1), rel=0.05)
    assert made.weight_grad == pytest.approx(kernels.seconds(work.weight_grad, 1, backward=True), rel=0.05)
    assert made.input_grad == 0
    assert kernels.seconds(work.input_grad, 1, backward=True) < 0.03 * made.forward


def test_messages_go_along_the_edges() -> None:
    """To all shares one after the other; of the loss, two numbers a token."""
    cluster = load_cluster(Path("cluster/devices/a100.yaml"))
    spec = GptSpec(layers=3, hidden=256, heads=2, sequence=512, vocabulary=8000, tie_embeddings=False)
    whole = analytic_profile(spec, cluster, "bfloat16-true", [1])
    cut = divided_cut([range(2), range(2, 3), range(3, 5)], 3)
    costs = stage_costs(divided_head(whole, 3), cut, 1, [[0, 1, 2, 0, 1, 2, 2]], split=True)
    hop, numbers = (whole.inside.seconds(size) for size in (2 * 512 * 256, 2 * 4 * 512))
    assert costs.latency(0, 1) == costs.latency(1, 2) == pytest.approx(hop)
    assert costs.latency(2, 3) == costs.latency(2, 4) == pytest.approx(2 * hop)
    assert costs.latency(3, 6) == pytest.approx(numbers)
    assert sum(costs.forward[:3]) < sum(stage_costs(whole, [range(5)], 1, [[0]], split=True).forward)


def test_it_is_refused_where_no_head_is_known_or_it_is_tied() -> None:
    whole = analytic_profile(SPEC, MACHINE, "float32", [1])
    for profile, why in (
        (whole.model_copy(update={"head": None}), "is not known"),
        (whole.model_copy(update={"tied_parameters": 8}), "is tied"),
        (whole.model_copy(update={"head": whole.head.model_copy(update={"rows": 2})}), "2 rows for 4 devices"),
    ):
        with pytest.raises(SpecError, match=why):
            divided_head(profile, 4)

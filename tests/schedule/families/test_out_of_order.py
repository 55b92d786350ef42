"""OOO backprop's pipelines: the paper's example, and the sixteen layers that PAPERS checked."""

import pytest

from raypipe.schedule import Shape, generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.verify import verify
from raypipe.simulate.engine import simulate
from raypipe.simulate.lower_bound import lower_bound


def spent(name: str, devices: int, chunks: int, count: int, comm: float = 0) -> float:
    costs = CostTable.even(devices * chunks, comm=comm)
    schedule = generate(name, Shape(devices=devices, microbatches=count, chunks=chunks), costs)
    verify(schedule)
    result = simulate(schedule, costs).makespan
    assert lower_bound(schedule, costs) <= result
    return result


def test_eight_layers_on_two_devices() -> None:
    assert [spent(name, 2, 4, 1) for name in ("model-parallel", "fast-forward", "modulo")] == [23, 19, 16]


def test_sixteen_layers_on_four_devices() -> None:
    """Against GPipe's 83: the paper's 1.22x is 83/68 and its 1.62x is 83/51."""
    assert [spent(name, 4, 4, 4) for name in ("fast-forward", "modulo")] == [68, 51]


@pytest.mark.parametrize(("devices", "chunks", "count"), [(1, 3, 2), (2, 1, 3), (3, 2, 4)])
def test_model_parallelism_overlaps_nothing(devices: int, chunks: int, count: int) -> None:
    stages = devices * chunks
    assert spent("model-parallel", devices, chunks, count) == count * (3 * stages - 1)
    assert spent("model-parallel", devices, chunks, count, comm=2) == count * (3 * stages - 1 + 4 * (devices - 1))


@pytest.mark.parametrize("layers", [2, 4, 6, 12])
def test_modulo_leaves_only_the_chain_of_gradients(layers: int) -> None:
    """One micro-batch, two devices: all forwards and input gradients in a row, then one last W."""
    assert spent("modulo", 2, layers // 2, 1) == layers + (layers - 1) + 1


@pytest.mark.parametrize("name", ["model-parallel", "fast-forward", "modulo"])
def test_they_state_their_rules(name: str) -> None:
    schedule = generate(name, Shape(devices=2, microbatches=2, chunks=2))
    assert schedule.rules.w_dep == "grad"
    assert schedule.rules.skip_first_b
    assert not any(t.kind == "B" and t.stage == 0 for t in schedule.tasks())

"""The pass that divides positions over tensor ranks: what becomes of operations that it knows, and of others."""

from __future__ import annotations

import pytest

from raypipe.errors import SpecError
from raypipe.graph.operations import Operation, OperationGraph, Source, TensorType
from raypipe.graph.sequence_parallel import divide_sequence
from raypipe.job.parallel_spec import check_positions

STREAM = TensorType(("b", "s", 8), "float32")


def graph_of(*between: Operation) -> OperationGraph:
    """An embedding of two ranks, operations between divided layers, and the next of these."""
    sources = {
        "ids": Source("input", TensorType(("b", "s"), "int64")),
        "mask": Source("input", TensorType(("b", "s"), "int64")),
        "table": Source("parameter", TensorType((4, 8), "float32"), True),
        "scale": Source("parameter", TensorType((8,), "float32"), True),
    }
    operations = (
        Operation("rows", "aten.embedding.default", ({"of": "table"}, {"of": "ids"}), type=STREAM),
        Operation("sum", "raypipe.reduce_from_group.default", ({"op": 0},), type=STREAM),
        *between,
        Operation("enter", "raypipe.copy_to_group.default", ({"op": 1 + len(between)},), type=STREAM),
    )
    return OperationGraph(operations, sources, {"output": len(operations) - 1}, example={"b": 2, "s": 6})


def targets(graph: OperationGraph) -> list[str]:
    return [operation.target.split(".")[1] for operation in graph.operations]


def test_operations_by_position_are_divided_and_their_parameters_gradients_summed() -> None:
    """A share of positions goes through a scale, of which the other rank's positions have gradients too."""
    made = divide_sequence(graph_of(Operation("y", "aten.mul.Tensor", ({"op": 1}, {"of": "scale"}), type=STREAM)), 2)
    assert targets(made) == ["embedding", "scatter_sequence", "copy_to_group", "mul", "gather_sequence"]
    scattered, scaled, gathered = (made.operations[n] for n in (1, 3, 4))
    assert scattered.args == ({"op": 0}, 1, 2, True)
    assert gathered.args == ({"op": 3}, 1, 2, True)
    assert scaled.args == ({"op": 1}, {"op": 2})
    sizes = made.sizes({"ids": (2, 6), "mask": (2, 6)})
    assert [made.operations[n].type.bytes(sizes) // 4 for n in (0, 1, 3, 4)] == [96, 48, 48, 96]
    assert made.outputs == {"output": 4}


@pytest.mark.parametrize(
    "between",
    [
        Operation("y", "aten.cumsum.default", ({"op": 1}, 1), type=STREAM),
        Operation("y", "aten.softmax.int", ({"op": 1}, 1), type=STREAM),
        Operation("y", "aten.flip.default", ({"op": 1}, [1]), type=STREAM),
        Operation("y", "aten.mul.Tensor", ({"op": 1}, {"of": "mask"}), type=STREAM),
    ],
    ids=lambda operation: operation.target,
)
def test_what_is_not_known_to_be_by_position_gets_all_positions(between: Operation) -> None:
    """Its result is whole on all ranks, which then compute alike: what follows enters divided layers as without it."""
    made = divide_sequence(graph_of(between), 2)
    name = between.target.split(".")[1]
    assert targets(made) == ["embedding", "scatter_sequence", "gather_sequence", name, "copy_to_group"]
    assert made.operations[2].args == ({"op": 1}, 1, 2, False)


def test_operators_between_underscores_write_nothing() -> None:
    """Of raw inputs alone, or of what each rank has a share of."""
    kind = TensorType(("b", "s"), "int64")
    both = Operation("both", "aten.__and__.Tensor", ({"of": "ids"}, {"of": "mask"}), type=kind)
    own = Operation("own", "aten.__and__.Scalar", ({"op": 1}, 1), type=STREAM)
    made = divide_sequence(graph_of(both, own), 2)
    wanted = ["embedding", "scatter_sequence", "__and__", "__and__", "gather_sequence"]
    assert targets(made) == wanted
    assert made.operations[3].args[0] == {"op": 1}


def test_writes_in_place_and_other_inputs_are_refused() -> None:
    with pytest.raises(SpecError, match=r"add_\.Tensor writes what other operations read"):
        divide_sequence(graph_of(Operation("y", "aten.add_.Tensor", ({"op": 1}, 1.0), type=STREAM)), 2)
    images = graph_of()
    images.sources["mask"] = Source("input", TensorType(("b", 3, 16, 16), "float32"))  # type: ignore[index]
    with pytest.raises(SpecError, match=r"sequence_parallel: the model's inputs: they are not all \[samples, sequence"):
        divide_sequence(images, 2)


def test_lengths_that_do_not_divide_are_refused_with_the_nearest() -> None:
    check_positions([8, 12], 4)
    with pytest.raises(SpecError, match=r"10 positions do not divide over tensor = 4\n.* sequences of 8 or 12"):
        check_positions([8, 10], 4)

"""Graph sharding on graphs made by hand and at random: what stays together, what is passed along."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.errors import RequestError
from raypipe.graph.liveness import crossing, last_uses, needed_replicated, replicated
from raypipe.graph.operations import Operation, OperationGraph, Source, TensorType
from raypipe.graph.subgraphs import common_operations, shard

FLOAT = TensorType(("s0", 4), "float32")
WHOLE = TensorType(("s0", 4), "int64")


def graph(rows, **weights):
    """A graph from (name, operands, module) rows; a lower-case text operand is a parameter of ``weights`` values."""
    numbers = {name: i for i, (name, *_) in enumerate(rows)}
    sources = {
        "x": Source("input", FLOAT),
        "ids": Source("input", WHOLE),
        **{name: Source("parameter", TensorType((size,), "float32"), True) for name, size in weights.items()},
    }
    operations = tuple(
        Operation(name, f"aten.{'linear' if set(operands) & set(weights) else 'add'}.default",
                  tuple({"op": numbers[o]} if o in numbers else {"of": o} for o in operands), type=FLOAT, module=module)
        for name, operands, module in rows
    )  # fmt: skip
    classes = {module: "Block" for _, _, module in rows if module}
    return OperationGraph(operations, sources, {rows[-1][0]: len(rows) - 1}, classes=classes, example={"s0": 2})


def names(whole, cut):
    return [[whole.operations[i].name for i in cut.operations(range(s, s + 1))] for s in range(cut.count)]


def test_the_addition_that_ends_a_branch_keeps_it_together():
    """x -> a -> b -> +x: nothing inside can be cut, for two tensors would cross."""
    whole = graph([
        ("start", ["x", "w"], ""),
        ("a", ["start", "u"], "h.0"), ("b", ["a", "v"], "h.0"), ("sum", ["b", "start"], "h.0"),
        ("c", ["sum", "p"], "h.1"), ("d", ["c", "q"], "h.1"), ("sum2", ["d", "sum"], "h.1"),
        ("end", ["sum2", "z"], ""),
    ], w=9, u=9, v=9, p=9, q=9, z=9)  # fmt: skip
    cut = shard(whole)
    assert names(whole, cut) == [["start"], ["a", "b", "sum"], ["c", "d", "sum2"], ["end"]]
    assert [[whole.operations[i].name for i in cross] for cross in cut.cuts] == [["start"], ["sum"], ["sum2"]]
    assert cut.blocks == ("", "h.0", "h.1", "")


def test_without_branches_every_parameter_is_a_place_to_cut():
    rows = [(f"f{i}", [f"f{i - 1}" if i else "x", f"w{i}"], "") for i in range(6)]
    whole = graph(rows, **{f"w{i}": 5 for i in range(6)})
    assert names(whole, shard(whole)) == [[f"f{i}"] for i in range(6)]
    assert shard(whole, parts=2).count == 2  # closed once it holds more than half, which is at the fourth
    assert names(whole, shard(whole, parts=2))[0] == ["f0", "f1", "f2", "f3"]


def test_a_light_block_among_heavy_ones_is_a_sub_graph_of_its_own():
    """A share of the average block is more than each of the light ones holds."""
    rows = [("start", ["x", "w"], "")]
    for i, weight in enumerate(["light", "light", "heavy", "heavy"]):
        before = rows[-1][0]
        rows += [(f"a{i}", [before, weight], f"h.{i}"), (f"sum{i}", [f"a{i}", before], f"h.{i}")]
    whole = graph([*rows, ("end", ["sum3", "z"], "")], w=9, light=1, heavy=100, z=9)
    blocks = [[f"a{i}", f"sum{i}"] for i in range(4)]
    assert names(whole, shard(whole)) == [["start"], *blocks, ["end"]]


def test_what_two_blocks_use_is_passed_along():
    """A bias that both blocks add would otherwise tie them into one."""
    rows = [
        ("bias", ["x", "w"], ""),
        ("start", ["x", "u"], ""),
        ("a", ["start", "p"], "h.0"), ("a2", ["a", "bias", "start"], "h.0"),
        ("b", ["a2", "q"], "h.1"), ("b2", ["b", "bias", "a2"], "h.1"),
    ]  # fmt: skip
    whole = graph(rows, w=2, u=9, p=9, q=9)
    cut = shard(whole)
    assert common_operations(whole) == {0}
    assert names(whole, cut) == [["bias"], ["start"], ["a", "a2"], ["b", "b2"]]
    assert [len(cross) for cross in cut.cuts] == [1, 2, 2]


def test_what_follows_from_raw_inputs_is_computed_anew():
    whole = graph([
        ("mask", ["ids"], ""), ("start", ["x", "w"], ""), ("a", ["start", "u"], "h.0"), ("a2", ["a", "mask"], "h.0"),
        ("b", ["a2", "v"], "h.1"), ("b2", ["b", "mask"], "h.1"),
    ], w=9, u=9, v=9)  # fmt: skip
    cut = shard(whole)
    assert replicated(whole) == (True, False, False, False, False, False)
    assert [len(cross) for cross in cut.cuts] == [1, 1]
    assert needed_replicated(whole, [5]) == [0]


def test_a_long_skip_in_one_block_keeps_all_of_it_together_but_one_between_blocks_does_not():
    def skip(module):
        return graph([
            ("a", ["x", "w0"], module(0)), ("b", ["a", "w1"], module(1)), ("c", ["b", "w2"], module(2)),
            ("d", ["c", "w3"], module(3)), ("e", ["d", "a"], module(3)),
        ], w0=9, w1=9, w2=9, w3=9)  # fmt: skip

    inside = skip(lambda i: "h.0")
    assert names(inside, shard(inside)) == [["a"], ["b", "c", "d", "e"]]
    between = skip(lambda i: f"h.{i}")
    cut = shard(between)
    assert names(between, cut) == [["a"], ["b"], ["c"], ["d", "e"]]
    assert [len(cross) for cross in cut.cuts] == [1, 2, 2]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=3), st.integers(1, 40), st.integers(0, 9))
def test_a_shallow_model_is_divided_as_the_deep_one_that_repeats_a_block(first, size, more):
    """What a share is depends on how many blocks are large: small ones may be one sub-graph, or several."""

    def model(repeated):
        sizes = [5, *first, *[size] * repeated, 7]
        inside = range(1, len(sizes) - 1)
        rows = [
            (f"f{i}", [f"f{i - 1}" if i else "x", f"w{i}"], f"h.{i}" if i in inside else "") for i in range(len(sizes))
        ]
        return graph(rows, **{f"w{i}": n for i, n in enumerate(sizes)})

    shallow, deep = shard(model(4), more=more), shard(model(4 + more))
    same = len(first) + 4  # operations up to the second block that is repeated
    assert [n for n in shallow.starts if n <= same] == [n for n in deep.starts if n <= same]


@st.composite
def graphs(draw):
    """Operations that read up to three earlier ones or raw inputs, some with parameters, in up to three blocks."""
    count = draw(st.integers(2, 24))
    blocks = draw(st.integers(0, 3))
    rows, weights = [], {}
    for i in range(count):
        read = draw(st.lists(st.integers(0, i - 1), min_size=1, max_size=3)) if i else []
        operands = [f"f{j}" for j in read] or ["x"]
        if draw(st.booleans()) or i == 0:
            weights[f"w{i}"] = draw(st.integers(1, 50))
            operands.append(f"w{i}")
        rows.append((f"f{i}", operands, f"h.{i * blocks // count}" if blocks else ""))
    return graph(rows, **weights)


@given(graphs(), st.none() | st.integers(1, 8))
def test_at_most_one_result_that_is_not_common_crosses_any_cut(whole, parts):
    cut = shard(whole, parts)
    assert [i for s in range(cut.count) for i in cut.operations(range(s, s + 1))] == list(range(len(whole.operations)))
    common, used = common_operations(whole), last_uses(whole)
    for start, cross in zip(cut.starts[1:], cut.cuts, strict=True):
        assert len(set(cross) - common) <= 1
        assert set(cross) == {i for i in range(start) if used[i] >= start and not replicated(whole)[i]}
    assert cut.cuts == crossing(whole, cut.starts[1:])
    if parts is not None:
        # All but the last, and those that end with a block, hold more than the parts-th part.
        inside = [start for start in cut.starts[1:] if whole.blocks[start] == whole.blocks[start - 1]]
        assert len(inside) <= parts


def test_nothing_to_cut():
    with pytest.raises(RequestError, match="has no parameters"):
        shard(graph([("a", ["x"], "")]))

"""Placements: the optimum by brute force, what a solution must obey, contention, and impossible requests."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from raypipe.cli import run
from raypipe.errors import SpecError
from raypipe.graph.placement.cp_model import solve
from raypipe.graph.placement.place import place, solve_by_segments
from raypipe.graph.placement.problem import HardwareGraph, Placement, PlacementGraph, Routes, check_fit, timed
from tests.exhaustive import exhaustive
from tests.graph.placement.brute_force import best_makespan
from tests.graph.placement.random_problems import random_problem

TWO = {"nodes": [{"name": "g0"}, {"name": "g1"}], "links": [["g0", "g1", {"bandwidth_gb_s": 1.0}]]}


def checked(graph: dict[str, Any], hardware: dict[str, Any]) -> tuple[PlacementGraph, HardwareGraph]:
    result = (
        PlacementGraph.model_validate_json(json.dumps(graph)),
        HardwareGraph.model_validate_json(json.dumps(hardware)),
    )
    result[0].check()
    result[1].check()
    check_fit(*result)
    return result


def assert_obeys(graph: PlacementGraph, hardware: HardwareGraph, found: Placement, contention: bool = False) -> None:
    """Every constraint of the problem, from the answer alone."""
    ends = {n: found.start_s[n] + graph.by_name[n].seconds_on(found.node[n]) for n in found.node}
    links = {frozenset((a, b)): link for a, b, link in hardware.links}
    for n, (a, b, size) in enumerate(graph.edges):
        if found.node[a] == found.node[b]:
            assert n not in found.routes
            assert found.start_s[b] >= ends[a] - 1e-9
            continue
        route = found.routes[n]
        assert (route[0].source, route[-1].target) == (found.node[a], found.node[b])
        assert all(x.target == y.source for x, y in itertools.pairwise(route))
        spent = sum(size / (hardware.links[h.link][2].bandwidth_gb_s * 1e9) for h in route)
        spent += sum(hardware.links[h.link][2].latency_us * 1e-6 for h in route)
        assert all(frozenset((h.source, h.target)) in links for h in route)
        assert found.start_s[b] >= ends[a] + spent - 1e-9
    for names in graph.together:
        assert len({found.node[name] for name in names}) == 1
    for node in hardware.nodes:
        mine = sorted((found.start_s[n], ends[n]) for n in found.node if found.node[n] == node.name)
        assert all(first[1] <= second[0] + 1e-9 for first, second in itertools.pairwise(mine))
        used = sum(graph.by_name[n].memory_bytes for n in found.node if found.node[n] == node.name)
        assert node.memory_bytes is None or used <= node.memory_bytes
    assert found.makespan_s == pytest.approx(max(ends.values()))
    assert found.bound_s <= found.makespan_s


@pytest.mark.slow
@pytest.mark.parametrize("base", [0, 20, *exhaustive(*range(40, 220, 20))])
def test_as_short_as_the_best_of_all(base: int) -> None:
    for seed in range(base, base + 20):
        graph, hardware = random_problem(seed, operations=7)
        best = best_makespan(graph, hardware)
        if best == float("inf"):
            with pytest.raises(SpecError, match=r"memory|bytes"):
                place(*checked(graph, hardware))
            continue
        result = place(*checked(graph, hardware))
        assert_obeys(*checked(graph, hardware), result)
        assert result.makespan_s == pytest.approx(best, rel=1e-9), seed
        assert result.optimal


def blocks(seed: int, count: int, backward: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """A chain of small blocks of two branches, as deep networks are, whose backward runs where the forward did."""
    draw = random.Random(seed)
    ops: list[dict[str, Any]] = []
    edges: list[list[Any]] = []
    inner: list[tuple[str, str, str]] = []
    for block in range(count):
        gate, after = f"join{block}", f"join{block + 1}"
        inner += [(gate, f"b{block}.{branch}", after) for branch in range(2)]
    names = list(dict.fromkeys([*(f"join{b}" for b in range(count + 1)), *(name for _, name, _ in inner)]))
    for name in names:
        for kind in ("F", "B") if backward else ("F",):
            op = {"name": f"{name} {kind}", "seconds": draw.randint(1, 6)}
            ops.append({**op, "colocate": name} if backward else op)
    for gate, name, after in inner:
        size = draw.choice([0, 5e8, 1e9, 2e9])
        edges += [[f"{gate} F", f"{name} F", size], [f"{name} F", f"{after} F", size]]
        if backward:
            edges += [[f"{after} B", f"{name} B", size], [f"{name} B", f"{gate} B", size]]
    if backward:
        edges += [[f"{name} F", f"{name} B", 0] for name in names]
    hardware = {"nodes": [{"name": f"g{n}"} for n in range(draw.choice([2, 2, 3]))], "routers": ["s"], "links": []}
    alike = draw.random() < 0.5
    for node in hardware["nodes"]:
        link = {"bandwidth_gb_s": 1.0 if alike else draw.choice([0.5, 1.0, 2.0]), "latency_us": 2e5}
        hardware["links"].append([node["name"], "s", link])
    return {"operations": ops, "edges": edges}, hardware


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(6), *exhaustive(*range(6, 30))])
def test_blocks_between_gates_are_solved_one_by_one(seed: int) -> None:
    """The same optimum as by trying everything, and as the whole program's."""
    graph, machine = blocks(seed, 1 + seed % 2, backward=seed % 3 > 0 and seed % 2 == 0)
    best = best_makespan(graph, machine)
    operations, hardware = checked(graph, machine)
    joined = solve_by_segments(operations, hardware, Routes(hardware), 30.0)
    assert joined is not None
    assert joined.bound_s == pytest.approx(best, rel=1e-6)
    result = place(operations, hardware)
    assert_obeys(operations, hardware, result)
    assert result.makespan_s == pytest.approx(best, rel=1e-9)
    assert result.optimal


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, *exhaustive(*range(2, 6))])
def test_several_blocks_as_the_whole_program(seed: int) -> None:
    operations, hardware = checked(*blocks(seed, 2, backward=True))
    routes = Routes(hardware)
    joined = solve_by_segments(operations, hardware, routes, 30.0)
    assert joined is not None
    whole = solve(operations, hardware, routes, sum(op.seconds_on("g0") for op in operations.operations), 60.0)
    assert whole.status == "optimal"
    assert joined.bound_s == pytest.approx(whole.bound_s, rel=1e-5)
    _, _, makespan_s = timed(operations, routes, joined.node, joined.order)
    assert makespan_s == pytest.approx(joined.bound_s, rel=1e-6)


def chain(*seconds: float) -> dict[str, Any]:
    names = [f"op{i}" for i in range(len(seconds))]
    return {
        "operations": [{"name": n, "seconds": s} for n, s in zip(names, seconds, strict=True)],
        "edges": [[a, b, 1e9] for a, b in itertools.pairwise(names)],
    }


def test_a_chain_stays_together() -> None:
    result = place(*checked(chain(1, 2, 3), TWO))
    assert len(set(result.node.values())) == 1
    assert (result.makespan_s, result.bound_s, result.optimal) == (6, 6, True)


def test_a_route_passes_through_nodes_and_routers() -> None:
    """A line of two nodes and a switch, and one operation that only the far end can take."""
    hardware = {
        "nodes": [{"name": "a"}, {"name": "b"}, {"name": "c"}], "routers": ["s"],
        "links": [
            ["a", "b", {"bandwidth_gb_s": 1}], ["b", "s", {"bandwidth_gb_s": 2}],
            ["s", "c", {"bandwidth_gb_s": 4, "latency_us": 5e5}],
        ],
    }  # fmt: skip
    graph = chain(1, 1)
    graph["operations"][0]["seconds"] = {"a": 1, "b": 90, "c": 90}
    graph["operations"][1]["seconds"] = {"a": 90, "b": 90, "c": 1}
    operations, machine = checked(graph, hardware)
    result = place(operations, machine)
    document = result.document(operations)
    assert document["routes"] == [{"edge": ["op0", "op1"], "route": ["a", "b", "s", "c"]}]
    assert result.makespan_s == pytest.approx(1 + 1 + 0.5 + 0.25 + 0.5 + 1)


def test_contention_makes_tensors_wait_for_each_other() -> None:
    """Two producers are bound to g0 and two consumers to g1: their tensors share a link, a second each."""
    slow = {"g0": 9.0, "g1": 0.25}
    graph = {
        "operations": [
            *({"name": f"p{i}", "seconds": {"g0": 0.25, "g1": 9.0}} for i in range(2)),
            *({"name": f"c{i}", "seconds": slow} for i in range(2)),
        ],
        "edges": [["p0", "c0", 1e9], ["p1", "c1", 1e9]],
    }
    operations, machine = checked(graph, TWO)
    assert place(operations, machine).makespan_s == pytest.approx(0.5 + 1 + 0.25)
    result = place(operations, machine, contention=True)
    assert result.makespan_s == pytest.approx(0.25 + 2 + 0.25)
    assert result.optimal


def test_contention_takes_another_route() -> None:
    """The same two tensors where a second, slower way leads through a switch."""
    hardware = {
        **TWO, "routers": ["s"],
        "links": [*TWO["links"], ["g0", "s", {"bandwidth_gb_s": 2}], ["s", "g1", {"bandwidth_gb_s": 1}]],
    }  # fmt: skip
    graph = {
        "operations": [
            *({"name": f"p{i}", "seconds": {"g0": 0.25, "g1": 9.0}} for i in range(2)),
            *({"name": f"c{i}", "seconds": {"g0": 9.0, "g1": 0.25}} for i in range(2)),
        ],
        "edges": [["p0", "c0", 1e9], ["p1", "c1", 1e9]],
    }
    result = place(*checked(graph, hardware), contention=True)
    assert result.makespan_s == pytest.approx(0.25 + 1.5 + 0.25)  # the second leaves at 0.5 by the direct link
    assert sorted(len(route) for route in result.routes.values()) == [1, 2]


@pytest.mark.parametrize("seed", [*range(12), *exhaustive(*range(12, 40))])
def test_contention_only_costs(seed: int) -> None:
    try:
        graph, hardware = checked(*random_problem(seed, operations=6))
        free = place(graph, hardware)
    except SpecError:
        return
    result = place(graph, hardware, contention=True)
    assert_obeys(graph, hardware, result)
    assert result.makespan_s >= free.makespan_s - 1e-9
    for link in range(len(hardware.links)):  # no two tensors on one link in one direction: by total occupancy
        for direction in (0, 1):
            place_of = hardware.links[link][direction]
            busy = sum(
                graph.edges[n][2] / (hardware.links[link][2].bandwidth_gb_s * 1e9)
                for n, route in result.routes.items() for hop in route if (hop.link, hop.source) == (link, place_of)
            )  # fmt: skip
            assert busy <= result.makespan_s + 1e-9


@pytest.mark.parametrize(
    ("graph", "hardware", "why"),
    [
        ({**chain(1, 1), "edges": [["op0", "op1", 1], ["op1", "op0", 1]]}, TWO, "cycle: op"),
        ({**chain(1, 1), "edges": [["op0", "op0", 1]]}, TWO, "cycle: op0 -> op0"),
        ({**chain(1, 1), "edges": [["op0", "op9", 1]]}, TWO, 'no operation "op9"'),
        ({"operations": [{"name": "a", "seconds": -1}], "edges": []}, TWO, "is -1"),
        ({"operations": [{"name": "a", "seconds": 1e308}], "edges": []}, TWO, "is 1e+308"),
        ({**chain(1, 1), "edges": [["op0", "op1", 1e300]]}, TWO, "is 1e+300"),
        (chain(1), {**TWO, "links": [["g0", "g1", {"bandwidth_gb_s": 1e-300}]]}, "is 1e-300"),
        ({"operations": [{"name": "a", "seconds": 1}] * 2, "edges": []}, TWO, "given twice"),
        ({"operations": [{"name": "a", "seconds": {"g0": 1}}], "edges": []}, TWO, "no time on node g1"),
        ({"operations": [{"name": "a", "seconds": {"g0": 1, "g7": 1}}], "edges": []}, TWO, 'no node "g7"'),
        ({"operations": [], "edges": []}, TWO, ""),
        (chain(1), {**TWO, "links": []}, "g1 cannot be reached"),
        (chain(1), {**TWO, "links": [["g0", "g9", {"bandwidth_gb_s": 1}]]}, 'no node or router "g9"'),
        (chain(1), {**TWO, "links": [["g0", "g1", {"bandwidth_gb_s": 0}]]}, "is 0"),
        (
            {"operations": [{"name": "a", "seconds": 1, "memory_bytes": 9}], "edges": []},
            {"nodes": [{"name": "g0", "memory_bytes": 8}], "links": []}, "needs 9 bytes, the largest node has 8",
        ),
        (
            {"operations": [{"name": n, "seconds": 1, "memory_bytes": 3} for n in "abc"], "edges": []},
            {**TWO, "nodes": [{"name": "g0", "memory_bytes": 4}, {"name": "g1", "memory_bytes": 4}]},
            "need 9 bytes, all nodes together have 8",
        ),
        (
            {"operations": [{"name": n, "seconds": 1, "memory_bytes": 3} for n in "abc"], "edges": []},
            {**TWO, "nodes": [{"name": "g0", "memory_bytes": 5}, {"name": "g1", "memory_bytes": 5}]},
            "no placement keeps every node within its memory",
        ),
    ],
)  # fmt: skip
def test_what_is_impossible_is_one_error(graph, hardware, why: str, tmp_path: Path, capsys) -> None:
    paths = [tmp_path / "graph.json", tmp_path / "hardware.json"]
    for path, value in zip(paths, (graph, hardware), strict=True):
        path.write_text(json.dumps(value))
    assert run(["place", *map(str, paths), "--json"]) == 2
    said = capsys.readouterr()
    assert why in said.err
    assert "fix: " in said.err
    assert not said.out


def test_the_command(tmp_path: Path, capsys) -> None:
    graph = {
        "operations": [{"name": n, "seconds": 1.0} for n in "abcd"],
        "edges": [["a", "b", 0], ["a", "c", 0], ["b", "d", 0], ["c", "d", 0]],
    }
    (tmp_path / "graph.json").write_text(json.dumps(graph))
    (tmp_path / "hardware.json").write_text(json.dumps(TWO))
    names = [str(tmp_path / "graph.json"), str(tmp_path / "hardware.json")]
    assert run(["place", *names, "--json", "--budget", "10"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (said["makespan_s"], said["bound_s"], said["optimal"]) == (3, 3, True)
    assert said["placement"].keys() == said["start_s"].keys() == set("abcd")
    assert run(["place", *names]) == 0
    assert "makespan 3 s, optimal" in capsys.readouterr().out
    assert run(["place", *names, "--budget", "0"]) == 2
    assert run(["place", names[0], str(tmp_path / "none.json")]) == 2

"""The best makespan of a placement problem, by trying every placement and every order of work. Written from the
problem's definition, apart from the code that it checks."""

from collections.abc import Sequence
from itertools import product
from typing import Any


def fastest(hardware: dict[str, Any], a: str, b: str, size: float) -> float:
    """Least sum over the links of a route (all simple routes tried)."""
    if a == b:
        return 0.0
    best = float("inf")

    def go(place: str, seen: tuple[str, ...], spent: float) -> None:
        nonlocal best
        if place == b:
            best = min(best, spent)
            return
        for x, y, link in hardware["links"]:
            for src, dst in ((x, y), (y, x)):
                if src == place and dst not in seen:
                    hop = size / (link["bandwidth_gb_s"] * 1e9) + link.get("latency_us", 0) * 1e-6
                    go(dst, (*seen, dst), spent + hop)

    go(a, (a,), 0.0)
    return best


def best_makespan(graph: dict[str, Any], hardware: dict[str, Any]) -> float:
    """Infinite if no placement fits the memory."""
    ops = graph["operations"]
    index = {op["name"]: i for i, op in enumerate(ops)}
    edges = [(index[a], index[b], size) for a, b, size in graph["edges"]]
    nodes = hardware["nodes"]
    count = len(ops)
    into = [[(a, size) for a, b, size in edges if b == i] for i in range(count)]
    delay = {
        (n, m, size): fastest(hardware, nodes[n]["name"], nodes[m]["name"], size)
        for n in range(len(nodes)) for m in range(len(nodes)) for size in {e[2] for e in edges}
    }  # fmt: skip
    best = float("inf")

    def seconds(i: int, n: int) -> float:
        given = ops[i]["seconds"]
        return float(given[nodes[n]["name"]] if isinstance(given, dict) else given)

    for where in product(range(len(nodes)), repeat=count):
        homes = [(op["colocate"], n) for op, n in zip(ops, where, strict=True) if "colocate" in op]
        if len({n for n in homes}) > len({word for word, _ in homes}):
            continue
        loads = [sum(ops[i].get("memory_bytes", 0) for i in range(count) if where[i] == n) for n in range(len(nodes))]
        if any("memory_bytes" in node and load > node["memory_bytes"] for node, load in zip(nodes, loads, strict=True)):
            continue
        best = min(
            best, _best_order(where, [seconds(i, where[i]) for i in range(count)], into, delay, best, len(nodes))
        )
    return best


def _best_order(
    where: Sequence[int], length: Sequence[float], into: Sequence[Sequence[tuple[int, float]]],
    delay: dict[tuple[int, int, float], float], limit: float, nodes: int,
) -> float:  # fmt: skip
    count = len(where)
    busy = [sum(length[i] for i in range(count) if where[i] == n) for n in range(nodes)]
    if max(busy) >= limit:
        return limit
    best = limit

    def go(done: dict[int, float], free: list[float], end: float) -> None:
        nonlocal best
        if end >= best:
            return
        if len(done) == count:
            best = end
            return
        for i in range(count):
            if i in done or any(a not in done for a, _ in into[i]):
                continue
            n = where[i]
            ready = max((done[a] + delay[where[a], n, size] for a, size in into[i]), default=0.0)
            finish = max(free[n], ready) + length[i]
            go({**done, i: finish}, [finish if m == n else f for m, f in enumerate(free)], max(end, finish))

    go({}, [0.0] * nodes, 0.0)
    return best

"""Random placement problems as the plain data of the two files."""

import random
from typing import Any


def random_problem(seed: int, operations: int = 6) -> tuple[dict[str, Any], dict[str, Any]]:
    """Up to ``operations`` operations on up to three nodes, some with routers, memory limits or times by node."""
    draw = random.Random(seed)
    count = draw.randint(2, operations)
    nodes = [{"name": f"g{n}"} for n in range(draw.randint(1, 3))]
    names = [node["name"] for node in nodes]
    routers = ["switch"] if draw.random() < 0.4 else []
    links: list[Any] = []

    def link() -> dict[str, float]:
        return {"bandwidth_gb_s": draw.choice([0.5, 1.0, 4.0]), "latency_us": draw.choice([0, 1e5, 3e5])}

    for n, name in enumerate(names):
        if routers:
            links.append([name, "switch", link()])
        if n and (not routers or draw.random() < 0.3):
            links.append([names[draw.randrange(n)], name, link()])
    whole = draw.random() < 0.5
    ops: list[dict[str, Any]] = []
    for i in range(count):
        seconds: Any = draw.randint(1, 9) if whole else round(draw.uniform(0.1, 3), 3)
        if draw.random() < 0.2:
            seconds = {name: draw.randint(1, 9) for name in names}
        ops.append({"name": f"op{i}", "seconds": seconds})
    if draw.random() < 0.4:
        for op in ops:
            op["memory_bytes"] = draw.randint(0, 5)
        need = sum(op["memory_bytes"] for op in ops)
        for node in nodes:
            node["memory_bytes"] = max(1, round(need * draw.uniform(0.3, 1.1)))
    if draw.random() < 0.3:
        for op in draw.sample(ops, min(count, 3)):
            op["colocate"] = "layer"
    edges = [
        [f"op{i}", f"op{j}", draw.choice([0, 1e9, 2.5e9])]
        for j in range(count) for i in range(j) if draw.random() < 0.35
    ]  # fmt: skip
    return {"operations": ops, "edges": edges}, {"nodes": nodes, "routers": routers, "links": links}

"""``raypipe schedule auto``: run a search from the texts of the options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from raypipe.cli._shared.options import DAY_S, comma_list
from raypipe.errors import RequestError, check_known
from raypipe.schedule.costs import CostTable
from raypipe.schedule.shape import Shape
from raypipe.search import Found, search
from raypipe.search.placements import placed
from raypipe.search.search import search_recompute


def search_auto(
    shape: Shape, options: Mapping[str, str | None], table: Callable[[int], CostTable]
) -> tuple[Found, CostTable]:
    """Search an order with the given options.

    Args:
        shape: devices, micro-batches and memory limit; chunks and pipelines if the placement has them.
        options: texts of ``placement``, ``objective``, ``budget``, ``backward`` and ``recompute_stages``; None if not
            given.
        table: returns the costs for a number of stages.

    Raises:
        RequestError: an option is invalid or does not apply to ``auto``.
    """
    placement = placed(options.get("placement") or "line", shape)
    costs = table(len(placement[0]))
    backward = options.get("backward") or "split"
    check_known(RequestError, "--backward", backward, ("split", "joint"))
    budget = options.get("budget")
    objective: Any = options.get("objective") or "makespan"
    recompute = options.get("recompute_stages") or ("auto" if any(costs.recompute) else "none")
    find = search_recompute if recompute == "auto" else partial(search, recompute=_stages(recompute, costs.stages))
    result = find(
        placement,
        shape.microbatches,
        costs,
        memory_limit=shape.memory_limit,
        objective=objective,
        split=backward == "split",
        budget_s=None if budget is None else _seconds(budget),
    )
    return result, costs


def report(found: Found) -> dict[str, Any]:
    """Return the keys that a search adds to the JSON; ``lower_bound`` replaces the bound that ignores the memory."""
    proof: dict[str, Any] = {
        "objective": found.objective,
        "objective_value": found.value,
        "objective_bound": found.bound,
        "gap": found.gap,
        "search_seconds": found.seconds,
        "recompute_stages": _recomputing(found),
    }
    if found.objective == "makespan":
        proof["lower_bound"] = found.bound
    return proof


def sentence(found: Found) -> str:
    """Return the result of a search as text for the terminal."""
    proof = "proven shortest" if found.gap <= 1e-9 else f"at most {found.gap:.2%} above the shortest"
    said = f"auto: {found.objective} {found.value:g}, bound {found.bound:g}, {proof}; searched {found.seconds:.2f} s"
    stages = ", ".join(map(str, _recomputing(found)))
    return said + (f"\nrecomputed stages: {stages}" if stages else "")


def _recomputing(found: Found) -> list[int]:
    return sorted({task.stage for task in found.schedule.tasks() if task.kind == "R"})


def _stages(text: str, stages: int) -> frozenset[int]:
    """Parse ``none``, ``all`` or a comma-separated list of stages."""
    option = "--recompute-stages"
    if text in ("none", "all"):
        return frozenset(range(stages if text == "all" else 0))
    if not text[:1].isdigit():
        raise RequestError(option, f'"{text}" is unknown', "use auto, none, all or stages such as 0,1,2")
    chosen = comma_list(option, text, int)
    for stage in chosen:
        if not 0 <= stage < stages:
            raise RequestError(option, f"stage {stage} does not exist", f"use 0 to {stages - 1}")
    return frozenset(chosen)


def _seconds(text: str) -> float:
    values = comma_list("--budget", text, float)
    if len(values) != 1 or not 0 < values[0] <= DAY_S:
        raise RequestError("--budget", f'"{text}" is not a valid time', f"give seconds above 0, at most {DAY_S:g}")
    return values[0]

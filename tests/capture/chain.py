"""Run the sub-graphs of a captured model one after another, as stages would, on given weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from raypipe.capture.captured import Captured
from raypipe.capture.stage_module import Subgraph, build_subgraph
from raypipe.graph.liveness import crossing


def build_chain(
    captured: Captured, spans: Sequence[range], weights: Mapping[str, Tensor],
    whole: Callable[[], nn.Module] | None = None,
) -> list[Subgraph]:  # fmt: skip
    """The modules of these spans; a parameter that several of them read is one parameter."""
    shared: dict[str, nn.Parameter] = {}
    around = [crossing(captured.graph, [span.start, span.stop]) for span in spans]
    chain = [build_subgraph(captured, span, *ends, whole=whole) for span, ends in zip(spans, around, strict=True)]
    for part in chain:
        for name, _ in list(part.module.named_parameters()):
            parent, _, leaf = name.rpartition(".")
            one = shared.setdefault(name, nn.Parameter(weights[name].detach().clone()))
            part.module.get_submodule(parent)._parameters[leaf] = one
    return chain


def parameters(chain: Sequence[Subgraph]) -> dict[str, nn.Parameter]:
    return {name: p for part in chain for name, p in part.module.named_parameters()}


def run_chain(captured: Captured, chain: Sequence[Subgraph], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model's outputs by name. Only what crosses a cut goes from one module to the next."""
    live: tuple[Tensor, ...] = ()
    for part in chain:
        assert len(live) == len(part.arrives)
        live = part.module(*live, *(inputs[name] for name in part.inputs))
    return dict(zip(captured.graph.outputs, live, strict=True))

"""Find operations whose results have sizes that follow from values, as ``x[mask]`` has.

No stage could know such a size before it computes it. The smallest module that holds these operations and all that
read their results runs as it is, so that nothing of such a size enters or leaves it.
"""

from __future__ import annotations

from itertools import takewhile

from raypipe.capture.blame import Blame, StoppedError
from raypipe.errors import CaptureError
from raypipe.graph.dims import symbols
from raypipe.graph.operations import OperationGraph

FIX = "choose with torch.where or a mask instead, or move these lines to a module of their own: it runs as it is"


def check_sizes(graph: OperationGraph) -> None:
    """Check that all sizes follow from the sizes of the inputs.

    Raises:
        StoppedError: one does not.
    """
    known = graph.example.keys()
    unknown = {
        number
        for number, operation in enumerate(graph.operations)
        if operation.type is not None and any(symbols(size) - known for size in operation.type.shape)
    }
    if not unknown:
        return
    readers = [o for o in graph.operations if not unknown.isdisjoint(o.operands)]
    paths = [o.module.split(".") for o in [*(graph.operations[n] for n in unknown), *readers]]
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    path = ".".join(parts[0] for parts in shared)
    first = graph.operations[min(unknown)]
    where = ", ".join(part for part in (f"operation {first.name}", path and f"module {path}", first.source) if part)
    raise StoppedError(Blame(path, CaptureError(where, "its result's size depends on the values of a tensor", FIX)))

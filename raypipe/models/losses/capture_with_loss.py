"""Capture a model with the loss function at its end, or with the function as it is where it looks at values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from raypipe.capture.capture import capture
from raypipe.capture.captured import Captured
from raypipe.capture.meta import build_without_memory
from raypipe.errors import CaptureError
from raypipe.graph.captured_files import Notify, to_stderr
from raypipe.models.losses.as_it_is import LOSS_AS_IT_IS
from raypipe.models.losses.function import end_with_loss
from raypipe.models.sources.source import LossFunction


def capture_with_loss(
    build: Callable[[], nn.Module], function: LossFunction, names: Sequence[str], example: Mapping[str, object],
    as_it_is: Sequence[str] = (), notify: Notify = to_stderr,
) -> Captured:  # fmt: skip
    """Capture the model that ``build`` constructs, with the function at its end.

    Args:
        build: the constructor.
        function: the loss.
        names: the batch's fields.
        example: a batch.
        as_it_is: paths of modules that run as they are.
        notify: called with a sentence about what runs as it is.

    Raises:
        CaptureError: the model cannot be captured, or neither can the function, which does not run as it is either.
    """
    skeleton = build_without_memory(lambda: end_with_loss(build(), function, names))
    try:
        return capture(skeleton, example, as_it_is=as_it_is, notify=notify)
    except CaptureError as error:
        first = error
    skeleton = build_without_memory(lambda: end_with_loss(build(), function, names, as_it_is=True))
    try:
        found = capture(skeleton, example, as_it_is=(*as_it_is, LOSS_AS_IT_IS), notify=notify)
    except CaptureError as error:
        if error.why == first.why:
            raise
        raise CaptureError(first.where, f"{first.why}; and with the loss function as it is: {error.where}: {error.why}",
                           first.fix) from error  # fmt: skip
    notify(f"the loss function runs as it is, on the last stage, for it cannot be captured: {first.where}: {first.why}")
    return found

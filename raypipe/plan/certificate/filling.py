"""A lower bound on how long devices stand idle while a pipeline fills.

Every layer's forwards run on one device, one micro-batch at a time. So at least m micro-batches have gone through the
layers 0 to s when the (m + 1)-th leaves layer s, and all of them through the longest of these, of f seconds: it leaves
no sooner than (forwards of the layers 0 to s) + m f. (Of m + 1 micro-batches that have left layer s, one was the last
to leave the longest layer, which took m + 1 times f from when the first could be there; the rest of its way was still
before it.) Whatever devices do by a moment u at which the first micro-batch has not gone through all layers is such
forwards, and the order of micro-batches may differ from layer to layer. U devices could have worked for U u seconds.
What they cannot have done of that, they are idle, or recompute.

One slow layer near the front thus costs more than the sum of the forwards before each device, which
``closed.start`` counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MOMENTS = 128
"""At which the idle time is counted; it is a bound at each of them."""


def idle_while_filling(forward: Sequence[float], microbatches: int, most: int) -> list[float]:
    """Return seconds that 1, 2, ... devices are idle, all together, before the first micro-batch has passed all layers.

    Args:
        forward: per layer, seconds of one micro-batch's forward; not empty.
        microbatches: N.
        most: devices that hold a layer, at most.
    """
    own = np.array(forward)
    moments = np.linspace(0.0, own.sum(), MOMENTS)
    done = _forwards_done(own, microbatches, moments)
    return [float((used * moments - done).max()) for used in range(1, most + 1)]


def _forwards_done(own: NDArray[np.float64], microbatches: int, moments: NDArray[np.float64]) -> NDArray[np.float64]:
    """The most seconds of forwards that all devices together can have done by each moment."""
    longest = np.maximum.accumulate(own)
    since = np.maximum(0.0, moments[:, None] - (np.cumsum(own) - own))
    # Micro-batches arrive no closer together than ``longest``, so that one at most is in the middle of a layer.
    apart = np.where(longest > 0, longest, 1.0)
    whole = np.clip(np.floor((since - own) / apart) + 1, 0, microbatches)
    part = np.where(whole < microbatches, np.clip(since - whole * longest, 0.0, own), 0.0)
    done: NDArray[np.float64] = (whole * own + part).sum(axis=1)
    return done

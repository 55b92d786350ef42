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

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

MOMENTS = 128
"""At which the idle time is counted; it is a bound at each of them."""


def idle_while_filling(forward: tuple[float, ...], microbatches: int, devices: int) -> float:
    """Return seconds that so many devices are idle, all together, before the first micro-batch has passed all layers.

    Args:
        forward: per layer, seconds of one micro-batch's forward.
        microbatches: N.
        devices: those that hold a layer, U.
    """
    moments, done = _forwards_done(forward, microbatches)
    return max(0.0, float((devices * moments - done).max()))


@lru_cache(maxsize=64)
def _forwards_done(forward: tuple[float, ...], microbatches: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Moments, and the most seconds of forwards that all devices together can have done by each of them."""
    own = np.array(forward)
    before = np.concatenate(([0.0], np.cumsum(own)))
    longest = np.maximum.accumulate(own)
    moments = np.linspace(0.0, before[-1], MOMENTS)
    since = np.maximum(0.0, moments[:, None] - before[:-1])
    # Micro-batches arrive no closer together than ``longest``, so that one at most is in the middle of a layer.
    apart = np.where(longest > 0, longest, 1.0)
    whole = np.clip(np.floor((since - own) / apart) + 1, 0, microbatches)
    part = np.where(whole < microbatches, np.clip(since - whole * longest, 0.0, own), 0.0)
    return moments, (whole * own + part).sum(axis=1)

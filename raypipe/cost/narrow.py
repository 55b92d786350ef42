"""The profile of a job whose messages are narrower than its arithmetic (``parallel.wire_dtype``)."""

from __future__ import annotations

from raypipe.cost.profile import LayerProfile, Profile
from raypipe.cost.stages import gradient_width
from raypipe.job.field_types import WIDTH, WireDtype


def with_cast_messages(profile: Profile, wire_dtype: WireDtype | None) -> Profile:
    """The profile with the bytes that are sent; what layers keep stays as it is."""
    if wire_dtype is None:
        return profile
    share = 1 - min(1.0, WIDTH[wire_dtype] / gradient_width(profile.dtype))

    def one(layer: LayerProfile) -> LayerProfile:
        floats = layer.output_bytes if layer.output_floats is None else layer.output_floats
        return layer.model_copy(update={"message_bytes": layer.output_bytes - share * floats})

    return profile.model_copy(update={"layers": tuple(map(one, profile.layers))})

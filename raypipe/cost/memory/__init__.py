"""The one memory model: what a device holds at its fullest moment. Whoever needs a term of it asks here.

``parameter``: bytes of a parameter, its gradient and its optimizer state.
``stage``: bytes of one stage, by what they are for; activations are those of one micro-batch.
``device``: a device's tasks, played in order to find its fullest moment.
``terms``: that moment term by term, and as a sentence.
"""

from raypipe.cost.memory.device import device_memory
from raypipe.cost.memory.parameter import ParameterBytes, parameter_bytes
from raypipe.cost.memory.stage import StageMemory, kept_bytes, last_workspace, shares_input, stage_memory
from raypipe.cost.memory.terms import DeviceMemory

__all__ = [
    "DeviceMemory",
    "ParameterBytes",
    "StageMemory",
    "device_memory",
    "kept_bytes",
    "last_workspace",
    "parameter_bytes",
    "shares_input",
    "stage_memory",
]

"""A device's memory at its fullest moment, term by term, and as a sentence."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields

RECOMPUTE, SMALLER, FEWER, STAGES = "recompute", "smaller micro-batches", "fewer of them in flight", "more stages"
WORDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "base": ("the process itself and what no tensor can fill take", ("devices with more memory",)),
    "libraries": ("workspaces of libraries take", ("devices with more memory",)),
    "communicators": ("buffers of communicators take", ("fewer neighbours",)),
    "compiling": ("the process that compiles beside steps takes", ("train.compile_first: true",)),
    "fragmentation": ("gaps of the allocator may take", ("devices with more memory",)),
    "headroom": ("the headroom is", ("a larger device.usable_gib in the cluster file",)),
    "weights": ("weights take", (STAGES,)),
    "gradients": ("gradients take", (STAGES,)),
    "optimizer": ("optimizer state takes", (STAGES, "a simpler optimizer")),
    "versions": ("older versions of the weights take", ("a schedule that flushes",)),
    "casts": ("16-bit copies of the weights take", (STAGES,)),
    "undo": ("copies that can undo an update made before the gradient norm take", ("update: wait",)),
    "replicas": (
        "further stage replicas with their gradients and optimizer state take",
        ("a schedule of one direction",),
    ),
    "activations": ("activations of micro-batches in flight take", (RECOMPUTE, SMALLER, FEWER)),
    "graphs": ("CUDA graphs of micro-batches in flight take", (RECOMPUTE, SMALLER, FEWER)),
    "inputs": ("raw inputs of a step take", ("a smaller mini-batch",)),
    "workspace": ("temporary memory of one backward takes", (SMALLER,)),
    "messages": ("p2p buffers take", (SMALLER, FEWER)),
    "communication": ("buffers of gradient all-reduces and reduce-scatters take", (STAGES, "sync: lazy")),
    "gathered": ("gathered weights of sharded stages take", (STAGES, "gathering them for fewer tasks at a time")),
}
"""Per term: what it is, and what would make it smaller."""
RESERVED = ("base", "libraries", "communicators", "compiling", "fragmentation", "headroom")
"""Terms that are kept from tensors, whatever the plan puts on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Bytes of one device at its fullest moment, by what they are for."""

    base: float = 0.0
    """What the process takes before the model: context and code."""
    libraries: float = 0.0
    """Workspaces of libraries."""
    communicators: float = 0.0
    """Buffers of the communicators that the device's neighbours and groups need."""
    compiling: float = 0.0
    """The context of the process that compiles for the device beside steps."""
    fragmentation: float = 0.0
    """Gaps of the allocator where the device is full."""
    headroom: float = 0.0
    """Memory that plans leave free."""
    weights: float = 0.0
    """Weights of the stages that the device holds for one direction."""
    gradients: float = 0.0
    optimizer: float = 0.0
    versions: float = 0.0
    """Snapshots of weights that forwards in flight used (PipeDream, PipeDream-2BW)."""
    casts: float = 0.0
    """Autocast's 16-bit copies of the weights: one set per weight version, whatever the number of micro-batches."""
    undo: float = 0.0
    """Copies with which an update that was made before the global gradient norm was known can be undone."""
    replicas: float = 0.0
    """Stages of further directions (Chimera, GEMS), each with gradients and optimizer state of its own."""
    activations: float = 0.0
    """What micro-batches in flight keep for their backward."""
    graphs: float = 0.0
    """Pools of CUDA graphs of tasks: for each micro-batch in flight what it keeps and temporary memory of its own."""
    inputs: float = 0.0
    """Raw inputs of a whole mini-batch, where the data are arrays; of two where a step overlaps with the next."""
    workspace: float = 0.0
    """Temporary memory of the task that runs at that moment."""
    messages: float = 0.0
    """P2P buffers: the gradient that a stage receives, the one it sends on, and messages that may not be used yet."""
    communication: float = 0.0
    """Flat vectors of gradient all-reduces in progress; full gradients of sharded stages until their RS has ended."""
    gathered: float = 0.0
    """Full weights of sharded stages, from their AG to their FREE."""

    @property
    def total(self) -> float:
        """The sum of all terms."""
        return self.reserved + self.planned

    @property
    def reserved(self) -> float:
        """Return what is kept from tensors."""
        beside = self.communicators + self.compiling
        return self.base + self.libraries + beside + self.fragmentation + self.headroom

    @property
    def planned(self) -> float:
        """Return what the plan puts on the device."""
        return (
            self.weights
            + self.gradients
            + self.optimizer
            + self.versions
            + self.casts
            + self.undo
            + self.replicas
            + self.activations
            + self.graphs
            + self.inputs
            + self.workspace
            + self.messages
            + self.communication
            + self.gathered
        )

    @property
    def in_flight(self) -> float:
        """Return what micro-batches in flight hold: activations, or what CUDA graphs of their tasks have for these."""
        return self.activations + self.graphs

    def terms(self) -> dict[str, float]:
        """Bytes by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @property
    def largest(self) -> str:
        """Name of the largest term that a plan can change."""
        return max((item for item in self.terms().items() if item[0] not in RESERVED), key=lambda item: item[1])[0]

    def sentence(self, capacity: float | None = None, without: Collection[str] = ()) -> str:
        """Say which term is the largest; if the capacity does not suffice, also by how much and what would help.

        Args:
            capacity: bytes of the device; None if only the need is to be said.
            without: ways of making a term smaller (``RECOMPUTE`` and so on) that are used up.

        >>> print(DeviceMemory(weights=2**30, activations=3 * 2**30).sentence(2 * 2**30))
        needs 4.00 GiB, 2.00 GiB more than there are: activations of micro-batches in flight take 3.00 GiB; recompute, \
smaller micro-batches or fewer of them in flight would lower that
        """
        name = "base" if capacity is not None and self.reserved >= capacity else self.largest
        what, known = WORDS[name]
        most = f"{what} {_gib(self.terms()[name])}"
        if capacity is None or self.total <= capacity:
            return f"needs {_gib(self.total)}: {most}"
        over = f"{_gib(self.total - capacity)} more than there are"
        ways = [way for way in known if way not in without]
        words = " or ".join([", ".join(ways[:-1]), *ways[-1:]] if len(ways) > 1 else ways)
        helps = f"; {words} would lower that" if words else ""
        return f"needs {_gib(self.total)}, {over}: {most}{helps}"


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"

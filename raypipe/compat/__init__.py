"""Private names of other libraries, a module per library: which, checked against what version, and what is without."""

from typing import NamedTuple


class PrivateName(NamedTuple):
    """A name that a library does not promise to keep."""

    where: str
    """Its module, or its class."""
    name: str
    use: str
    without: str
    """What happens where the installed version has it no more."""

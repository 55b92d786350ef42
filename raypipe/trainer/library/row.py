"""A row of the Trainer table: what becomes of one name of ``transformers.Trainer``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from raypipe.errors import SpecError

HONOURED, WITHOUT_EFFECT, REFUSED = "honoured", "without effect", "refused"
BY_THE_TRAINER = object()
"""In place of a default: not read here, but by code of the Trainer itself that a run uses."""


@dataclass(frozen=True, slots=True)
class LibraryRow:
    """The fate of one name."""

    name: str
    answer: str
    """``HONOURED``, ``WITHOUT_EFFECT`` or ``REFUSED``."""
    words: str
    """What it becomes; why it has no effect; or what to do instead."""
    default: Any = BY_THE_TRAINER
    """Of a field that is translated to a job: the Trainer's default."""
    old: bool = False
    """Whether newer releases of transformers do not have it."""
    only_if: Callable[[], bool] | None = None
    """Of a field that is refused in some places alone: whether this is one."""

    @property
    def refuses(self) -> bool:
        """Return whether a value of it is refused here."""
        return self.answer == REFUSED and (self.only_if is None or self.only_if())


def honoured(name: str, words: str, default: Any = BY_THE_TRAINER, old: bool = False) -> LibraryRow:
    """Return the row of a name that means here what it means there."""
    return LibraryRow(name, HONOURED, words, default, old)


def without_effect(name: str, words: str, old: bool = False) -> LibraryRow:
    """Return the row of a name that changes nothing here; ``words`` say why."""
    return LibraryRow(name, WITHOUT_EFFECT, words, old=old)


def refused(name: str, words: str, only_if: Callable[[], bool] | None = None) -> LibraryRow:
    """Return the row of a name that is an error; ``words`` say what to do instead."""
    return LibraryRow(name, REFUSED, words, only_if=only_if)


def table(*rows: LibraryRow) -> dict[str, LibraryRow]:
    """Return the rows by name."""
    return {row.name: row for row in rows}


def refuse(rows: Sequence[LibraryRow], prefix: str = "", why: str = "not supported") -> None:
    """Raise one error that names all of ``rows``, if there are any.

    Raises:
        SpecError: there are.
    """
    if not rows:
        return
    where = ", ".join(f"{prefix}{row.name}" for row in rows)
    fixes = [row.words if len(rows) == 1 else f"{row.name}: {row.words}" for row in rows]
    raise SpecError(where, f"{'are' if len(rows) > 1 else 'is'} {why}", "; ".join(fixes))

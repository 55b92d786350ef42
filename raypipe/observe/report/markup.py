"""HTML that is safe by construction: text is escaped unless it was made here."""

from __future__ import annotations

from html import escape

Child = object
"""Markup is taken as it is; None is left out; anything else is text, and escaped."""

VOID = {"br", "input", "meta"}


class Markup(str):
    """Finished HTML or SVG; every other string is text."""

    __slots__ = ()


def tag(name: str, /, *children: Child, **attributes: object) -> Markup:
    """Return an element.

    Args:
        name: the element's name; elements of ``VOID`` have no end tag.
        children: its content.
        attributes: names may end in ``_`` and use ``_`` for ``-``; those that are None are left out.

    >>> tag("p", "1 < 2", tag("br"), class_="a")
    '<p class="a">1 &lt; 2<br></p>'
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_text(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{given}>" if name in VOID else f"<{name}{given}>{joined(*children)}</{name}>")


def joined(*children: Child) -> Markup:
    """Return the children one after another."""
    return Markup("".join(c if isinstance(c, Markup) else escape(_text(c)) for c in children if c is not None))


def table(head: list[str], rows: list[list[Child]], class_: str | None = None) -> Markup:
    """Return a table that scrolls by itself on narrow screens."""
    titles = tag("tr", *(tag("th", cell) for cell in head))
    body = (tag("tr", *(tag("td", cell) for cell in row)) for row in rows)
    return tag("div", tag("table", tag("thead", titles), tag("tbody", *body), class_=class_), class_="wide")


def _text(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)

"""The elements of an HTML page."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"input", "meta"}


class Page(HTMLParser):
    """Every element of a page with the texts inside it; fails where end tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.open: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = (tag, dict(attrs), [])
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        for element in self.open:
            element[2].append(data)

    def texts(self, tag: str, **attributes: str) -> list[str]:
        return ["".join(t) for name, a, t in self.elements if name == tag and attributes.items() <= a.items()]

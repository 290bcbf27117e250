"""A report page as tests read it."""

from __future__ import annotations

from html.parser import HTMLParser

_VOID = {"meta"}


class Page(HTMLParser):
    """The texts of a page by tag and class; fails on unbalanced tags."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[tuple[str, str]] = []
        self.texts: list[tuple[str, str, str]] = []  # tag, class, text
        self.rows: list[list[str]] = []  # texts in each row of the tables
        self.attributes: list[tuple[str, str]] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag == "tr":
            self.rows.append([])
        if tag not in _VOID:
            self.open.append((tag, dict(attrs).get("class") or ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if self.open and data.strip():
            self.texts.append((*self.open[-1], data))
            if any(tag == "tr" for tag, _ in self.open):
                self.rows[-1].append(data)

    def of(self, tag: str, kind: str = "") -> list[str]:
        return [text for t, k, text in self.texts if t == tag and kind in k.split(" ")]

    def figures(self) -> dict[str, tuple[str, str]]:
        """Name → (value, detail) of each key figure."""
        found: dict[str, list[str]] = {}
        for tag, _, text in self.texts:
            if tag == "dt":
                found[text] = []
            elif tag == "dd":
                found[list(found)[-1]].append(text)
        return {name: (rest[0], "".join(rest[1:])) for name, rest in found.items()}

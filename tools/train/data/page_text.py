"""The visible text of documentation files."""

import html.parser
import re
from pathlib import Path

BLOCKS = frozenset(("p", "div", "li", "h1", "h2", "h3", "h4", "tr", "dt", "dd", "pre", "br", "table", "ul", "ol"))
HIDDEN = frozenset(("script", "style", "head", "nav"))


class PageText(html.parser.HTMLParser):
    """Collects the visible text of one HTML page; block elements end a line, white space outside <pre> is folded."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[str] = []
        self._hidden = 0
        self._preformatted = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden += tag in HIDDEN
        self._preformatted += tag == "pre"
        if tag in BLOCKS:
            self._parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in HIDDEN:
            self._hidden = max(0, self._hidden - 1)
        if tag == "pre":
            self._preformatted = max(0, self._preformatted - 1)
        if tag in BLOCKS:
            self._parts.append("\n")

    def handle_data(self, data: str) -> None:
        if self._hidden:
            return
        if not self._preformatted:
            data = re.sub(r"\s+", " ", data)
            if self._parts and self._parts[-1].endswith(("\n", " ")):
                data = data.removeprefix(" ")
        if data:
            self._parts.append(data)

    def text(self) -> str:
        """No blanks at line ends, at most one empty line in a row."""
        text = re.sub(r"[ \t]+\n", "\n", "".join(self._parts))
        return re.sub(r"\n{3,}", "\n\n", text)


def read_text(path: Path) -> str:
    """The text of a source, text or HTML file. Raises OSError."""
    text = path.read_text("utf-8", errors="ignore")
    if path.suffix in (".html", ".htm"):
        page = PageText()
        page.feed(text)
        page.close()
        text = page.text()
    return text.strip()

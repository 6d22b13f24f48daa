"""What is wrong with the built site: visible TeX, files that are not included, dead links, missing pictures, wide pages.

`python -m tests.documentation.site site` prints it, and fails where there is something to print.
"""

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.documentation.browser import BROWSER, too_wide

#: Elements whose text may be TeX: code, and what no reader sees.
NOT_PROSE = {"code", "pre", "script", "style"}
#: Addresses of other sites are not asked.
ELSEWHERE = re.compile(r"\w+:|//")
#: A command, or a raised group; docstrings, read in a terminal too, have indices like `m_{k-1}`.
TEX = re.compile(r"\S*(?:\\\S|\^\{)\S*")
#: A file that should stand here, also where a formatter took the line for code.
NOT_INCLUDED = re.compile(r"--8 ?< ?--.*")


class Page(HTMLParser):
    """A page's prose, the addresses of this site on it, and the names by which a link can reach its parts."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text, self.prose, self.links, self.anchors = "", "", list[str](), {""}
        self.inside = 0
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside += tag in NOT_PROSE
        self.links += [
            value for name, value in attrs if name in {"href", "src"} and value and not ELSEWHERE.match(value)
        ]
        self.anchors |= {value for name, value in attrs if name in {"id", "name"} and value}

    def handle_endtag(self, tag: str) -> None:
        self.inside -= tag in NOT_PROSE

    def handle_data(self, data: str) -> None:
        self.text += data
        if not self.inside:
            self.prose += data


def target(link: str, page: Path, site: Path) -> tuple[Path, str]:
    """The file, and the part of it, that a link on a page leads to."""
    parts = urlsplit(link)
    if not parts.path:
        return page, unquote(parts.fragment)
    folder = site if parts.path.startswith("/") else page.parent
    path = (folder / unquote(parts.path).lstrip("/")).resolve()
    return path / "index.html" if path.is_dir() else path, unquote(parts.fragment)


def problems(site: Path) -> Iterator[str]:
    """What is wrong with each page, as far as its text says."""
    pages = {path: Page(path) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        for tex in TEX.findall(page.prose):
            yield f"{path.relative_to(site)}: TeX is visible: {tex}"
        for line in NOT_INCLUDED.findall(page.text):
            yield f"{path.relative_to(site)}: a file is not included: {line}"
        for link in page.links:
            file, part = target(link, path, site)
            if not file.is_file() or (file in pages and part not in pages[file].anchors):
                yield f"{path.relative_to(site)}: nothing is at {link}"


def main(site: Path) -> int:
    found = list(problems(site))
    found += [f"{page}: wider than a window of {width} pixels" for page, width in too_wide(site)]
    if BROWSER is None:
        print("Widths of pages were not looked at: there is no chromium here.")
    for problem in found:
        print(problem)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(strict=True)))

"""Pages with programs as notebooks, made while the site is built: a hook of mkdocs."""

import re
from typing import Any

import jupytext
from mkdocs.structure.files import File

#: Pages of this part of the navigation can be downloaded.
SECTION = "Tasks"
#: The programs that run as cells; a block that is only shown stays a part of the text.
RUNS, SHOWN = re.compile(r'^```python exec="1".*$', re.MULTILINE), re.compile(r"^```python$", re.MULTILINE)
#: A link to another page, which a file on its own does not reach.
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!\w+:)[^)\s]*\)")


def notebook(markdown: str) -> str:
    """A page as the text of an .ipynb file, without outputs."""
    page = jupytext.reads(RUNS.sub("```python", SHOWN.sub("```python .noeval", markdown)), fmt="md")
    for cell in page.cells:
        if cell.cell_type == "markdown":
            cell.source = re.sub(r"\\[()]", "$", LINK.sub(r"\1", cell.source))
    return jupytext.writes(page, fmt="ipynb")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any, **_: object) -> str:
    """Adds the notebook to the site, and a link to it below the title."""
    if page.parent is None or page.parent.title != SECTION or 'session="' not in markdown:
        return markdown
    name = page.file.src_uri.removesuffix(".md") + ".ipynb"
    files.append(File.generated(config, name, content=notebook(markdown)))
    title, rest = markdown.split("\n", 1)
    return f'{title}\n\n[Download as a notebook]({name}){{ download="{name}" }}\n{rest}'

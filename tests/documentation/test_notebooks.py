"""Pages that can be downloaded as notebooks."""

import importlib.util
import json
from pathlib import Path

import pytest

pytest.importorskip("jupytext", reason="the extra docs is not installed")
DOCS = Path(__file__).parents[2] / "docs"
PAGE = r"""# Title

Text with \(n^2\) and [a link](other.md#part).

```python exec="1" source="above" session="s"
x = [print][0]("runs")
```

```python
not_run()
```
"""


def notebook(markdown: str) -> list[dict[str, str]]:
    """The cells of a page, by the hook of mkdocs."""
    spec = importlib.util.spec_from_file_location("notebooks", DOCS / "notebooks.py")
    assert spec is not None
    assert spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    cells = json.loads(hook.notebook(markdown))["cells"]
    return [{"type": cell["cell_type"], "text": "".join(cell["source"])} for cell in cells]


def test_programs_are_cells_and_links_are_text() -> None:
    cells = notebook(PAGE)
    code = [cell["text"] for cell in cells if cell["type"] == "code"]
    text = "\n".join(cell["text"] for cell in cells if cell["type"] == "markdown")
    assert code == ['x = [print][0]("runs")']
    assert "Text with $n^2$ and a link." in text
    assert "not_run()" in text


def test_the_tutorial_is_one_program_after_another() -> None:
    cells = notebook((DOCS / "tutorial.md").read_text())
    assert cells[0]["text"].startswith("# Train and predict")
    first, *_ = (cell["text"] for cell in cells if cell["type"] == "code")
    compile(first, "tutorial", "exec")
    assert "gpi.fit(mll" in first

"""What `make docs` finds wrong with a site that was built."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documentation.browser import BROWSER
from tests.documentation.site import main, problems

RIGHT = """
<h1 id="top">Twice: <math><msup><mi>n</mi><mn>2</mn></msup></math></h1> <code>\\d^2</code> <a href="..">home</a>
<a href="../page/#top">up</a> <a href="#top">up</a> <a href="https://elsewhere.org/none">there</a> <img src="/a.png">
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "index.html").write_text("home")
    (tmp_path / "a.png").touch()
    (tmp_path / "page").mkdir()
    return tmp_path


def found_on(html: str, site: Path) -> list[str]:
    (site / "page" / "index.html").write_text(html)
    return list(problems(site))


def test_a_page_can_be_right(site: Path) -> None:
    assert found_on(RIGHT, site) == []
    assert main(site) == 0


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (r"<td>\(x</td>", r"TeX is visible: \(x"),
        ("<p>10^{-4} rows", "TeX is visible: 10^{-4}"),
        ("<pre>--8&lt;-- &quot;a.py&quot;", 'a file is not included: --8<-- "a.py"'),
        ('<a href="#part">', "nothing is at #part"),
        ('<a href="../#part">', "nothing is at ../#part"),
        ('<a href="other/">', "nothing is at other/"),
        ('<img src="b.png">', "nothing is at b.png"),
    ],
)
def test_what_is_wrong_is_said_with_its_page(wrong: str, said: str, site: Path) -> None:
    assert found_on(RIGHT + wrong, site) == [f"page/index.html: {said}"]


@pytest.mark.skipif(BROWSER is None, reason="no chromium")
def test_a_page_wider_than_a_phone_is_found(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert found_on('<div style="width: 800px">wide</div>', site) == []
    assert main(site) == 1
    assert capsys.readouterr().out == "page/index.html: wider than a window of 360 pixels\n"


def test_make_docs_fails_where_a_code_block_fails(tmp_path: Path) -> None:
    """With --quiet, mkdocs counts no warnings, and such a site was built."""
    options = re.search(r"mkdocs build (.*)", Path("Makefile").read_text())
    assert options
    extensions = "plugins: [markdown-exec]\nmarkdown_extensions: [pymdownx.superfences]\n"
    (tmp_path / "mkdocs.yml").write_text("site_name: a\n" + extensions)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text('```python exec="1"\nraise ValueError("no example")\n```\n')
    command = [sys.executable, "-m", "mkdocs", "build", *options[1].split()]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert built.returncode
    assert "no example" in built.stdout + built.stderr

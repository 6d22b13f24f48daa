"""What `make docs` finds wrong with a site that was built."""

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

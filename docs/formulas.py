"""Formulas of the site as MathML, made while it is built: a hook of mkdocs."""

import html
import re

from math_core import LatexToMathML

#: What pymdownx.arithmatex makes of `\\(...\\)` and of `\\[...\\]`, and the TeX inside.
FORMULA = re.compile(r'(?<=class="arithmatex">)\\([(\[])(.*?)\\[)\]](?=</)', re.DOTALL)
CONVERTER = LatexToMathML()


def mathml(formula: re.Match[str]) -> str:
    """Refuses what it does not know, and mkdocs then says on which page."""
    return CONVERTER.convert_with_local_state(html.unescape(formula[2]), displaystyle=formula[1] == "[")


def on_page_content(html: str, **_: object) -> str:
    return FORMULA.sub(mathml, html)

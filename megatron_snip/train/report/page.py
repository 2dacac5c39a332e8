"""One HTML file with pictures that zoom and show values, in light and dark, for wide screens and phones.

plotly draws the pictures.  The file contains plotly's script, 4.8 MB compressed to 1.5 by gzip, and the browser unpacks
it.  The page's Content-Security-Policy forbids all requests, and all scripts except the two whose hashes it names.
Browsers since 2024 can show it.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from megatron_snip.train.pictures.figures import Figure

_TEMPLATES = Environment(
    loader=PackageLoader("megatron_snip.train.report"), autoescape=True, undefined=StrictUndefined,
    trim_blocks=True, lstrip_blocks=True,
)  # fmt: skip
_STYLE, _SCRIPT = (
    (files("megatron_snip.train.report") / f"templates/page.{kind}").read_text() for kind in ("css", "js")
)
_NUMBER = re.compile(r"[-+]?[0-9][0-9.,e+-]*( ?%)?( (±|\+-) [0-9.e+-]+)?|-")


@dataclass(frozen=True)
class Section:
    """A heading, a line of plain text, pictures, and more HTML after them."""

    heading: str
    text: str = ""
    figures: Sequence[Figure] = ()
    body: str = ""


def page(
    title: str,
    path: str,
    rows: Sequence[tuple[str, str]],
    notes: Sequence[str],
    sections: Sequence[Section],
    verdict: str = "",
) -> str:
    """The page: a verdict in words, facts, notes and sections."""
    return _TEMPLATES.get_template("page.html").render(
        title=title, path=path, rows=rows, notes=notes, verdict=verdict, style=Markup(_STYLE), script=Markup(_SCRIPT),
        sections=[replace(section, body=Markup(section.body)) for section in sections],
        plotly=Markup(_plotly()[0]), policy=Markup(_policy()), as_json=lambda figure: Markup(_json(figure)),
    )  # fmt: skip


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of plain text, which scrolls if it is large.  Columns of numbers after the first are right-aligned."""
    columns = list(enumerate(zip(*rows)))[1:]
    numbers = [place for place, cells in columns if all(not cell or _NUMBER.fullmatch(cell) for cell in cells)]
    return _TEMPLATES.get_template("table.html").render(heads=heads, rows=rows, numbers=numbers)


def folded(title: str, body: str) -> str:
    """HTML that the reader can unfold."""
    return f"<details><summary>{html.escape(title)}</summary>{body}</details>"


def _json(figure: Figure) -> str:
    """A figure as JSON that cannot end a script tag."""
    return json.dumps(figure, separators=(",", ":"), ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")


@cache
def _plotly() -> tuple[str, str]:
    """plotly's script, compressed, and its hash."""
    script = (files("plotly") / "package_data/plotly.min.js").read_bytes()
    return base64.b64encode(gzip.compress(script, 9, mtime=0)).decode(), _hash(script)


def _policy() -> str:
    scripts = f"'{_hash(_SCRIPT.encode())}' '{_plotly()[1]}'"
    return f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:"


def _hash(script: bytes) -> str:
    """The hash by which a policy names a script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script).digest()).decode()}"

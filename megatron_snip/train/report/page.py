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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from megatron_snip.train.pictures.figures import Figure

_STYLE = """
:root { color-scheme: light dark; --ink: light-dark(#1c2430, #dfe4ea); --page: light-dark(#ffffff, #14181f);
  --faint: light-dark(#5d6878, #97a3b4); --line: light-dark(#e3e7ec, #2b323d); --warn: light-dark(#8a4b00, #f0b35e) }
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 1080px;
  margin: 1.5rem auto; padding: 0 1rem }
header { display: flex; justify-content: space-between; align-items: flex-start; gap: 1rem }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere } h2 { font-size: 1.15rem; margin: 2.2rem 0 .3rem }
h3 { font-size: .93rem; font-weight: 600; margin: 1.2rem 0 0 }
button { font: inherit; font-size: 13px; color: var(--ink); background: none; border: 1px solid var(--line);
  border-radius: 6px; padding: .3rem .7rem; cursor: pointer; white-space: nowrap }
p { margin: .3rem 0 .6rem } p.path { color: var(--faint); font: 13px ui-monospace, monospace; overflow-wrap: anywhere }
p.verdict { font-size: 1.08rem; margin: .8rem 0 1rem }
p.note { color: var(--warn); overflow-wrap: anywhere } p.text { color: var(--faint) }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
td, th { padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top }
th { font-weight: 600 } table.small { font-size: 13px } table.small td:first-child { white-space: nowrap }
div.scroll { overflow: auto; max-height: 24rem; margin-top: .8rem } div.picture { min-height: 200px }
summary { cursor: pointer; margin: .5rem 0 } label.slider { display: block; font-size: 13px; margin-top: .6rem }
input[type=range] { width: 100%; height: 2rem; accent-color: #d9752b }
@media (max-width: 600px) { body { margin: .8rem auto; padding: 0 .7rem } td, th { padding-right: .6rem } }
"""

# The page holds figures as JSON.  Each is drawn in the element before it.
_SCRIPT = """
const unpack = async packed => {
  const bytes = Uint8Array.from(atob(packed), letter => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'));
  return new Response(stream).text();
};
const touch = matchMedia('(pointer: coarse)').matches, narrow = () => innerWidth < 600;
const ink = () => getComputedStyle(document.body).color;
const line = 'rgba(128,128,128,0.25)';
const layoutOf = own => ({
  height: narrow() ? 300 : 380, paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)', hovermode: 'closest',
  margin: {l: narrow() ? 48 : 70, r: 10, t: 30, b: 45}, dragmode: touch ? false : 'zoom', ...own,
  font: {color: ink(), size: 12, family: 'system-ui, sans-serif'},
  legend: {orientation: 'h', y: 1.02, yanchor: 'bottom'},
  modebar: {bgcolor: 'rgba(0,0,0,0)', color: 'rgba(128,128,128,0.6)', activecolor: 'rgb(128,128,128)'},
  xaxis: {gridcolor: line, zerolinecolor: line, automargin: true, exponentformat: 'e', ...own.xaxis},
  yaxis: {gridcolor: line, zerolinecolor: line, automargin: true, zeroline: false, exponentformat: 'e', ...own.yaxis},
});
const cells = (plans, step) => {
  const fresh = () => Array.from({length: 4 * plans.rows - 1}, () => Array(plans.columns).fill(null));
  const z = fresh(), text = fresh();
  plans.linears.forEach(([name, row, column], place) => {
    const option = plans.options[plans.steps[step][1].charCodeAt(place) - 48];
    if (option) for (let band = 0; band < 3; band++) {
      z[4 * row + band][column] = option[1 + band];
      text[4 * row + band][column] = name + ': ' + option[0];
    }
  });
  return {z: [z], text: [text]};
};
const addSlider = (picture, plans) => {
  const label = document.createElement('label'), words = document.createElement('span');
  const input = Object.assign(document.createElement('input'), {type: 'range', min: 0, max: plans.steps.length - 1});
  label.className = 'slider';
  const show = () => {
    words.textContent = plans.steps[input.value][0];
    Plotly.restyle(picture, cells(plans, input.value), [0]);
  };
  input.value = input.max;
  input.oninput = show;
  label.append(words, input);
  if (plans.steps.length < 2) input.hidden = true;
  picture.before(label);
  show();
};
const draw = async () => {
  const script = document.createElement('script');
  script.textContent = await unpack(document.getElementById('plotly').textContent);
  document.head.append(script);
  for (const json of document.querySelectorAll('script.figure')) {
    const figure = JSON.parse(json.textContent), picture = json.previousElementSibling;
    const settings = {responsive: true, displaylogo: false, displayModeBar: touch ? false : 'hover'};
    await Plotly.newPlot(picture, figure.data, layoutOf(figure.layout), settings);
    if (figure.plans) addSlider(picture, figure.plans);
  }
  document.documentElement.dataset.drawn = 'yes';
};
const system = matchMedia('(prefers-color-scheme: dark)'), root = document.documentElement.style;
const recolour = () => {
  for (const picture of document.querySelectorAll('.js-plotly-plot')) Plotly.relayout(picture, {'font.color': ink()});
};
document.getElementById('theme').onclick = () => {
  root.colorScheme = (root.colorScheme || (system.matches ? 'dark' : 'light')) === 'dark' ? 'light' : 'dark';
  recolour();
};
system.addEventListener('change', recolour);
draw();
"""


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
    facts = "".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in rows)
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        f'<meta http-equiv="Content-Security-Policy" content="{_policy()}">',
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<header><h1>{html.escape(title)}</h1><button id='theme' type='button'>light / dark</button></header>",
        f"<p class='path'>{html.escape(path)}</p>",
        *([f"<p class='verdict'>{html.escape(verdict)}</p>"] if verdict else []),
        f"<table>{facts}</table>",
        *(f"<p class='note'>{html.escape(note)}</p>" for note in notes),
        "<noscript><p class='note'>The pictures need JavaScript; nothing is loaded from anywhere.</p></noscript>",
    ]
    for section in sections:
        parts.append(f"<section><h2>{html.escape(section.heading)}</h2>")
        parts += [f"<p class='text'>{html.escape(section.text)}</p>"] if section.text else []
        for figure in section.figures:
            parts += [f"<h3>{html.escape(figure['title'])}</h3>"] if "title" in figure else []
            parts.append("<div class='picture'></div>")
            parts.append(f"<script type='application/json' class='figure'>{_json(figure)}</script>")
        parts.append(f"{section.body}</section>")
    parts.append(
        f"<script type='text/plain' id='plotly'>{_plotly()[0]}</script><script>{_SCRIPT}</script></body></html>"
    )
    return "\n".join(parts) + "\n"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of plain text, which scrolls if it is large."""
    lines = [f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows]
    head = "".join(f"<th>{html.escape(name)}</th>" for name in heads)
    return f"<div class='scroll'><table class='small'><tr>{head}</tr>{''.join(lines)}</table></div>"


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

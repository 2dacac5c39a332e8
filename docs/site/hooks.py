"""mkdocs: pages link to files of the repository outside docs/; the site gets copies of these, under repository/.

So the same links work in a checkout, on a code host and in the site, which needs nothing but itself.  A Markdown file
is copied as text (.md.txt), since its own links are relative to its own place.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from megatron_snip import __version__

LINK = re.compile(r"\]\((\.\./[^)#]+)(#[^)]*)?\)")


def _place(link: str) -> str:
    path = link.removeprefix("../")
    return f"repository/{path}.txt" if path.endswith((".md", ".sh")) else f"repository/{path}"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Say on every page which version it describes."""
    config.copyright = f"megatron_snip {__version__}"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that any page links to.  FileNotFoundError for one that is not there."""
    docs = Path(config.docs_dir)
    links = {match[1] for page in docs.glob("*.md") for match in LINK.finditer(page.read_text(encoding="utf-8"))}
    for link in sorted(links):
        source = (docs / link).resolve()
        if not source.is_file():
            raise FileNotFoundError(f"a page links to {link}, which is no file")
        files.append(File.generated(config, _place(link), abs_src_path=str(source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at the copies."""
    return LINK.sub(lambda match: f"]({_place(match[1])})", markdown)

"""What the site has beside docs/: the navigation's last section, and ARCHITECTURE.md as a page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from properdocs.config.defaults import ProperDocsConfig
from properdocs.structure.files import File, Files
from properdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]


def on_config(config: ProperDocsConfig) -> ProperDocsConfig:
    """Leave out of the navigation what is not there, and put under "More" what it does not name."""
    folder = Path(config.docs_dir)
    there = {str(path.relative_to(folder)) for path in folder.rglob("*.md")} | {"architecture.md"}
    named: set[str] = set()
    config.nav = _kept(config.nav or [], there, named)
    if more := sorted(there - named):
        config.nav.append({"More": more})
    return config


def on_files(files: Files, config: ProperDocsConfig) -> Files:
    """ARCHITECTURE.md stands beside README.md, where people look for it."""
    text = (ROOT / "ARCHITECTURE.md").read_text().replace("](docs/", "](")
    files.append(File.generated(config, "architecture.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links to ARCHITECTURE.md lead to that page, also from folders."""
    up = "../" * page.file.src_uri.count("/")
    return re.sub(r"\]\((?:\.\./)+ARCHITECTURE\.md", f"]({up}architecture.md", markdown)


def _kept(entries: list[Any], there: set[str], named: set[str]) -> list[Any]:
    """The entries whose pages exist; these pages are added to `named`."""
    kept: list[Any] = []
    for entry in entries:
        if isinstance(entry, str):
            if entry in there:
                named.add(entry)
                kept.append(entry)
            continue
        ((title, below),) = entry.items()
        if isinstance(below, str):
            if below in there:
                named.add(below)
                kept.append(entry)
        elif below := _kept(below, there, named):
            kept.append({title: below})
    return kept

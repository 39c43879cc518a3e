"""Files of the site that are not pages of docs/, and links to them."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from properdocs.config.defaults import ProperDocsConfig
from properdocs.structure.files import File, Files
from properdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
ELSEWHERE = {
    "README.md": "readme.md",
    "ARCHITECTURE.md": "architecture.md",
    ".github/CONTRIBUTING.md": "contributing.md",
    ".github/SECURITY.md": "security-policy.md",
    "docs/.site/description.md": "api/description.md",
    "build/openapi.json": "api/openapi.json",
    "serve_app/ui/vendor/swagger-ui.css": "api/swagger-ui.css",
    "serve_app/ui/vendor/swagger-ui.js": "api/swagger-ui.js",
}
"""Files that are not pages of docs/, and their names on the site."""


def on_files(files: Files, config: ProperDocsConfig) -> Files:
    """These stand where people and forges look for them."""
    for path, uri in ELSEWHERE.items():
        files.append(File.generated(config, uri, content=(ROOT / path).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links lead to pages, also to those from elsewhere. Files that are no pages are only named."""
    uri = page.file.src_uri
    source = next((path for path, to in ELSEWHERE.items() if to == uri), f"docs/{uri}")

    def resolved(link: re.Match[str]) -> str:
        mark, text, target, heading = link.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        to = ELSEWHERE.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
        if to is None:
            return text
        return (
            f"{mark}[{text}]({posixpath.relpath(to, posixpath.dirname(uri) or '.')}{heading or ''})"
        )

    return re.sub(r"(!?)\[([^\]]*)\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)", resolved, markdown)

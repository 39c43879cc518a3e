"""Writes the made parts of docs/: `python -m tests.documents`, or `make reference`."""

from __future__ import annotations

from tests.documents.pages import PAGES, rewritten

for page in PAGES:
    page.write_text(rewritten(page))

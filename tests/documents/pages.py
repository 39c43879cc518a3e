"""Which pages of docs/ have made parts, and what makes them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.documents import configuration, operations, parameters, sizes
from tests.documents.tables import replaced

_DOCS = Path(__file__).parents[2] / "docs"
_PARAMETERS = _DOCS / "api/parameters.md"
_PARTS: dict[Path, dict[str, Callable[[], str]]] = {
    _DOCS / "configuration.md": {
        name: partial(configuration.section, name) for name in configuration.SECTIONS
    },
    _DOCS / "models.md": {"sizes": sizes.sizes},
    _DOCS / "environment.md": {
        "options": operations.options,
        "haproxy": partial(operations.settings, "haproxy.env"),
        "one-machine": partial(operations.settings, "one-machine.env"),
    },
    _DOCS / "operate/metrics.md": {"metrics": operations.metrics},
}
PAGES = (*_PARTS, _PARAMETERS)


def rewritten(page: Path) -> str:
    """The page as it should be now."""
    text = page.read_text()
    if page == _PARAMETERS:
        return parameters.rewritten(text)
    for name, make in _PARTS[page].items():
        text = replaced(text, name, make())
    return text

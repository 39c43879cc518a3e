"""Files that were written by others: their readers trust their form, and say so if it is another one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from serve_app.errors import ConfigError


@contextmanager
def trusted(what: str) -> Iterator[None]:
    """For code that reads keys and types as if they were there. Its errors become ConfigError, with the
    reason as the rest of a sentence; only OSError stays what it is."""
    try:
        yield
    except (ConfigError, OSError):
        raise
    except Exception as error:  # of each package's own kinds
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{what} is not as an exporter writes it ({reason})") from error

"""Corral's log lines inside Serve replicas."""

from __future__ import annotations

import logging
import re
import resource
import time
import traceback
from collections.abc import Callable, Iterable

MOST_PER_S = 50
"""Lines of Serve's access log that a replica writes in one second."""


class AccessLogBound(logging.Filter):
    """Lets so many lines of the access log through each second. Each takes as long as to refuse a request,
    and a flood would fill the disk. The next line says how many were left out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._second = clock()
        self._n_seen = 0

    def filter(self, record: logging.LogRecord) -> bool:
        if not getattr(record, "serve_access_log", False):
            return True
        now = self._clock()
        if now - self._second >= 1:
            left_out = self._n_seen - MOST_PER_S
            self._second, self._n_seen = now, 0
            if left_out > 0:
                record.msg = f"{record.msg} (before it, {left_out} lines were left out)"
        self._n_seen += 1
        return self._n_seen <= MOST_PER_S


class OneLine(logging.Filter):
    """Keeps messages that may repeat a client's text on one line, and free of terminals' commands: nobody
    but the server writes lines into its log."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Escape control characters in the message. True."""
        is_own = record.name.partition(".")[0] == "corral"
        if is_own or getattr(record, "serve_access_log", False):
            message = record.getMessage()
            record.msg, record.args = _CONTROL.sub(_escape, message), ()
        return True


_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


class ClientText(str):
    """A text of a client's in a line of the log."""

    __slots__ = ()


class NoTexts(logging.Filter):
    """Keeps clients' texts out of lines: paths, and the messages of errors, which may repeat anything."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Put names of types in the place of texts and errors. False for the access log."""
        if getattr(record, "serve_access_log", False):
            return False
        if isinstance(record.args, tuple):
            record.args = tuple(map(_without_text, record.args))
        if record.exc_info:
            kind, _, where = record.exc_info
            record.exc_text = "".join(traceback.format_tb(where)) + (kind.__name__ if kind else "")
            record.exc_info = None
        return True


def _without_text(value: object) -> object:
    return type(value).__name__ if isinstance(value, BaseException | ClientText) else value


def forbid_texts(handlers: Iterable[logging.Handler]) -> None:
    """Keep clients' texts out of what these handlers write, and this process's memory out of core dumps."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for handler in handlers:
        handler.addFilter(NoTexts())


def forward_to_serve(*, keeps_texts: bool = True) -> None:
    """Send the `corral` loggers' lines where Serve's own go: the replica's log file and the
    terminal of `serve run`. Without this, Serve drops lines below WARNING. Its access log gets a bound.
    `keeps_texts` says whether lines may have clients' texts."""
    logger = logging.getLogger("corral")
    logger.parent = logging.getLogger("ray.serve")
    logger.setLevel(logging.INFO)
    logger.parent.addFilter(AccessLogBound())
    _filter(logger.parent.handlers, keeps_texts=keeps_texts)


def write_to_stderr(*, keeps_texts: bool = True) -> None:
    """Write lines to the standard error, as processes of a local server do. See above for `keeps_texts`."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(name)s -- %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("corral").setLevel(logging.INFO)
    _filter([handler], keeps_texts=keeps_texts)


def _filter(handlers: Iterable[logging.Handler], *, keeps_texts: bool) -> None:
    if not keeps_texts:
        forbid_texts(handlers)
    for handler in handlers:
        handler.addFilter(OneLine())

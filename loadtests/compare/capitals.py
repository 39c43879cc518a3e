"""Header names with capitals, as llama-server writes them: some of its clients compare them by letter.

Uvicorn writes small letters.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_BEGINNING = b"HTTP/1.1 "
_NAME = re.compile(rb"(?<=\r\n)[a-z-]+(?=: )")


class CapitalHeaders(HttpToolsProtocol):
    """Uvicorn's protocol, with such names."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        super().connection_made(_Capitals(transport))  # type: ignore[arg-type]


class _Capitals:
    """A transport that changes the heads of answers, each of which uvicorn writes alone."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def write(self, data: bytes) -> None:
        if data.startswith(_BEGINNING) and data.endswith(b"\r\n\r\n"):
            data = _NAME.sub(lambda name: name[0].title(), data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

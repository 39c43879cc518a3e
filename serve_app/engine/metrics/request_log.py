"""The log of requests that ended lately, which clients may ask about."""

from __future__ import annotations

from collections import deque

from serve_app.types import RequestRecord

_N_KEPT = 1024


class RequestLog:
    """The last records. The decoder thread adds, any thread may look."""

    def __init__(self) -> None:
        self._records: deque[RequestRecord] = deque(maxlen=_N_KEPT)

    def add(self, record: RequestRecord) -> None:
        """Keep it, and forget the oldest."""
        self._records.append(record)

    def find(self, request: str) -> list[RequestRecord]:
        """The records of that request, oldest first."""
        copied = list(self._records)  # in one go: nobody adds meanwhile
        return [record for record in copied if record.belongs_to(request)]

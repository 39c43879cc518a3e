"""Reads the bodies of requests about batches. Runs in workers."""

from __future__ import annotations

from serve_app.ingress.batch.objects import BatchRequest
from serve_app.ingress.http.json_body import parsed
from serve_app.ingress.workers.worker import Models


def batch(models: Models, body: bytes) -> BatchRequest:
    """Of `POST /v1/batches`. Raises InvalidRequestError."""
    return parsed(BatchRequest, body)

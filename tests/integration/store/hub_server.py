"""A server that speaks as the Hugging Face Hub does to `huggingface_hub`, and misbehaves when told to.

Files come by redirect from another origin ("localhost" instead of "127.0.0.1"), as from the Hub's CDN.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "a" * 40
OLD_COMMIT = "b" * 40
_TICK_S = 0.02


@dataclass
class Hub:
    """What it has, how it is to behave, and what it was asked."""

    files: dict[str, bytes]
    """Of the repository `owner/name`, at COMMIT."""
    old_files: dict[str, bytes] = field(default_factory=dict)
    """At OLD_COMMIT, which is also the tag `v1`."""
    token: str | None = None
    """Without it, 401."""
    is_gated: bool = False
    """Whether everybody may list the files."""
    breaks_after: list[int] = field(default_factory=list)
    """The next answers with content break off after so many bytes."""
    busy: int = 0
    """So many questions more are answered with 429."""
    lies: bool = False
    """Whether the content is not what its sum says."""
    stalled: threading.Event | None = None
    """Content waits for it, after its first half."""
    held: threading.Event | None = None
    """The ends of files wait for it,"""
    holds: str = ""
    """if their names have this in them."""
    bytes_per_s: float | None = None
    """Of each connection; None for as fast as it goes."""
    url: str = ""
    n_bytes: Counter[str] = field(default_factory=Counter)
    """That left it, by file."""
    asked: list[str] = field(default_factory=list)
    cdn_tokens: list[str | None] = field(default_factory=list)
    """What was sent as Authorization to the origin of the content."""

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """The commit and the files of a revision."""
        if revision in ("main", COMMIT):
            return COMMIT, self.files
        if revision in ("v1", OLD_COMMIT) and self.old_files:
            return OLD_COMMIT, self.old_files
        return None


@contextmanager
def running(hub: Hub) -> Iterator[Hub]:
    """It answers on a free port."""
    server = _Server(hub)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield hub
    finally:
        for event in (hub.stalled, hub.held):
            if event is not None:
                event.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    """Has the hub that it answers for."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    """Answers as the hub does."""

    server: _Server
    protocol_version = "HTTP/1.1"

    @property
    def _hub(self) -> Hub:
        return self.server.hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self._hub.asked.append(f"{self.command} {path}")
        if self._hub.busy > 0:
            self._hub.busy -= 1
            return self._send(429, b"slow down", {"Retry-After": "0"})
        if path.startswith("/cdn/"):
            self._hub.cdn_tokens.append(self.headers.get("Authorization"))
            _, _, commit, name = path.split("/", 3)
            return self._content((self._hub.at(commit) or ("", {}))[1][name], name)
        api = re.fullmatch(r"/api/models/owner/name(?:/revision/(.+))?", path)
        is_open = self._hub.token is None or (self._hub.is_gated and api is not None)
        if not is_open and self.headers.get("Authorization") != f"Bearer {self._hub.token}":
            return self._send(401, b"{}", {"X-Error-Message": "Invalid credentials."})
        if api:
            return self._info(api[1] or "main")
        resolve = re.fullmatch(r"/owner/name/resolve/([^/]+)/(.+)", path)
        if resolve:
            return self._resolve(resolve[1], resolve[2])
        return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _info(self, revision: str) -> None:
        found = self._hub.at(revision)
        if found is None:
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        siblings = [
            {
                "rfilename": name,
                "size": len(content),
                "blobId": "0" * 40,
                "lfs": {
                    "size": len(content),
                    "sha256": hashlib.sha256(content).hexdigest(),
                    "pointerSize": 134,
                },
            }
            for name, content in found[1].items()
        ]
        told = {"id": "owner/name", "sha": found[0], "siblings": siblings}
        return self._send(200, json.dumps(told).encode(), {"Content-Type": "application/json"})

    def _resolve(self, revision: str, name: str) -> None:
        found = self._hub.at(revision)
        if found is None or name not in found[1]:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        elsewhere = self._hub.url.replace("127.0.0.1", "localhost")
        content = found[1][name]
        return self._send(
            302,
            b"",
            {
                "Location": f"{elsewhere}/cdn/{found[0]}/{name}",
                "X-Repo-Commit": found[0],
                "X-Linked-Size": str(len(content)),
                "X-Linked-ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            },
        )

    def _content(self, content: bytes, name: str) -> None:
        if self._hub.lies:
            content = content[:-1] + bytes([content[-1] ^ 1])
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        start, end = 0, len(content)
        if asked:
            start, end = int(asked[1]), int(asked[2] or end - 1) + 1
        part = content[start : min(end, len(content))]
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        if asked:
            self.send_header(
                "Content-Range", f"bytes {start}-{start + len(part) - 1}/{len(content)}"
            )
        self.end_headers()
        if self.command == "HEAD":
            return
        if self._hub.held is not None and end >= len(content) and self._hub.holds in name:
            self._hub.held.wait(600)
        most = self._hub.breaks_after.pop(0) if self._hub.breaks_after else len(part)
        self._write(part[:most], name)
        if most < len(part):
            self.close_connection = True

    def _write(self, part: bytes, name: str) -> None:
        half = len(part) // 2 if self._hub.stalled is not None else len(part)
        parts = [part[:half], part[half:]]
        if self._hub.bytes_per_s is not None:
            n = max(1, int(self._hub.bytes_per_s * _TICK_S))
            parts = [part[at : at + n] for at in range(0, len(part), n)]
        for one in parts:
            self._hub.n_bytes[name] += len(one)  # before the reader can know that it has them
            try:
                self.wfile.write(one)
                self.wfile.flush()
            except OSError:  # who asked is gone
                self.close_connection = True
                return
            if self._hub.stalled is not None:
                self._hub.stalled.wait(60)
            if self._hub.bytes_per_s is not None:
                time.sleep(_TICK_S)

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

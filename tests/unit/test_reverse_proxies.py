"""The files of `cluster/proxy`: nginx and Caddy take them, and pass a stream on as it comes."""

from __future__ import annotations

import datetime
import http.server
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from loadtests.common.processes import within
from loadtests.common.servers import free_port

PROXIES = Path(__file__).parents[2] / "cluster/proxy"
TIMEOUT_S = 20


class Upstream(http.server.ThreadingHTTPServer):
    """Streams a piece, and the next one only when it is told that the first one was read."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.was_read = threading.Event()
        self.headers: list[dict[str, str]] = []


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Upstream

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.server.headers.append({name.lower(): text for name, text in self.headers.items()})
        self.send_response(200)
        self.send_header("Content-Type", "application/x-ndjson")  # no proxy knows it to be a stream
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self._chunk(b"first\n")
        self.server.was_read.wait(TIMEOUT_S)
        self._chunk(b"second\n")
        self._chunk(b"")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    server = Upstream()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@contextmanager
def running(command: Sequence[str | Path], port: int) -> Iterator[str]:
    """The proxy's URL while it runs."""
    process = subprocess.Popen(command)  # pytest shows what it prints where a test has failed
    url = f"https://llm.example:{port}"

    def answers() -> bool:
        try:
            httpx.get(f"https://127.0.0.1:{port}/", verify=False, timeout=1)
        except httpx.TransportError as error:
            return "SSL" in str(error)  # it listens; it has no certificate for this name
        return True

    try:
        assert within(TIMEOUT_S, lambda: process.poll() is not None or answers())
        assert process.poll() is None
        yield url
    finally:
        process.terminate()
        process.wait(TIMEOUT_S)


def write_certificate(folder: Path) -> None:
    """cert.pem and key.pem for llm.example, signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "llm.example")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("llm.example")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )


def nginx(folder: Path, upstream: int, plain: int, tls: int) -> list[str | Path]:
    """Its command, with our file on these ports."""
    text = (PROXIES / "nginx.conf").read_text().replace("127.0.0.1:8000", f"127.0.0.1:{upstream}")
    text = text.replace("listen 80;", f"listen 127.0.0.1:{plain};")
    text = text.replace("listen 443 ssl;", f"listen 127.0.0.1:{tls} ssl;")
    text = re.sub(r"/etc/letsencrypt/live/llm.example/fullchain.pem", f"{folder}/cert.pem", text)
    text = re.sub(r"/etc/letsencrypt/live/llm.example/privkey.pem", f"{folder}/key.pem", text)
    assert "letsencrypt" not in text
    temporary = "".join(
        f"{kind}_temp_path {folder}/{kind};\n"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = folder / "nginx.conf"
    config.write_text(
        f"daemon off; master_process off; error_log stderr; pid {folder}/pid; events {{}}\n"
        f"http {{ access_log off; {temporary} {text} }}\n"
    )
    command: list[str | Path] = ["nginx", "-e", "stderr", "-c", config]
    subprocess.run([*command, "-t"], check=True, timeout=TIMEOUT_S)
    return command


def caddy(folder: Path, upstream: int, plain: int, tls: int) -> list[str | Path]:
    """The same of Caddy, with a certificate that is signed by itself."""
    text = (PROXIES / "Caddyfile").read_text().replace("127.0.0.1:8000", f"127.0.0.1:{upstream}")
    opening = "llm.example {\n"
    assert opening in text
    text = text.replace(opening, f"{opening}\ttls {folder}/cert.pem {folder}/key.pem\n")
    config = folder / "Caddyfile"
    config.write_text(f"{{\n\tadmin off\n\thttp_port {plain}\n\thttps_port {tls}\n}}\n{text}")
    command: list[str | Path] = ["caddy"]
    options: list[str | Path] = ["--adapter", "caddyfile", "--config", config]
    subprocess.run([*command, "validate", *options], check=True, timeout=TIMEOUT_S)
    return [*command, "run", *options]


BODY_BYTES: dict[object, int] = {nginx: 2_000_000, caddy: 1000}
"""nginx's own limit is a megabyte. Caddy has none, and may cut an answer that begins in the moment in which
a large body ends, as this upstream's does: Go's transport is not done with writing then."""


@pytest.mark.parametrize("proxy", [nginx, caddy])
def test_a_stream_passes_as_it_comes(
    proxy: Callable[[Path, int, int, int], list[str | Path]], tmp_path: Path, upstream: Upstream
) -> None:
    if shutil.which(proxy.__name__) is None:
        pytest.skip(f"no {proxy.__name__} here")
    write_certificate(tmp_path)
    tls = free_port()
    with (
        running(proxy(tmp_path, upstream.server_port, free_port(), tls), tls) as url,
        httpx.Client(verify=False, timeout=TIMEOUT_S) as client,
        client.stream(
            "POST",
            url.replace("llm.example", "127.0.0.1"),
            content=b"x" * BODY_BYTES[proxy],
            headers={"Host": f"llm.example:{tls}"},
            extensions={"sni_hostname": "llm.example"},
        ) as answer,
    ):
        lines = answer.iter_lines()
        assert next(lines) == "first"  # though the second one was not sent yet
        upstream.was_read.set()
        assert next(lines) == "second"
    (headers,) = upstream.headers
    assert headers["host"].partition(":")[0] == "llm.example"
    assert headers["x-forwarded-for"] == "127.0.0.1"  # by which Corral knows a proxy

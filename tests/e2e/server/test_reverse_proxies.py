"""The files of `cluster/proxy`: each proxy takes its own, and does with streams what the page says."""

from __future__ import annotations

import datetime
import http.server
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from loadtests.common.processes import within
from loadtests.common.servers import ROOT, free_port

Ask = Callable[..., AbstractContextManager[httpx.Response]]
PROXIES = ROOT / "cluster/proxy"
TIMEOUT_S = 20


class Upstream(http.server.ThreadingHTTPServer):
    """Streams a piece, and the next one only when it is told that the first one was read. By the path, it
    says nothing at all (`/silent`), never ends (`/endless`), or is killed behind a piece (`/cut`)."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.was_read, self.was_left = threading.Event(), threading.Event()
        self.headers: list[dict[str, str]] = []


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Upstream

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/silent":
            self._wait_for_the_end()
            return
        self.server.headers.append({name.lower(): text for name, text in self.headers.items()})
        self.send_response(200)
        self.send_header("Content-Type", "application/x-ndjson")  # no proxy knows it to be a stream
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self._chunk(b"first\n")
        if self.path == "/endless":
            with suppress(OSError):
                while not self.server.was_left.wait(0.1):
                    self._chunk(b"more\n")
            self.server.was_left.set()
            self.close_connection = True
            return
        if self.path == "/cut":
            self.server.was_read.wait(TIMEOUT_S)
            self.close_connection = True
            return
        self.server.was_read.wait(TIMEOUT_S)
        self._chunk(b"second\n")
        self._chunk(b"")

    def _wait_for_the_end(self) -> None:
        self.server.headers.append({"silent": ""})
        self.close_connection = True
        self.connection.settimeout(TIMEOUT_S)
        try:
            is_left = not self.connection.recv(1)
        except OSError as error:
            is_left = not isinstance(error, TimeoutError)
        if is_left:
            self.server.was_left.set()

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
def running(command: Sequence[str | Path], port: int, scheme: str) -> Iterator[None]:
    """The proxy runs meanwhile."""
    # Pytest shows what it prints where a test has failed.
    process = subprocess.Popen(command, start_new_session=True)

    def answers() -> bool:
        try:
            httpx.get(f"{scheme}://127.0.0.1:{port}/", verify=False, timeout=1)
        except httpx.TransportError as error:
            return "SSL" in str(error)  # it listens; it has no certificate for this name
        return True

    try:
        assert within(TIMEOUT_S, lambda: process.poll() is not None or answers())
        assert process.poll() is None
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # SIGTERM lets some of them wait for clients
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


def haproxy(folder: Path, upstream: int, _plain: int, tls: int) -> list[str | Path]:
    (folder / "llm.example.pem").write_bytes(
        (folder / "cert.pem").read_bytes() + (folder / "key.pem").read_bytes()
    )
    changes = {"127.0.0.1:8000": f"127.0.0.1:{upstream}", "bind :443": f"bind 127.0.0.1:{tls}"}
    config = written(folder, "haproxy.cfg", changes | {"/etc/haproxy": str(folder)})
    subprocess.run(["haproxy", "-c", "-f", config], check=True, timeout=TIMEOUT_S)
    return ["haproxy", "-db", "-f", config]


def apache2(folder: Path, upstream: int, _plain: int, tls: int) -> list[str | Path]:
    changes = {
        "127.0.0.1:8000": f"127.0.0.1:{upstream}",
        "*:443": f"127.0.0.1:{tls}",
        "/etc/letsencrypt/live/llm.example/fullchain.pem": f"{folder}/cert.pem",
        "/etc/letsencrypt/live/llm.example/privkey.pem": f"{folder}/key.pem",
    }
    modules = ("mpm_event", "authz_core", "proxy", "proxy_http", "ssl", "env")
    loaded = [f"LoadModule {one}_module /usr/lib/apache2/modules/mod_{one}.so" for one in modules]
    own = (f"Listen 127.0.0.1:{tls}", f"PidFile {folder}/pid", "ErrorLog /dev/stderr")
    lines = [*loaded, *own, f"DefaultRuntimeDir {folder}", "ServerName llm.example"]
    config = written(folder, "apache.conf", changes, "\n".join(lines))
    return ["apache2", "-DFOREGROUND", "-f", config]


def varnishd(folder: Path, upstream: int, plain: int, _tls: int) -> list[str | Path]:
    config = written(folder, "varnish.vcl", {'"8000"': f'"{upstream}"'})
    where = ("-a", f"127.0.0.1:{plain}", "-n", folder / "varnish", "-j", "none")
    return ["varnishd", "-F", *where, "-p", "pipe_timeout=3600", "-f", config]


def squid(folder: Path, upstream: int, plain: int, _tls: int) -> list[str | Path]:
    changes = {
        "parent 8000": f"parent {upstream}",
        "http_port 8080": f"http_port 127.0.0.1:{plain}",
    }
    own = "pid_filename none\naccess_log none\ncache_log /dev/null\nshutdown_lifetime 0 seconds\n"
    return ["squid", "-N", "-f", written(folder, "squid.conf", changes, own)]


def envoy(folder: Path, upstream: int, _plain: int, tls: int) -> list[str | Path]:
    changes = {
        "address: 127.0.0.1, port_value: 8000": f"address: 127.0.0.1, port_value: {upstream}",
        "address: 0.0.0.0, port_value: 443": f"address: 127.0.0.1, port_value: {tls}",
        "/etc/letsencrypt/live/llm.example/fullchain.pem": f"{folder}/cert.pem",
        "/etc/letsencrypt/live/llm.example/privkey.pem": f"{folder}/key.pem",
    }
    config = written(folder, "envoy.yaml", changes)
    return ["envoy", "--use-dynamic-base-id", "--concurrency", "1", "-l", "warn", "-c", config]


def traefik(folder: Path, upstream: int, _plain: int, tls: int) -> list[str | Path]:
    changes = {
        "127.0.0.1:8000": f"127.0.0.1:{upstream}",
        "/etc/letsencrypt/live/llm.example/fullchain.pem": f"{folder}/cert.pem",
        "/etc/letsencrypt/live/llm.example/privkey.pem": f"{folder}/key.pem",
    }
    file = f"--providers.file.filename={written(folder, 'traefik.yaml', changes)}"
    return ["traefik", file, f"--entryPoints.tls.address=127.0.0.1:{tls}", "--log.level=ERROR"]


def written(folder: Path, name: str, changes: Mapping[str, str], before: str = "") -> Path:
    """Our file, with these changes that only a test needs."""
    text = (PROXIES / name).read_text()
    for ours, theirs in changes.items():
        assert ours in text
        text = text.replace(ours, theirs)
    (folder / name).write_text(f"{before}\n{text}")
    return folder / name


Proxy = Callable[[Path, int, int, int], list[str | Path]]
PAGE = ROOT / "docs/deploy/behind-a-proxy.md"
BODY_BYTES = 2_000_000
"""More than nginx' own limit."""
ROWS: dict[Proxy, str] = {
    nginx: "nginx",
    haproxy: "HAProxy",
    apache2: "Apache",
    caddy: "Caddy",
    varnishd: "Varnish",
    squid: "Squid",
    traefik: "Traefik",
    envoy: "Envoy",
}


@pytest.fixture(params=[*ROWS], ids=[*ROWS.values()])
def proxy(request: pytest.FixtureRequest) -> Proxy:
    found: Proxy = request.param
    if shutil.which(found.__name__, path=f"{os.environ['PATH']}:/usr/sbin") is None:
        pytest.skip(f"no {found.__name__} here")
    return found


@pytest.fixture
def row(proxy: Proxy) -> dict[str, str]:
    """What the page says of the proxy, by the table's header."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    header, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    cells = next(cells for cells in rows if cells[0] == ROWS[proxy])  # of the first table
    return dict(zip(header, cells, strict=True))


@pytest.fixture
def ask(proxy: Proxy, tmp_path: Path, upstream: Upstream) -> Iterator[Ask]:
    """Asks the proxy for a path, and gives the answer while it comes."""
    write_certificate(tmp_path)
    plain, tls = free_port(), free_port()
    has_tls = proxy not in (varnishd, squid)
    scheme, port = ("https", tls) if has_tls else ("http", plain)
    command = proxy(tmp_path, upstream.server_port, plain, tls)
    with running(command, port, scheme), httpx.Client(verify=False, timeout=TIMEOUT_S) as client:

        def answer(
            path: str, n_bytes: int = 1000, timeout_s: float = TIMEOUT_S
        ) -> AbstractContextManager[httpx.Response]:
            return client.stream(
                "POST",
                f"{scheme}://127.0.0.1:{port}{path}",
                content=b"x" * n_bytes,
                headers={"Host": f"llm.example:{port}", "Authorization": "Bearer key"},
                extensions={"sni_hostname": "llm.example"},
                timeout=timeout_s,
            )

        assert within(TIMEOUT_S, lambda: _passes(answer, upstream))
        yield answer


def _passes(ask: Ask, upstream: Upstream) -> bool:
    """Whether a request reaches the upstream. Traefik listens before it has read its file."""
    with suppress(httpx.TransportError), ask("/cut") as answer:
        upstream.was_read.set()
        answer.read()
    passes = bool(upstream.headers)
    upstream.was_read.clear()
    upstream.headers.clear()
    return passes


def test_events_and_uploads_pass_at_once(
    ask: Ask, upstream: Upstream, row: dict[str, str], proxy: Proxy
) -> None:
    # Go's transport may cut an answer that begins while a large body ends: it still writes then.
    with ask("/", 1000 if proxy in (caddy, traefik) else BODY_BYTES) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "first"  # though the second one was not sent yet
        upstream.was_read.set()
        assert next(lines) == "second"
    (headers,) = upstream.headers
    assert headers["host"].partition(":")[0] == "llm.example"
    client = headers["x-forwarded-for"]  # by which Corral knows a proxy
    assert client.endswith("127.0.0.1") or (proxy is envoy and client)  # Envoy names its machine
    assert headers["authorization"] == "Bearer key"
    assert row["events at once"] == "yes"


def test_the_server_hears_of_a_client_that_leaves_before_the_first_byte(
    ask: Ask, upstream: Upstream, row: dict[str, str]
) -> None:
    with suppress(httpx.ReadTimeout), ask("/silent", timeout_s=1.0):
        pytest.fail("there is no answer")
    assert upstream.headers
    is_told = upstream.was_left.wait(3)
    assert row["client leaves before the first byte"] == ("told" if is_told else "not told")


def test_the_server_hears_of_a_client_that_leaves_a_stream(
    ask: Ask, upstream: Upstream, row: dict[str, str]
) -> None:
    with ask("/endless") as answer:
        assert next(answer.iter_lines()) == "first"
    is_told = upstream.was_left.wait(3)
    assert row["client leaves a stream"] == ("told" if is_told else "not told")


def test_what_a_killed_server_looks_like(ask: Ask, upstream: Upstream, row: dict[str, str]) -> None:
    is_cut = False
    with ask("/cut") as answer:
        lines = answer.iter_lines()
        assert next(lines) == "first"
        upstream.was_read.set()
        try:
            assert next(lines, None) is None
        except httpx.RemoteProtocolError:
            is_cut = True
    assert row["server is killed"] == ("cut" if is_cut else "**ends as if whole**")

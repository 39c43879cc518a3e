#!/usr/bin/env bash
# Caddy makes a whole answer of half a stream, and two usual lines of its configuration spoil streams.
#
# Version: Caddy 2.6.2-5 (Debian 12; unpacked, not installed), Python 3.11.7
# Behaviour: Where the server closes in the middle of a stream, as when it was killed, Caddy ends the chunked body as if it were
# complete. With `encode gzip`, a stream whose first piece has more than 512 bytes is held back to its end: only the ten
# bytes of gzip's header come. With `flush_interval -1`, the server is not told that a client left before the first byte.
# Seen:
#   shortest configuration: a body cut by the server ends as if whole
#   shortest configuration: first pieces of 512 and 513 bytes: 512 and 513 bytes come at once
#   shortest configuration: client leaves, server is told
#   encode gzip: a body cut by the server ends as if whole
#   encode gzip: first pieces of 512 and 513 bytes: 512 and 10 bytes come at once
#   encode gzip: client leaves, server is told
#   flush_interval -1: a body cut by the server ends as if whole
#   flush_interval -1: first pieces of 512 and 513 bytes: 512 and 513 bytes come at once
#   flush_interval -1: client leaves, server is not told
set -euo pipefail
packages="caddy=2.6.2-5"
[ -z "${NEWEST-}" ] || packages=$(sed 's/=[^ ]*//g' <<< "$packages")

own=$(realpath "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
{ apt-get download -qq $packages && for package in *.deb; do dpkg -x "$package" .; done; } 2> log || { cat log; exit 2; }

timeout 100 python3 - <<'PYTHON' | tee seen
import contextlib
import http.client
import http.server
import os
import pathlib
import select
import socket
import subprocess
import threading
import time

SITES = {"shortest configuration": "", "encode gzip": "encode gzip", "flush_interval -1": ""}
OPTIONS = {"flush_interval -1": "flush_interval -1"}
was_told = []
is_over = threading.Event()


class Server(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        """Streams a piece of that size, and the end when the client has read. Of no size: half a stream."""
        n_bytes = int(self.path[1:])
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        piece = b"data: " + b"x" * (max(n_bytes, 20) - 8) + b"\n\n"
        self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        if n_bytes:
            is_over.wait(10)
            with contextlib.suppress(ConnectionError):
                self.wfile.write(b"0\r\n\r\n")
        self.close_connection = True

    def do_POST(self):
        """Computes for four seconds, or until the connection ends."""
        self.rfile.read(int(self.headers["content-length"]))
        was_told.append(bool(select.select([self.connection], [], [], 4)[0]))
        is_over.set()
        self.close_connection = True

    def log_message(self, *_):
        pass


def read(port, path, method):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    with contextlib.closing(connection):
        connection.request("GET", path, headers={"accept-encoding": "gzip"})
        return getattr(connection.getresponse(), method)()


def read_at_once(port, n_bytes):
    is_over.clear()
    try:
        return str(len(read(port, f"/{n_bytes}", "read1")))
    finally:
        is_over.set()


def leave(port):
    is_over.clear()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 2\r\n\r\n{}")
        time.sleep(1)
    is_over.wait(20)
    return was_told.pop()


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
sockets = [socket.create_server(("127.0.0.1", 0)) for _ in SITES]
ports = [one.getsockname()[1] for one in sockets]
[one.close() for one in sockets]
config = "{\nadmin off\n}\n"
for port, (name, line) in zip(ports, SITES.items()):
    proxy = f"reverse_proxy 127.0.0.1:{server.server_port} {{\n{OPTIONS.get(name, '')}\n}}"
    config += f"http://127.0.0.1:{port} {{\n{line}\n{proxy}\n}}\n"
pathlib.Path("Caddyfile").write_text(config)
command = ["usr/bin/caddy", "run", "--config", "Caddyfile", "--adapter", "caddyfile"]
caddy = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=os.environ | {"HOME": os.getcwd()})
for _ in range(200):
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", ports[-1])).close()
        break
    time.sleep(0.1)
for port, name in zip(ports, SITES):
    try:
        end = "as if whole" if read(port, "/0", "read") else "empty"
    except http.client.IncompleteRead:
        end = "incomplete"
    print(f"{name}: a body cut by the server ends {end}")
    at_once = " and ".join(read_at_once(port, n_bytes) for n_bytes in (512, 513))
    print(f"{name}: first pieces of 512 and 513 bytes: {at_once} bytes come at once")
    print(f"{name}: client leaves, server is {'told' if leave(port) else 'not told'}", flush=True)
caddy.terminate()
caddy.wait()
PYTHON

sed -n '/^# Seen:/,/^set/s/^#   //p' "$own" | diff - seen

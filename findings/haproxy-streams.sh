#!/usr/bin/env bash
# HAProxy holds each event of a stream back for 200 ms, and one of its options does nothing where its manual allows it.
#
# Version: HAProxy 2.6.12-1+deb12u3 (Debian 12; unpacked, not installed), Python 3.11.7
# Behaviour: Without `option http-no-delay`, each small piece of a chunked body comes a fifth of a second late. The server is
# not told that a client left before the first byte. `option abortonclose` mends that in `defaults`, and does nothing in
# `backend`, where the manual allows it too, for a request that was sent.
# Seen:
#   shortest configuration: pieces come about 200 ms late, client leaves: server is not told
#   http-no-delay: pieces come at once, client leaves: server is not told
#   abortonclose in backend: pieces come about 200 ms late, client leaves: server is not told
#   abortonclose in defaults: pieces come about 200 ms late, client leaves: server is told
set -euo pipefail
packages="haproxy=2.6.12-1+deb12u3 liblua5.3-0=5.3.6-2 libopentracing-c-wrapper0=1.1.3-3+b1 libopentracing1=1.6.0-4"
[ -z "${NEWEST-}" ] || packages=$(sed 's/=[^ ]*//g' <<< "$packages")

own=$(realpath "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
{ apt-get download -qq $packages && for package in *.deb; do dpkg -x "$package" .; done; } 2> log || { cat log; exit 2; }

timeout 100 python3 - <<'PYTHON' | tee seen
import contextlib
import glob
import http.client
import http.server
import os
import pathlib
import select
import socket
import statistics
import subprocess
import threading
import time

SITES = {  # lines for `defaults` and for `backend`
    "shortest configuration": ("", ""),
    "http-no-delay": ("option http-no-delay", ""),
    "abortonclose in backend": ("", "option abortonclose"),
    "abortonclose in defaults": ("option abortonclose", ""),
}
TIMES = "timeout connect 5s\n timeout client 60s\n timeout server 60s"
was_told = []
is_over = threading.Event()


class Server(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self):
        """Streams the time, six times, as a model streams its tokens."""
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for _ in range(6):
            piece = f"data: {time.time()}\n\n".encode()
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            time.sleep(0.4)
        self.wfile.write(b"0\r\n\r\n")

    def do_POST(self):
        """Computes for four seconds, or until the connection ends."""
        self.rfile.read(int(self.headers["content-length"]))
        was_told.append(bool(select.select([self.connection], [], [], 4)[0]))
        is_over.set()
        self.close_connection = True

    def handle(self):
        with contextlib.suppress(ConnectionError):
            super().handle()

    def log_message(self, *_):
        pass


def read_delay(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    with contextlib.closing(connection):
        connection.request("GET", "/")
        lines = (line for line in connection.getresponse() if line.startswith(b"data: "))
        return statistics.median(time.time() - float(line[6:]) for line in lines)


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
config = ""
for port, (default, backend) in zip(ports, SITES.values()):
    config += f"defaults\n mode http\n {TIMES}\n {default}\n"
    config += f"frontend f{port}\n bind 127.0.0.1:{port}\n default_backend b{port}\n"
    config += f"backend b{port}\n {backend}\n server one 127.0.0.1:{server.server_port}\n"
pathlib.Path("haproxy.cfg").write_text(config)
libraries = {"LD_LIBRARY_PATH": os.path.dirname(glob.glob("usr/lib/*/liblua*")[0])}
haproxy = subprocess.Popen(["usr/sbin/haproxy", "-db", "-f", "haproxy.cfg"], env=os.environ | libraries)
for _ in range(200):
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", ports[-1])).close()
        break
    time.sleep(0.1)
for port, name in zip(ports, SITES):
    delay = read_delay(port)
    come = "about 200 ms late" if 0.15 < delay < 0.3 else "at once" if delay < 0.1 else f"{delay:.3f} s late"
    told = "told" if leave(port) else "not told"
    print(f"{name}: pieces come {come}, client leaves: server is {told}", flush=True)
haproxy.terminate()
haproxy.wait()
PYTHON

sed -n '/^# Seen:/,/^set/s/^#   //p' "$own" | diff - seen

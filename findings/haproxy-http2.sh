#!/usr/bin/env bash
# Over HTTP/2, HAProxy 2.6 makes a whole answer of half a stream.
#
# Version: HAProxy 2.6.12-1+deb12u3 (Debian 12; unpacked, not installed), h2 4.4.1 (PyPI), Python 3.11.7
# Behaviour: Where the server closes in the middle of a chunked body, as when it was killed, a client of HTTP/1.1 sees an
# incomplete body. A client of HTTP/2 sees an end as usual (END_STREAM), and no RST_STREAM.
# Seen:
#   HTTP/1.1: a body cut by the server ends incomplete
#   HTTP/2: a body cut by the server ends as if whole
set -euo pipefail
packages="haproxy=2.6.12-1+deb12u3 liblua5.3-0=5.3.6-2 libopentracing-c-wrapper0=1.1.3-3+b1 libopentracing1=1.6.0-4"
pypi_packages="h2==4.4.1"
[ -z "${NEWEST-}" ] || { packages=$(sed 's/=[^ ]*//g' <<< "$packages"); pypi_packages=h2; }

own=$(realpath "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
{ apt-get download -qq $packages && for package in *.deb; do dpkg -x "$package" .; done; } 2> log || { cat log; exit 2; }
python3 -m venv --without-pip env &&
	python3 -m pip --python env/bin/python install -qq --no-compile $pypi_packages || exit 2

timeout 60 env/bin/python - <<'PYTHON' | tee seen
import contextlib
import glob
import http.client
import http.server
import os
import pathlib
import socket
import subprocess
import threading
import time

import h2.connection
import h2.events


class Server(http.server.BaseHTTPRequestHandler):
    """Streams a piece, and closes without an end."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"d\r\ndata: piece\n\n\r\n")
        self.close_connection = True

    def log_message(self, *_):
        pass


def read_http_1(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    with contextlib.closing(connection):
        connection.request("GET", "/")
        try:
            connection.getresponse().read()
        except http.client.IncompleteRead:
            return "incomplete"
        return "as if whole"


def read_http_2(port):
    state = h2.connection.H2Connection()
    state.initiate_connection()
    names = {":method": "GET", ":path": "/", ":scheme": "http", ":authority": "127.0.0.1"}
    state.send_headers(1, list(names.items()), end_stream=True)
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(state.data_to_send())
        while data := connection.recv(65536):
            for event in state.receive_data(data):
                if isinstance(event, h2.events.StreamEnded):
                    return "as if whole"
                if isinstance(event, h2.events.StreamReset):
                    return "incomplete"
            connection.sendall(state.data_to_send())
    return "incomplete"


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
config = "defaults\n mode http\n timeout connect 5s\n timeout client 60s\n timeout server 60s\n"
config += f"frontend f\n bind 127.0.0.1:{port}\n default_backend b\n"
config += f"backend b\n server one 127.0.0.1:{server.server_port}\n"
pathlib.Path("haproxy.cfg").write_text(config)
libraries = {"LD_LIBRARY_PATH": os.path.dirname(glob.glob("usr/lib/*/liblua*")[0])}
haproxy = subprocess.Popen(["usr/sbin/haproxy", "-db", "-f", "haproxy.cfg"], env=os.environ | libraries)
for _ in range(200):
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port)).close()
        break
    time.sleep(0.1)
print(f"HTTP/1.1: a body cut by the server ends {read_http_1(port)}")
print(f"HTTP/2: a body cut by the server ends {read_http_2(port)}", flush=True)
haproxy.terminate()
haproxy.wait()
PYTHON

sed -n '/^# Seen:/,/^set/s/^#   //p' "$own" | diff - seen

#!/usr/bin/env bash
# Two answers that failed make nginx refuse everybody for ten seconds, although both servers work.
#
# Version: nginx 1.22.1-9+deb12u9 (Debian 12; unpacked, not installed), Python 3.11.7
# Behaviour: With two servers in an `upstream`, one connection that a server closes without an answer takes it out for ten
# seconds, by `max_fails=1`, the default. When both are out, every request gets 502 ("no live upstreams") and no server is
# asked. A single server is never taken out, nor is one with `max_fails=0`. A stream that is cut later does not count.
# Seen:
#   two servers, closed before the answer: 502 502, then 502 502 502 502, servers asked 0 times
#   two servers, cut in the answer: 200 200, then 200 200 200 200, servers asked 4 times
#   two servers with max_fails=0, closed before the answer: 502 502, then 200 200 200 200, servers asked 4 times
#   one server, closed before the answer: 502 502, then 200 200 200 200, servers asked 4 times
set -euo pipefail
packages="nginx=1.22.1-9+deb12u9"
[ -z "${NEWEST-}" ] || packages=$(sed 's/=[^ ]*//g' <<< "$packages")

own=$(realpath "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
{ apt-get download -qq $packages && for package in *.deb; do dpkg -x "$package" .; done; } 2> log || { cat log; exit 2; }

timeout 60 python3 - <<'PYTHON' | tee seen
import contextlib
import http.client
import http.server
import os
import pathlib
import socket
import subprocess
import threading
import time

CASES = {  # servers, an option of each, and what happens to two requests
    "two servers, closed before the answer": (2, "", "/closed"),
    "two servers, cut in the answer": (2, "", "/cut"),
    "two servers with max_fails=0, closed before the answer": (2, "max_fails=0", "/closed"),
    "one server, closed before the answer": (1, "", "/closed"),
}
asked = []


class Server(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        asked.append(self.path)
        self.close_connection = True
        if self.path == "/cut":
            self.send_response(200)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"4\r\nhalf\r\n")
        elif self.path == "/whole":
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

    def log_message(self, *_):
        pass


def ask(port, path):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.closing(connection):
        connection.request("POST", path, body=b"{}")
        return str(connection.getresponse().status)


servers = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) for _ in range(2)]
for server in servers:
    threading.Thread(target=server.serve_forever, daemon=True).start()
sockets = [socket.create_server(("127.0.0.1", 0)) for _ in CASES]
ports = [one.getsockname()[1] for one in sockets]
[one.close() for one in sockets]
folder = os.getcwd()
sites = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
for port, (n_servers, option, _) in zip(ports, CASES.values()):
    upstream = "".join(f"server 127.0.0.1:{one.server_port} {option};" for one in servers[:n_servers])
    sites += f"upstream loopback{port} {{ {upstream} }}\n"
    sites += f"server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://loopback{port}; }} }}\n"
config = f"daemon off; pid {folder}/pid; events {{}} http {{ access_log off; {sites} }}"
pathlib.Path("nginx.conf").write_text(config)
nginx = subprocess.Popen(["usr/sbin/nginx", "-p", folder, "-e", f"{folder}/errors", "-c", f"{folder}/nginx.conf"])
for _ in range(200):
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", ports[-1])).close()
        break
    time.sleep(0.1)
for port, (name, (*_, path)) in zip(ports, CASES.items()):
    failed = " ".join(ask(port, path) for _ in range(2))
    asked.clear()
    others = " ".join(ask(port, "/whole") for _ in range(4))
    print(f"{name}: {failed}, then {others}, servers asked {len(asked)} times")
nginx.terminate()
nginx.wait()
PYTHON

sed -n '/^# Seen:/,/^set/s/^#   //p' "$own" | diff - seen

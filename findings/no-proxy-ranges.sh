#!/usr/bin/env bash
# Some clients do not know ranges of addresses in NO_PROXY: what is for a machine nearby goes to the company's proxy.
#
# Version: httpx 0.28.1, httpx2 2.16.2, requests 2.34.2, ollama 0.6.3 (PyPI), Python 3.11.7, Node 20.20.2, curl 7.88.1
# Behaviour: `NO_PROXY=10.0.0.0/8` is usual behind a proxy; here 127.0.0.0/8 stands for it. curl, requests and httpx2 (which
# the SDKs of OpenAI and Anthropic use) go to the server itself. httpx (which ollama uses) and Python's urllib ask the
# proxy. Node's fetch never asks it. Nobody but Node goes to the server with the pattern `127.*`.
# Seen:
#   range:   curl server, urllib proxy, requests server, httpx proxy, httpx2 server, ollama proxy, node server
#   address: curl server, urllib server, requests server, httpx server, httpx2 server, ollama server, node server
#   pattern: curl proxy, urllib proxy, requests proxy, httpx proxy, httpx2 proxy, ollama proxy, node server
set -euo pipefail
packages="httpx==0.28.1 httpx2==2.16.2 requests==2.34.2 ollama==0.6.3"
[ -z "${NEWEST-}" ] || packages=$(sed 's/==[^ ]*//g' <<< "$packages")

own=$(realpath "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv --without-pip env &&
	python3 -m pip --python env/bin/python install -qq --no-compile $packages || exit 2

timeout 100 env/bin/python - <<'PYTHON' | tee seen
import http.server
import os
import subprocess
import sys
import threading

ASKS = {
    "curl": ["curl", "-s"],
    "urllib": "import sys, urllib.request; urllib.request.urlopen(sys.argv[1])",
    "requests": "import sys, requests; requests.get(sys.argv[1])",
    "httpx": "import sys, httpx; httpx.get(sys.argv[1])",
    "httpx2": "import sys, httpx2; httpx2.get(sys.argv[1])",
    "ollama": "import sys, ollama; ollama.Client(sys.argv[1]).list()",
    "node": ["node", "-e", "fetch(process.argv[1])"],
}
EXCEPTIONS = {"range": "127.0.0.0/8", "address": "127.0.0.1", "pattern": "127.*"}
asked = []


class Server(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        asked.append("proxy" if self.path.startswith("http://") else "server")
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(b'{"models": []}')

    def log_message(self, *_):
        pass


def listen():
    """A server that takes requests to itself, and those to a proxy."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


url, proxy = listen(), listen()
for name, exception in EXCEPTIONS.items():
    environment = {"PATH": os.environ["PATH"], "http_proxy": proxy, "HTTP_PROXY": proxy}
    environment |= {"no_proxy": exception, "NO_PROXY": exception}
    went = []
    for client, ask in ASKS.items():
        command = ask if isinstance(ask, list) else [sys.executable, "-c", ask]
        asked.clear()
        subprocess.run([*command, url], env=environment, stdout=subprocess.DEVNULL, timeout=60)
        went.append(f"{client} {' '.join(asked)}")
    print(f"{name + ':':8} {', '.join(went)}")
PYTHON

sed -n '/^# Seen:/,/^set/s/^#   //p' "$own" | diff - seen

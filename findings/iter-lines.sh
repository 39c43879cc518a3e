#!/usr/bin/env bash
# Clients that read lines with httpx or httpx2 take three characters within JSON for ends of lines.
#
# Version: httpx 0.28.1 and httpx2 2.16.2 (PyPI)
# Behaviour: JSON may have U+0085, U+2028 and U+2029 in its strings as they are (RFC 8259, section 7). `iter_lines()`, with
# which clients read server-sent events and lines of JSON, ends a line there, and the reader finds half a JSON text.
# Seen:
#   httpx, plain: 1 line
#   httpx, U+0085: 2 lines
#   httpx, U+2028: 2 lines
#   httpx, U+2029: 2 lines
#   httpx, U+2028 escaped: 1 line
#   httpx2, plain: 1 line
#   httpx2, U+0085: 2 lines
#   httpx2, U+2028: 2 lines
#   httpx2, U+2029: 2 lines
#   httpx2, U+2028 escaped: 1 line
set -euo pipefail
packages="httpx==0.28.1 httpx2==2.16.2"
[ -z "${NEWEST-}" ] || packages=$(sed 's/==[^ ]*//g' <<< "$packages")

own=$(realpath "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv --without-pip env &&
	python3 -m pip --python env/bin/python install -qq --no-compile $packages || exit 2

timeout 60 env/bin/python - <<'PYTHON' | tee seen
import http.server
import json
import threading

import httpx
import httpx2

TEXTS = {"plain": "plain", "U+0085": "a\u0085b", "U+2028": "a\u2028b", "U+2029": "a\u2029b"}
LINES = {name: json.dumps({"text": text}, ensure_ascii=False) for name, text in TEXTS.items()}
LINES["U+2028 escaped"] = json.dumps({"text": "a\u2028b"})


class Server(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        name = self.rfile.read(int(self.headers["content-length"])).decode()
        self.send_response(200)
        self.send_header("content-type", "application/x-ndjson")
        self.end_headers()
        self.wfile.write(LINES[name].encode() + b"\n")

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/"
for library in (httpx, httpx2):
    for name in LINES:
        with library.stream("POST", url, content=name) as response:
            n_lines = len([*response.iter_lines()])
        print(f"{library.__name__}, {name}: {n_lines} line{'s' * (n_lines > 1)}")
PYTHON

sed -n '/^# Seen:/,/^set/s/^#   //p' "$own" | diff - seen

#!/usr/bin/env bash
# requests reads a stream of events as Latin-1, unless the server says that it is UTF-8.
#
# Version: requests 2.34.2, httpx 0.28.1, httpx2 2.16.2 (PyPI)
# Behaviour: Server-sent events are always UTF-8, so a server need not say it. requests takes what begins with `text/` for
# Latin-1 all the same: `iter_lines(decode_unicode=True)` and `.text` give two letters for one. Neither httpx does. For lines
# of JSON without a charset, `decode_unicode=True` is ignored, and bytes come.
# Seen:
#   text/event-stream: requests 'Ã©', httpx 'é', httpx2 'é'
#   text/event-stream; charset=utf-8: requests 'é', httpx 'é', httpx2 'é'
#   application/x-ndjson: requests b'\xc3\xa9', httpx 'é', httpx2 'é'
set -euo pipefail
packages="requests==2.34.2 httpx==0.28.1 httpx2==2.16.2"
[ -z "${NEWEST-}" ] || packages=$(sed 's/==[^ ]*//g' <<< "$packages")

own=$(realpath "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv --without-pip env &&
	python3 -m pip --python env/bin/python install -qq --no-compile $packages || exit 2

PYTHONIOENCODING=utf-8 timeout 60 env/bin/python - <<'PYTHON' | tee seen
import http.server
import threading

import httpx
import httpx2
import requests

TYPES = ["text/event-stream", "text/event-stream; charset=utf-8", "application/x-ndjson"]


class Server(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("content-type", TYPES[int(self.path[1:])])
        self.end_headers()
        self.wfile.write("é\n".encode())

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
for number, content_type in enumerate(TYPES):
    url = f"http://127.0.0.1:{server.server_port}/{number}"
    lines = [f"requests {next(requests.get(url, stream=True).iter_lines(decode_unicode=True))!r}"]
    for library in (httpx, httpx2):
        with library.stream("GET", url) as response:
            lines.append(f"{library.__name__} {next(response.iter_lines())!r}")
    print(f"{content_type}: {', '.join(lines)}")
PYTHON

sed -n '/^# Seen:/,/^set/s/^#   //p' "$own" | diff - seen

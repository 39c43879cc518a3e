#!/usr/bin/env bash
# huggingface_hub says "Trying to resume download..." and starts again at the last multiple of 10 MiB, which may be zero.
#
# Version: huggingface_hub 2.4.0 (PyPI), without Xet
# Behaviour: What came is written in pieces of 10 MiB, and a piece that a cut connection left unfinished is thrown away. A
# line that breaks more often than every 10 MiB makes no progress, and the sixth break ends the download.
# Seen:
#   cut after 25 MB: asks from 0, asks from 20971520, file is whole
#   cut every 9 MB: asks from 0, asks from 0, asks from 0, asks from 0, asks from 0, asks from 0, RemoteProtocolError
set -euo pipefail
packages="huggingface_hub==2.4.0"
[ -z "${NEWEST-}" ] || packages=$(sed 's/==[^ ]*//g' <<< "$packages")

own=$(realpath "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv --without-pip env &&
	python3 -m pip --python env/bin/python install -qq --no-compile $packages || exit 2

timeout 60 env/bin/python - 2> log <<'PYTHON' | tee seen
import http.server
import os
import pathlib
import threading

DATA = os.urandom(30_000_000)
asked = []


class Server(http.server.BaseHTTPRequestHandler):
    """A hub with any file. It cuts the connection after `cut` bytes of an answer, `n_cuts` times."""

    protocol_version = "HTTP/1.1"
    cut = n_cuts = 0

    def do_HEAD(self, start=0):
        self.send_response(206 if start else 200)
        if start:
            self.send_header("content-range", f"bytes {start}-{len(DATA) - 1}/{len(DATA)}")
        self.send_header("content-length", str(len(DATA) - start))
        self.send_header("etag", f'"{self.n_cuts}"')
        self.send_header("x-repo-commit", "1" * 40)
        self.end_headers()

    def do_GET(self):
        start = int(self.headers.get("range", "bytes=0-").removeprefix("bytes=").removesuffix("-"))
        asked.append(f"asks from {start}")
        self.do_HEAD(start)
        is_cut = len(asked) <= self.n_cuts
        self.wfile.write(DATA[start : start + self.cut] if is_cut else DATA[start:])
        self.close_connection = True

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_DISABLE_XET": "1"}
os.environ |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HOME": os.getcwd()}
from huggingface_hub import hf_hub_download  # reads the environment

for name, Server.cut, Server.n_cuts in (("cut after 25 MB", 25_000_000, 1), ("cut every 9 MB", 9_000_000, 99)):
    asked.clear()
    try:
        path = hf_hub_download("someone/models", f"{Server.n_cuts}.gguf", cache_dir="cache")
        outcome = "file is whole" if pathlib.Path(path).read_bytes() == DATA else "file is wrong"
    except Exception as error:
        outcome = type(error).__name__
    print(f"{name}: {', '.join(asked)}, {outcome}")
PYTHON
grep -q "Trying to resume download" log

sed -n '/^# Seen:/,/^set/s/^#   //p' "$own" | diff - seen

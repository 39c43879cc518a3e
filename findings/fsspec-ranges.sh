#!/usr/bin/env bash
# fsspec gives a whole file for a part of it where the web server knows no ranges, and reads on from a file only for a while.
#
# Version: fsspec 2026.9.0 with aiohttp 3.14.5 (PyPI), Python 3.11.7's http.server
# Behaviour: `python3 -m http.server` answers a request for ten bytes with 200 and everything. `cat_file` and `cat_ranges` give
# that as the ten bytes, so a program that reads a file in parts gets it many times over. `open` raises ValueError, also
# where a file is read from beginning to end, but only behind its first block of 5 MiB: small test files pass.
# Seen:
#   cat_file, bytes 10 to 20: 20000000 bytes
#   cat_ranges, bytes 10 to 20: 20000000 bytes
#   open, a seek to byte 15000000: ValueError
#   open, every byte in order: ValueError
#   get_file: 20000000 bytes
set -euo pipefail
packages="fsspec==2026.9.0 aiohttp==3.14.5"
[ -z "${NEWEST-}" ] || packages=$(sed 's/==[^ ]*//g' <<< "$packages")

own=$(realpath "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv --without-pip env &&
	python3 -m pip --python env/bin/python install -qq --no-compile $packages || exit 2

timeout 60 env/bin/python - <<'PYTHON' | tee seen
import contextlib
import http.server
import pathlib
import threading

import fsspec

pathlib.Path("file").write_bytes(bytes(20_000_000))


class Server(http.server.SimpleHTTPRequestHandler):
    def copyfile(self, source, target):
        with contextlib.suppress(ConnectionError):
            super().copyfile(source, target)

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/file"
files = fsspec.filesystem("http")


def seek():
    with files.open(url) as opened:
        opened.seek(15_000_000)
        return opened.read(10)


def read_in_order():
    with files.open(url) as opened:
        return b"".join(iter(lambda: opened.read(1_000_000), b""))


def download():
    files.get_file(url, "copy")
    return pathlib.Path("copy").read_bytes()


WAYS = {
    "cat_file, bytes 10 to 20": lambda: files.cat_file(url, start=10, end=20),
    "cat_ranges, bytes 10 to 20": lambda: files.cat_ranges([url], [10], [20])[0],
    "open, a seek to byte 15000000": seek,
    "open, every byte in order": read_in_order,
    "get_file": download,
}
for name, read in WAYS.items():
    try:
        print(f"{name}: {len(read())} bytes")
    except ValueError:
        print(f"{name}: ValueError")
PYTHON

sed -n '/^# Seen:/,/^set/s/^#   //p' "$own" | diff - seen

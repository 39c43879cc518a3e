#!/usr/bin/env bash
# Ray Serve does not hold a stream back for a client that does not read: it makes all of it, and keeps it in memory.
#
# Version: ray 2.60.0 (PyPI)
# Behaviour: A deployment streams 200 MB in pieces of 100 kB. The client sends its request and reads nothing. The deployment is
# asked for all pieces at once. They wait in Ray's object store, and in the replica and the proxy, until the client reads or
# leaves. None of these has a bound of its own for a stream.
# Seen:
#   a client that has read nothing for 10 seconds: 200 of 200 MB were made
#   Ray's object store grew by more than 150 MB
set -euo pipefail
packages="ray[serve]==2.60.0"
[ -z "${NEWEST-}" ] || packages=$(sed 's/==[^ ]*//g' <<< "$packages")

own=$(realpath "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv --without-pip env &&
	python3 -m pip --python env/bin/python install -qq --no-compile $packages || exit 2

cat > unread.py <<'PYTHON'
import http.client
import os
import socket
import time

import ray
from ray import serve
from starlette.responses import PlainTextResponse, StreamingResponse

N_BYTES, N_PIECES = 100_000, 2000


@serve.deployment
class Model:
    def __init__(self):
        self.n_made = 0

    async def __call__(self, request):
        async def pieces():
            for self.n_made in range(1, N_PIECES + 1):
                yield bytes(N_BYTES)

        if request.query_params:
            return StreamingResponse(pieces())
        return PlainTextResponse(f"{self.n_made}")


def get(port, path):
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return connection


def n_made(port):
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    client.request("GET", "/")
    return int(client.getresponse().read())


def shared_mb():
    """What is in use of /dev/shm, where Ray has its object store."""
    system = os.statvfs("/dev/shm")
    return (system.f_blocks - system.f_bfree) * system.f_frsize / 1e6


with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
ray.init(
    address="local",
    include_dashboard=False,
    num_cpus=4,
    logging_level="error",
    log_to_driver=False,
    _temp_dir=os.getcwd(),
)
serve.start(http_options={"host": "127.0.0.1", "port": port})
serve.run(Model.bind())
assert n_made(port) == 0
before = shared_mb()
client = get(port, "/?stream=1")
time.sleep(10)
made = n_made(port) * N_BYTES // 10**6
print(f"a client that has read nothing for 10 seconds: {made} of {N_PIECES * N_BYTES // 10**6} MB were made")
grew = shared_mb() - before
words = "more than 150" if grew > 150 else f"{grew:.0f}"
print(f"Ray's object store grew by {words} MB")
serve.shutdown()
ray.shutdown()
PYTHON
timeout 110 env/bin/python unread.py 2> log | grep -v raylet | tee seen

sed -n '/^# Seen:/,/^set/s/^#   //p' "$own" | diff - seen

#!/usr/bin/env bash
# Ray Serve cancels the call of a request whose client left. It does not cancel a call whose awaiting task is cancelled.
#
# Version: ray 2.60.0 (PyPI)
# Behaviour: A deployment calls another one. If the client of Serve's proxy leaves, the call is cancelled. If a task that
# awaits a call is cancelled, as in a replica that listens itself, the call goes on to its end.
# `DeploymentResponse.cancel()` cancels it.
# Seen:
#   a task that awaits it is cancelled: the call goes on to its end
#   cancel(): the call is cancelled
#   the client of a proxy leaves: the call is cancelled
set -euo pipefail
packages="ray[serve]==2.60.0"
[ -z "${NEWEST-}" ] || packages=$(sed 's/==[^ ]*//g' <<< "$packages")

own=$(realpath "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv --without-pip env &&
	python3 -m pip --python env/bin/python install -qq --no-compile $packages || exit 2

cat > calls.py <<'PYTHON'
import asyncio
import contextlib
import http.client
import os
import socket
import time

import ray
from ray import serve


@serve.deployment
class Worker:
    def __init__(self):
        self.ends = {}

    async def work(self, name):
        self.ends[name] = "runs"
        try:
            await asyncio.sleep(8)
            self.ends[name] = "goes on to its end"
        except asyncio.CancelledError:
            self.ends[name] = "is cancelled"
            raise

    async def tell(self):
        return self.ends


@serve.deployment
class Front:
    def __init__(self, worker):
        self.worker = worker

    async def __call__(self, request):
        return await self.worker.work.remote("the client of a proxy leaves")

    async def call(self, name):
        return await self.worker.work.remote(name)

    async def act(self):
        task = asyncio.create_task(self.call("a task that awaits it is cancelled"))
        awaited = self.worker.work.remote("cancel()")
        waiting = asyncio.ensure_future(self.outcome(awaited))
        await asyncio.sleep(2)
        task.cancel()
        awaited.cancel()
        await asyncio.wait([task, waiting])

    async def outcome(self, response):
        with contextlib.suppress(BaseException):
            await response


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
front = serve.run(Front.bind(Worker.bind()))
client = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
client.request("GET", "/")
with contextlib.suppress(TimeoutError):
    client.getresponse()
client.close()
front.act.remote().result()
worker = serve.get_deployment_handle("Worker", "default")
until = time.monotonic() + 30
while "runs" in (ends := worker.tell.remote().result()).values() and time.monotonic() < until:
    time.sleep(0.5)
for name, end in sorted(ends.items()):
    print(f"{name}: the call {end}", flush=True)
PYTHON
RAY_USAGE_STATS_ENABLED=0 RAY_SERVE_LOG_TO_STDERR=0 timeout 100 env/bin/python calls.py > seen 2> log || { cat log; exit 2; }
cat seen

sed -n '/^# Seen:/,/^set/s/^#   //p' "$own" | diff - seen

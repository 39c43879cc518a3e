#!/usr/bin/env bash
# Ray Serve stops an old replica before a new one is there. If the new one cannot start, one replica less serves, for good.
#
# Version: ray 2.60.0 (PyPI)
# Behaviour: A deployment is updated, and the new replicas' constructor fails. With one replica, the only one was stopped
# first: all requests get 503. With two, one of the old ones stays. `max_surge_percent=100` starts new ones first, so the old
# one stays. The application is DEPLOY_FAILED each time, and nothing is rolled back.
# Seen:
#   one replica: DEPLOY_FAILED, 0 old ones are left, status 503
#   two replicas: DEPLOY_FAILED, 1 old one is left, status 200
#   one replica, max_surge_percent=100: DEPLOY_FAILED, 1 old one is left, status 200
set -euo pipefail
packages="ray[serve]==2.60.0"
[ -z "${NEWEST-}" ] || packages=$(sed 's/==[^ ]*//g' <<< "$packages")

own=$(realpath "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv --without-pip env &&
	python3 -m pip --python env/bin/python install -qq --no-compile $packages || exit 2

cat > update.py <<'PYTHON'
import contextlib
import http.client
import os
import socket
import time

import ray
from ray import serve

CASES = {
    "one replica": {"num_replicas": 1},
    "two replicas": {"num_replicas": 2},
    "one replica, max_surge_percent=100": {"num_replicas": 1, "max_surge_percent": 100},
}


@serve.deployment(graceful_shutdown_timeout_s=1)
class Model:
    def __init__(self, path):
        if path == "missing":
            raise RuntimeError("there is no such file")

    def __call__(self, request):
        return "answer"


def ask(port, name):
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    with contextlib.closing(client):
        client.request("GET", f"/{name}")
        return client.getresponse().status


with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
ray.init(
    address="local",
    include_dashboard=False,
    num_cpus=8,
    logging_level="error",
    log_to_driver=False,
    _temp_dir=os.getcwd(),
)
serve.start(http_options={"host": "127.0.0.1", "port": port})
names = {title: f"app{number}" for number, title in enumerate(CASES)}


def deploy(path):
    serve.run_many(
        [
            serve.RunTarget(Model.options(**options).bind(path), names[title], f"/{names[title]}")
            for title, options in CASES.items()
        ]
    )


deploy("there")
assert [ask(port, name) for name in names.values()] == [200, 200, 200]
with contextlib.suppress(RuntimeError):
    deploy("missing")
until = time.monotonic() + 40
while time.monotonic() < until:
    states = serve.status().applications
    if all(states[name].status == "DEPLOY_FAILED" for name in names.values()):
        break
    time.sleep(0.5)
time.sleep(3)
for title, name in names.items():
    state = serve.status().applications[name]
    n_left = sum(state.deployments["Model"].replica_states.values())
    left = "1 old one is left" if n_left == 1 else f"{n_left} old ones are left"
    print(f"{title}: {state.status.name}, {left}, status {ask(port, name)}", flush=True)
PYTHON
RAY_USAGE_STATS_ENABLED=0 RAY_SERVE_LOG_TO_STDERR=0 timeout 110 env/bin/python update.py > seen 2> log || { cat log; exit 2; }
cat seen

sed -n '/^# Seen:/,/^set/s/^#   //p' "$own" | diff - seen

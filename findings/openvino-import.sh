#!/usr/bin/env bash
# `import openvino` forks the program, and the copy tells Google Analytics that there was an import.
#
# Version: openvino 2026.4.1, openvino-telemetry 2025.2.0 (PyPI), Python 3.11.7
# Behaviour: The import alone forks a process that asks for www.google-analytics.com, as long as nobody has opted out in a
# file of the home folder. A program with threads or much memory is copied, too. `opt_in_out --opt_out` writes that
# file. Without the package openvino-telemetry the import works and tells nobody. Here a proxy on this machine answers.
# Seen:
#   by default:        1 fork, asks for www.google-analytics.com:443
#   opted out:         0 forks, asks for nothing
#   without telemetry: 0 forks, asks for nothing
set -euo pipefail
packages="openvino==2026.4.1 openvino-telemetry==2025.2.0"
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
import shutil
import subprocess
import sys
import threading
import time

asked, answered = [], threading.Event()


class Proxy(http.server.BaseHTTPRequestHandler):
    def do_CONNECT(self):
        asked.append(self.path)
        self.send_error(403)
        answered.set()

    def log_message(self, *_):
        pass


proxy = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
threading.Thread(target=proxy.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{proxy.server_port}"
environment = {"PATH": os.environ["PATH"], "HOME": os.getcwd(), "https_proxy": url, "http_proxy": url}
IMPORT = """
import os, time
os.register_at_fork(before=lambda: print("fork", flush=True))
import openvino
time.sleep(3)
"""


def see(name):
    asked.clear()
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], env=environment, stdout=subprocess.PIPE, text=True, timeout=60
    )
    time.sleep(1)
    forks = done.stdout.count("fork\n")
    hosts = ", ".join(sorted(set(asked))) or "nothing"
    print(f"{name + ':':18} {forks} fork{'s' * (forks != 1)}, asks for {hosts}", flush=True)


see("by default")
subprocess.run(
    ["env/bin/opt_in_out", "--opt_out"], env=environment, stdout=subprocess.DEVNULL, check=True, timeout=60
)
see("opted out")
shutil.rmtree("intel", ignore_errors=True)
subprocess.run(
    [sys.executable, "-c", "import openvino_telemetry, shutil; shutil.rmtree(openvino_telemetry.__path__[0])"],
    env=environment,
    check=True,
    timeout=60,
)
see("without telemetry")
PYTHON

sed -n '/^# Seen:/,/^set/s/^#   //p' "$own" | diff - seen

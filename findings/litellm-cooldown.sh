#!/usr/bin/env bash
# LiteLLM's proxy takes one request's 404 for the server's failure: for five seconds nobody gets the model.
#
# Version: litellm 1.108.7, openai 3.57.0 (PyPI)
# Behaviour: A model has one server, which answers one request with the status below, and all others with 200. After 401 and
# 404 the proxy refuses the next request with a 429 of its own and does not ask the server, although it is the only one.
# `cooldown_time: 0` changes nothing; `disable_cooldowns: true` does. Other errors are no reason, but 403,
# 429 and 503 are asked three times.
# Seen:
#   defaults, 400: asked once, the next request 200
#   defaults, 401: asked once, the next request 429 No deployments available for selected model, Try again in 5 seconds
#   defaults, 403: asked three times, the next request 200
#   defaults, 404: asked once, the next request 429 No deployments available for selected model, Try again in 5 seconds
#   defaults, 429: asked three times, the next request 200
#   defaults, 503: asked three times, the next request 200
#   cooldown_time: 0, 404: asked once, the next request 429 No deployments available for selected model, Try again in 5 seconds
#   disable_cooldowns: true, 404: asked once, the next request 200
set -euo pipefail
packages="litellm[proxy]==1.108.7 openai==3.57.0"
[ -z "${NEWEST-}" ] || packages=$(sed 's/==[^ ]*//g' <<< "$packages")

own=$(realpath "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv --without-pip env &&
	python3 -m pip --python env/bin/python install -qq --no-compile $packages || exit 2

cat > ask.py <<'PYTHON'
import contextlib
import http.client
import http.server
import json
import os
import secrets
import socket
import subprocess
import threading
import time

KEY = f"sk-{secrets.token_hex(16)}"
ALL = (400, 401, 403, 404, 429, 503)
CASES = {"defaults": ALL, "cooldown_time: 0": (404,), "disable_cooldowns: true": (404,)}
TIMES = {1: "once", 3: "three times"}
ANSWER = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "usage": {"total_tokens": 2},
          "choices": [{"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}]}


class Server(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    n_asked = 0

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        Server.n_asked += 1
        fails = request["messages"][0]["content"] == "fail"
        error = {"error": {"message": "no", "type": "x", "code": "y"}}
        body = json.dumps(error if fails else ANSWER).encode()
        self.send_response(int(request["model"][-3:]) if fails else 200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def running(setting, statuses, server_port):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    models = [
        {"model_name": f"m{status}", "litellm_params": {
            "model": f"openai/m{status}", "api_base": f"http://127.0.0.1:{server_port}/v1", "api_key": "none"}}
        for status in statuses
    ]
    name, _, value = setting.partition(": ")
    settings = {name: json.loads(value)} if value else {}
    with open("config.yaml", "w") as file:
        json.dump({"model_list": models, "router_settings": settings}, file)
    command = ["env/bin/litellm", "--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port)]
    changed = {"LITELLM_MASTER_KEY": KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with open("log", "w") as log:
        proxy = subprocess.Popen(command, env=os.environ | changed, stdout=log, stderr=log)
    try:
        for _ in range(120):
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port)).close()
                break
            time.sleep(0.25)
        yield port
    finally:
        proxy.terminate()
        proxy.wait(20)


def ask(port, status, content):
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    body = {"model": f"m{status}", "messages": [{"role": "user", "content": content}]}
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    with contextlib.closing(client):
        client.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        answer = client.getresponse()
        return answer.status, json.loads(answer.read())


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
for setting, statuses in CASES.items():
    with running(setting, statuses, server.server_port) as port:
        for status in statuses:
            Server.n_asked = 0
            assert ask(port, status, "fail")[0] == status
            times = TIMES[Server.n_asked]
            next_status, answer = ask(port, status, "work")
            said = f" {answer['error']['message'].partition('. ')[0]}" if next_status != 200 else ""
            print(f"{setting}, {status}: asked {times}, the next request {next_status}{said}", flush=True)
PYTHON
timeout 110 env/bin/python ask.py | tee seen

sed -n '/^# Seen:/,/^set/s/^#   //p' "$own" | diff - seen

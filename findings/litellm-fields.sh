#!/usr/bin/env bash
# LiteLLM's proxy drops who asks and how urgently, hides `Retry-After`, and its /health lets each model generate.
#
# Version: litellm 1.108.7, openai 3.57.0 (PyPI)
# Behaviour: Fields that no protocol has are passed on, and so is OpenAI's `safety_identifier`. `user` and `priority` are not, so
# the server cannot tell the proxy's users apart. A 429's `Retry-After` reaches the client under another name. `GET /health`
# asks each model for 16 tokens: a model that is loaded on demand is loaded for it.
# Seen:
#   passed on: max_tokens, messages, min_p, model, safety_identifier, seed, top_k
#   dropped: priority, user
#   a 429 has the header: llm_provider-retry-after
#   GET /health asks for: first 16 tokens, second 16 tokens
set -euo pipefail
packages="litellm[proxy]==1.108.7 openai==3.57.0"
[ -z "${NEWEST-}" ] || packages=$(sed 's/==[^ ]*//g' <<< "$packages")

own=$(realpath "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv --without-pip env &&
	python3 -m pip --python env/bin/python install -qq --no-compile $packages || exit 2

cat > fields.py <<'PYTHON'
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
ANSWER = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "usage": {"total_tokens": 2},
          "choices": [{"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}]}
CHAT = {"model": "first", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
MORE = {"user": "ana", "priority": 3, "safety_identifier": "ana", "seed": 1, "top_k": 5, "min_p": 0.1}


class Server(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    asked = []

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        Server.asked.append(request)
        is_busy = request["messages"][0]["content"] == "busy"
        body = json.dumps({"error": {"message": "busy"}} if is_busy else ANSWER).encode()
        self.send_response(429 if is_busy else 200)
        self.send_header("retry-after", "1")
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def running(server_port):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    models = [
        {"model_name": name, "litellm_params": {
            "model": f"openai/{name}", "api_base": f"http://127.0.0.1:{server_port}/v1", "api_key": "none"}}
        for name in ("first", "second")
    ]
    with open("config.yaml", "w") as file:
        json.dump({"model_list": models}, file)
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
        proxy.kill()
        proxy.wait()


def ask(port, method, path, body=None):
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    with contextlib.closing(client):
        client.request(method, path, body and json.dumps(body), headers)
        answer = client.getresponse()
        answer.read()
        return answer


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
with running(server.server_port) as port:
    assert ask(port, "POST", "/v1/chat/completions", CHAT | MORE).status == 200
    (request,) = Server.asked
    print("passed on:", ", ".join(sorted(request)))
    print("dropped:", ", ".join(sorted((CHAT | MORE).keys() - request.keys())), flush=True)
    refused = ask(port, "POST", "/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": "busy"}]})
    assert refused.status == 429
    print("a 429 has the header:", ", ".join(name for name, _ in refused.getheaders() if "retry" in name), flush=True)
    Server.asked.clear()
    assert ask(port, "GET", "/health").status == 200
    print("GET /health asks for:", ", ".join(sorted({f"{one['model']} {one['max_tokens']} tokens" for one in Server.asked})))
PYTHON
timeout 110 env/bin/python fields.py | tee seen

sed -n '/^# Seen:/,/^set/s/^#   //p' "$own" | diff - seen

#!/usr/bin/env bash
# vllm-router asks every worker for the prompt's tokens before each answer.
#
# Version: vllm-router 0.1.17 (PyPI)
# Behaviour: With `cache_aware`, its default policy, an answer from one of two workers costs five requests: each worker is asked
# `/v1/chat/completions/render` and then `/tokenize`, and again for the next answer, also where all answer 404. With any
# policy it adds ten fields that the client did not send, which a worker that takes only what it knows refuses.
# Seen:
#   cache_aware, answer 1: 2 /tokenize, 1 /v1/chat/completions, 2 /v1/chat/completions/render
#   cache_aware, answer 2: 2 /tokenize, 1 /v1/chat/completions, 2 /v1/chat/completions/render
#   round_robin, answer 1: 1 /v1/chat/completions
#   round_robin, answer 2: 1 /v1/chat/completions
#   added: continue_final_message, ignore_eos, include_reasoning, logprobs, no_stop_trim
#   added: return_hidden_states, separate_reasoning, skip_special_tokens, stream, stream_reasoning
set -euo pipefail
packages="vllm-router==0.1.17"
[ -z "${NEWEST-}" ] || packages=$(sed 's/==[^ ]*//g' <<< "$packages")

own=$(realpath "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv --without-pip env &&
	python3 -m pip --python env/bin/python install -qq --no-compile $packages || exit 2

timeout 100 env/bin/python - <<'PYTHON' | tee seen
import collections
import contextlib
import http.server
import json
import socket
import subprocess
import threading
import time
import urllib.request

MESSAGE = {"role": "assistant", "content": "Hello"}
ANSWER = {
    "id": "1", "object": "chat.completion", "created": 1, "model": "m",
    "choices": [{"index": 0, "message": MESSAGE, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}
asked = collections.Counter()
fields = set()


class Worker(http.server.BaseHTTPRequestHandler):
    """Knows models and chats, and answers 404 to all else."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        models = {"object": "list", "data": [{"id": "m", "object": "model"}]}
        self.answer(200, models if self.path == "/v1/models" else {})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        asked[self.path] += 1
        if self.path == "/v1/chat/completions":
            fields.update(body)
            self.answer(200, ANSWER)
        else:
            self.answer(404, {"error": {"message": "not here"}})

    def answer(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


workers = []
for _ in range(2):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Worker)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    workers.append(f"http://127.0.0.1:{server.server_port}")
chat = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
for policy in ("cache_aware", "round_robin"):
    port = free_port()
    command = ["env/bin/vllm-router", "--host", "127.0.0.1", "--port", port, "--worker-urls", *workers, "--policy", policy]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", free_port()]
    router = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(200):
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
            break
        time.sleep(0.1)
    for n in (1, 2):
        asked.clear()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(chat).encode(), headers)
        urllib.request.urlopen(request, timeout=20).read()
        print(f"{policy}, answer {n}: {', '.join(f'{count} {path}' for path, count in sorted(asked.items()))}")
    router.kill()
    router.wait()
added = sorted(fields - chat.keys())
for some in (added[:5], added[5:]):
    print(f"added: {', '.join(some)}")
PYTHON

sed -n '/^# Seen:/,/^set/s/^#   //p' "$own" | diff - seen

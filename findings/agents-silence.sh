#!/usr/bin/env bash
# To coding agents, a stream that only has comments is silent: they give up while a long prompt is computed.
#
# Version: @openai/codex 0.171.0, @qwen-code/qwen-code 0.24.4 and node 22.23.3 (npm)
# Behaviour: Both end a stream in which no event came for their idle limit (300 and 240 seconds by default, 3 here). The comments
# of server-sent events, with which servers and proxies keep connections alive, do not count. Events without content do: a
# repeated `response.in_progress` for Codex, a chunk with an empty `delta` for Qwen Code.
# Seen:
#   codex, a comment each second: gives up, 1 request
#   codex, an event each second: says done
#   qwen, a comment each second: gives up, 3 requests
#   qwen, an event each second: says done
set -euo pipefail
packages="node@22.23.3 @openai/codex@0.171.0 @qwen-code/qwen-code@0.24.4"
[ -z "${NEWEST-}" ] || packages=$(sed 's/@[0-9][^ ]*/@latest/g' <<< "$packages")

own=$(realpath "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm install --silent $packages || exit 2

timeout 110 python3 - <<'PYTHON' | tee seen
import collections
import concurrent.futures
import http.server
import json
import os
import pathlib
import subprocess
import tempfile
import threading
import time

RESPONSE = {"id": "1", "object": "response", "created_at": 1, "model": "m", "status": "in_progress", "output": [],
            "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
ITEM = {"id": "2", "type": "message", "role": "assistant", "status": "completed",
        "content": [{"type": "output_text", "text": "done", "annotations": []}]}
USAGE = {"input_tokens": 1, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": 1,
         "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 2}
COMPLETED = {**RESPONSE, "status": "completed", "output": [ITEM], "usage": USAGE}


def response_event(kind, **fields):
    return f"event: {kind}\ndata: {json.dumps({'type': kind, 'sequence_number': 0, **fields})}\n\n"


def chunk(delta, reason=None):
    choices = [{"index": 0, "delta": delta, "finish_reason": reason}]
    return f"data: {json.dumps({'id': '1', 'object': 'chat.completion.chunk', 'created': 1, 'model': 'm', 'choices': choices})}\n\n"


WAITING = {"codex": response_event("response.in_progress", response=RESPONSE), "qwen": chunk({})}
ENDS = {
    "codex": response_event("response.output_item.done", output_index=0, item=ITEM)
    + response_event("response.completed", response=COMPLETED),
    "qwen": chunk({"role": "assistant", "content": "done"}) + chunk({}, "stop") + "data: [DONE]\n\n",
}
CODEX = """
model = "m"
model_provider = "here"
analytics = {enabled = false}
[model_providers.here]
name = "here"
base_url = "URL"
wire_api = "responses"
env_key = "OPENAI_API_KEY"
stream_idle_timeout_ms = 3000
stream_max_retries = 0
"""
COMMANDS = {
    "codex": ["codex", "exec", "--skip-git-repo-check", "Say done."],
    "qwen": ["qwen", "--auth-type", "openai", "-p", "Say done."],
}
n_requests = collections.Counter()


class Server(http.server.BaseHTTPRequestHandler):
    """Computes for six seconds. The path begins with the agent and with what it hears meanwhile."""

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        _, agent, hears, *_ = self.path.split("/")
        n_requests[agent, hears] += 1
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        try:
            for _ in range(6):
                time.sleep(1)
                self.wfile.write((": ping\n\n" if hears == "comment" else WAITING[agent]).encode())
            self.wfile.write(ENDS[agent].encode())
        except ConnectionError:
            pass

    def log_message(self, *_):
        pass


def run(agent, hears):
    home = pathlib.Path(tempfile.mkdtemp(dir="."), "home").absolute()
    url = f"http://127.0.0.1:{server.server_port}/{agent}/{hears}/v1"
    (home / ".codex").mkdir(parents=True)
    (home / ".codex/config.toml").write_text(CODEX.replace("URL", url))
    environment = {
        "PATH": f"{os.getcwd()}/node_modules/.bin:{os.environ['PATH']}", "HOME": str(home),
        "OPENAI_API_KEY": "none", "OPENAI_BASE_URL": url, "OPENAI_MODEL": "m", "QWEN_STREAM_IDLE_TIMEOUT_MS": "3000",
        "HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1",  # nothing else is asked
    }  # fmt: skip
    ran = subprocess.run(COMMANDS[agent], env=environment, cwd=home, stdin=subprocess.DEVNULL,
                         stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=100)
    n = n_requests[agent, hears]
    outcome = "says done" if ran.stdout.strip() == "done" else f"gives up, {n} request{'s' * (n > 1)}"
    return f"{agent}, {'a comment' if hears == 'comment' else 'an event'} each second: {outcome}"


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
with concurrent.futures.ThreadPoolExecutor(2) as pool:
    runs = [pool.submit(run, agent, hears) for agent in COMMANDS for hears in ("comment", "event")]
    print(*[one.result() for one in runs], sep="\n")
PYTHON

sed -n '/^# Seen:/,/^set/s/^#   //p' "$own" | diff - seen

#!/usr/bin/env bash
# Anthropic's tool runner sends only the tool's result with its second request, and expects the server to know the rest.
#
# Version: anthropic 2.14.0 (PyPI)
# Behaviour: The first request asks for a thread by itself. The second one continues the thread by the message's id, without
# the question and the tools. A server that ignores the field `thread`, as servers ignore what they do not know, answers a
# lone tool result with status 200. A refusal with the code `thread_unsupported_request` makes it send everything.
# Seen:
#   server that ignores threads:
#   user, with tools, thread create
#   user, no tools, thread continue
#   server that refuses threads:
#   user, with tools, thread create
#   user, with tools, no thread
#   user assistant user, with tools, no thread
set -euo pipefail
packages="anthropic==2.14.0"
[ -z "${NEWEST-}" ] || packages=$(sed 's/==[^ ]*//g' <<< "$packages")

own=$(realpath "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv --without-pip env &&
	python3 -m pip --python env/bin/python install -qq --no-compile $packages || exit 2

timeout 60 env/bin/python - <<'PYTHON' | tee seen
import http.server
import json
import threading

import anthropic

REFUSAL = {
    "type": "invalid_request_error",
    "message": "no threads here",
    "details": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1, "b": 2}}
TEXT = {"type": "text", "text": "3"}


class Server(http.server.BaseHTTPRequestHandler):
    refuses = False

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        messages, thread = body["messages"], body.get("thread")
        roles = " ".join(message["role"] for message in messages)
        tools = "with tools" if body.get("tools") else "no tools"
        print(f"{roles}, {tools}, {'thread ' + thread['type'] if thread else 'no thread'}", flush=True)
        if thread and self.refuses:
            return self.answer(400, {"type": "error", "error": REFUSAL})
        has_result = "tool_result" in json.dumps(messages)
        self.answer(200, {
            "id": "msg_1", "type": "message", "role": "assistant", "model": "m", "stop_sequence": None,
            "content": [TEXT if has_result else CALL], "stop_reason": "end_turn" if has_result else "tool_use",
            "usage": {"input_tokens": 1, "output_tokens": 1},
        })

    def answer(self, status, body):
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_):
        pass


@anthropic.beta_tool
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.server_port}", api_key="none")
for Server.refuses in (False, True):
    print(f"server that {'refuses' if Server.refuses else 'ignores'} threads:", flush=True)
    question = {"role": "user", "content": "What is 1 + 2?"}
    client.beta.messages.tool_runner(model="m", max_tokens=99, tools=[add], messages=[question]).until_done()
PYTHON

sed -n '/^# Seen:/,/^set/s/^#   //p' "$own" | diff - seen

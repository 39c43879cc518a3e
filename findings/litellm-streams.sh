#!/usr/bin/env bash
# LiteLLM's proxy ends half a stream as if it were whole, and lets the server compute on for clients that left.
#
# Version: litellm 1.108.7, openai 3.57.0 (PyPI)
# Behaviour: If a server's stream ends without `finish_reason` and `[DONE]`, the proxy adds both. If the stream is cut off, the
# proxy sends an error event. If a client leaves, the server's connection is closed with the stream's next event, and before
# the first event not at all. It is not closed either while a client waits for a whole answer.
# Seen:
#   ended without its last event: finish_reason stop, [DONE]
#   cut off: an error event
#   the client leaves a stream that says something every half second: the server is told
#   the client leaves before a stream's first event: the server is not told within five seconds
#   the client leaves before a whole answer: the server is not told within five seconds
set -euo pipefail
packages="litellm[proxy]==1.108.7 openai==3.57.0"
[ -z "${NEWEST-}" ] || packages=$(sed 's/==[^ ]*//g' <<< "$packages")

own=$(realpath "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv --without-pip env &&
	python3 -m pip --python env/bin/python install -qq --no-compile $packages || exit 2

cat > streams.py <<'PYTHON'
import contextlib
import http.client
import http.server
import json
import os
import secrets
import select
import socket
import subprocess
import threading
import time

KEY = f"sk-{secrets.token_hex(16)}"
LEAVES = {
    "slow": "a stream that says something every half second",
    "silent": "before a stream's first event",
    "whole": "before a whole answer",
}
WAITS_S = 5


class Server(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    begun = threading.Event()
    told = threading.Event()

    def do_POST(self):
        model = json.loads(self.rfile.read(int(self.headers["content-length"])))["model"]
        self.close_connection = True
        if model != "whole":
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
        if model not in ("whole", "silent"):
            self.say("half")
        Server.begun.set()
        if model in LEAVES:
            self.wait_until_left(model)
        elif model == "ended":
            self.wfile.write(b"0\r\n\r\n")

    def say(self, text):
        delta = {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": None}
        chunk = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [delta]}
        event = f"data: {json.dumps(chunk)}\n\n".encode()
        self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))

    def wait_until_left(self, model):
        for _ in range(4 * WAITS_S):
            if select.select([self.connection], [], [], 0.5)[0]:
                Server.told.set()
                return
            if model == "slow":
                with contextlib.suppress(OSError):
                    self.say("more")

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def running(server_port):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    models = [
        {"model_name": name, "litellm_params": {
            "model": f"openai/{name}", "api_base": f"http://127.0.0.1:{server_port}/v1", "api_key": "none"}}
        for name in ("ended", "cut", *LEAVES)
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


def ask(port, name, stream=True):
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    body = {"model": name, "messages": [{"role": "user", "content": "Hello"}], "stream": stream}
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    client.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    return client


def read(port, name):
    with contextlib.closing(ask(port, name)) as client:
        *_, last_but_one, last = (line[6:] for line in client.getresponse().read().decode().split("\n") if line)
    if last == "[DONE]":
        return f"finish_reason {json.loads(last_but_one)['choices'][0].get('finish_reason')}, [DONE]"
    return "an error event" if "error" in json.loads(last) else last


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
with running(server.server_port) as port:
    print("ended without its last event:", read(port, "ended"), flush=True)
    print("cut off:", read(port, "cut"), flush=True)
    for name, words in LEAVES.items():
        Server.begun.clear()
        Server.told.clear()
        client = ask(port, name, stream=name != "whole")
        assert Server.begun.wait(20)
        if name == "slow":
            client.getresponse().readline()
        client.close()
        told = "told" if Server.told.wait(WAITS_S) else "not told within five seconds"
        print(f"the client leaves {words}: the server is {told}", flush=True)
PYTHON
timeout 110 env/bin/python streams.py | tee seen

sed -n '/^# Seen:/,/^set/s/^#   //p' "$own" | diff - seen

#!/usr/bin/env bash
# The SDKs obey `Retry-After` up to very different bounds, and sleep for days without a word.
#
# Version: openai 3.57.0 and anthropic 2.14.0 (PyPI), openai 7.59.0, @anthropic-ai/sdk 1.14.0 and node 22.23.3 (npm)
# Behaviour: anthropic sleeps as long as it is told, on Node up to 24.8 days, and says nothing meanwhile. openai for Python
# obeys up to 120 seconds and ends the call otherwise. openai for Node obeys up to 60 seconds, and tries again at once
# otherwise. All four end the call where the answer has `x-should-retry: false` ("never" below). On Node 20, npm takes openai
# 6.49.0 without a word, as newer ones want Node 22: that one obeys any value.
# Seen:
#   openai for Python, 60: 2 requests, slept 60 s
#   openai for Python, 130: 1 requests, slept 0 s
#   openai for Python, 86400: 1 requests, slept 0 s
#   openai for Python, 2592000: 1 requests, slept 0 s
#   openai for Python, never: 1 requests, slept 0 s
#   anthropic for Python, 60: 2 requests, slept 60 s
#   anthropic for Python, 130: 2 requests, slept 130 s
#   anthropic for Python, 86400: 2 requests, slept 86400 s
#   anthropic for Python, 2592000: 2 requests, slept 2592000 s
#   anthropic for Python, never: 1 requests, slept 0 s
#   openai for Node, 60: 2 requests, slept 60 s
#   openai for Node, 130: 2 requests, slept 0 s
#   openai for Node, 86400: 2 requests, slept 0 s
#   openai for Node, 2592000: 2 requests, slept 0 s
#   openai for Node, never: 1 requests, slept 0 s
#   anthropic for Node, 60: 2 requests, slept 60 s
#   anthropic for Node, 130: 2 requests, slept 130 s
#   anthropic for Node, 86400: 2 requests, slept 86400 s
#   anthropic for Node, 2592000: 2 requests, slept 0 s
#   anthropic for Node, never: 1 requests, slept 0 s
set -euo pipefail
python_packages="openai==3.57.0 anthropic==2.14.0"
node_packages="node@22.23.3 openai@7.59.0 @anthropic-ai/sdk@1.14.0"
if [ -n "${NEWEST-}" ]; then
	python_packages=$(sed 's/==[^ ]*//g' <<< "$python_packages")
	node_packages=$(sed 's/@[0-9][^ ]*/@latest/g' <<< "$node_packages")
fi

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
own=$(realpath "$0")
cd "$folder"
{
	python3 -m venv --without-pip env &&
		python3 -m pip --python env/bin/python install -qq --no-compile $python_packages &&
		npm install --silent $node_packages
} || exit 2
export PATH=$folder/node_modules/.bin:$PATH

# Each client has its defaults, but for one retry. Long sleeps are noted, and not slept.
cat > client.mjs <<'NODE'
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";

const [url, ...waits] = process.argv.slice(2);
const options = { apiKey: "none", maxRetries: 1, timeout: 5000 };
const messages = [{ role: "user", content: "Hello" }];
const asks = {
  openai: (baseURL) => new OpenAI({ baseURL, ...options }).chat.completions.create({ model: "m", messages }),
  anthropic: (baseURL) => new Anthropic({ baseURL, ...options }).messages.create({ model: "m", max_tokens: 9, messages }),
};
const real = globalThis.setTimeout;
let slept;
globalThis.setTimeout = (call, ms, ...rest) => {
  if (ms < 10_000) return real(call, ms, ...rest);
  slept += ms / 1000;
  return real(call, 0, ...rest);
};
for (const [name, ask] of Object.entries(asks)) {
  for (const wait of waits) {
    slept = 0;
    await ask(`${url}/Node/${name}/${wait}`).catch(() => {});
    console.log(Math.trunc(slept));
  }
}
process.exit();
NODE

timeout 100 env/bin/python - <<'PYTHON' | tee seen
import http.server
import subprocess
import threading
import time

import anthropic
import openai

WAITS = ["60", "130", "86400", "2592000", "never"]
NAMES = ["openai", "anthropic"]
requests = []
slept = {}


class Server(http.server.BaseHTTPRequestHandler):
    """Refuses every request. The path has the seconds to wait, or `never`."""

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        _, language, name, wait, *_ = self.path.split("/")
        requests.append((language, name, wait))
        self.send_response(429)
        self.send_header("retry-after", "86400" if wait == "never" else wait)
        if wait == "never":
            self.send_header("x-should-retry", "false")
        self.end_headers()
        self.wfile.write(b'{"error": {"message": "the budget of today is used"}}')

    def log_message(self, *_):
        pass


def sleep(name, base_url):
    sleeps = []
    time.sleep = sleeps.append
    options = {"base_url": base_url, "api_key": "none", "max_retries": 1}
    chat = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
    try:
        if name == "openai":
            openai.OpenAI(**options).chat.completions.create(**chat)
        else:
            anthropic.Anthropic(**options).messages.create(**chat, max_tokens=9)
    except (openai.RateLimitError, anthropic.RateLimitError):
        return int(sum(sleeps))


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"
pairs = [(name, wait) for name in NAMES for wait in WAITS]
slept["Python"] = [sleep(name, f"{url}/Python/{name}/{wait}") for name, wait in pairs]
slept["Node"] = subprocess.check_output(["node", "client.mjs", url, *WAITS], text=True, timeout=60).split()
for language, seconds in slept.items():
    for (name, wait), sleeps in zip(pairs, seconds):
        n_requests = requests.count((language, name, wait))
        print(f"{name} for {language}, {wait}: {n_requests} requests, slept {sleeps} s")
PYTHON

sed -n '/^# Seen:/,/^set/s/^#   //p' "$own" | diff - seen

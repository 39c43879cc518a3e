#!/usr/bin/env bash
# On Node, an answer whose first byte takes five minutes never comes, although the SDKs' timeout is ten minutes.
#
# Version: openai 7.59.0, @anthropic-ai/sdk 1.14.0 and node 22.23.3 (npm)
# Behaviour: Node's own `fetch` ends a request whose headers do not come within 300 seconds, and the SDKs' `timeout` does not
# raise that. They call it a timeout and ask again, so an answer that is not streamed is computed three times in vain.
# The clock that both read runs 50 times as fast here. At its own speed, on Node 20.20.2, the first try ended after 302 s.
# Seen:
#   openai: timeout 600 s, 3 requests, the second after 300 s, APIConnectionTimeoutError
#   anthropic: timeout 600 s, 3 requests, the second after 300 s, APIConnectionTimeoutError
set -euo pipefail
packages="node@22.23.3 openai@7.59.0 @anthropic-ai/sdk@1.14.0"
[ -z "${NEWEST-}" ] || packages=$(sed 's/@[0-9][^ ]*/@latest/g' <<< "$packages")

own=$(realpath "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm install --silent $packages || exit 2
export PATH=$folder/node_modules/.bin:$PATH

cat > clock.mjs <<'NODE'
const real = globalThis.setTimeout;
globalThis.setTimeout = (call, ms, ...rest) => real(call, ms / 50, ...rest);
NODE
cat > client.mjs <<'NODE'
import http from "node:http";
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";

const starts = { openai: [], anthropic: [] };
const server = http.createServer((request) => {
  // Reads the request, and computes for long.
  starts[request.headers["x-client"]].push(performance.now());
});
await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
const url = `http://127.0.0.1:${server.address().port}`;
const openai = new OpenAI({ baseURL: url, apiKey: "none", defaultHeaders: { "x-client": "openai" } });
const anthropic = new Anthropic({ baseURL: url, apiKey: "none", defaultHeaders: { "x-client": "anthropic" } });
const messages = [{ role: "user", content: "Hello" }];

const errors = await Promise.all([
  openai.chat.completions.create({ model: "m", messages }).catch((error) => error.constructor.name),
  anthropic.messages.create({ model: "m", max_tokens: 9, messages }).catch((error) => error.constructor.name),
]);
for (const [name, client, error] of [["openai", openai, errors[0]], ["anthropic", anthropic, errors[1]]]) {
  const [first, second] = starts[name];
  const seconds = Math.round(((second - first) * 50) / 100_000) * 100;
  const requests = `${starts[name].length} requests, the second after ${seconds} s`;
  console.log(`${name}: timeout ${client.timeout / 1000} s, ${requests}, ${error}`);
}
process.exit();
NODE
timeout 60 node --import ./clock.mjs client.mjs | tee seen

sed -n '/^# Seen:/,/^set/s/^#   //p' "$own" | diff - seen

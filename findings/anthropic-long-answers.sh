#!/usr/bin/env bash
# Anthropic's SDKs refuse a long answer before they ask the server, unless it is streamed or a timeout is given.
#
# Version: anthropic 2.14.0 (PyPI), @anthropic-ai/sdk 1.14.0 (npm), Node 20.20.2
# Behaviour: The SDKs expect 128,000 tokens an hour of any server. From `max_tokens` 21,334 on that makes more than ten minutes,
# and a call that does not stream raises, although nothing was sent. With an own `timeout`, even a shorter one, it is sent.
# Seen:
#   Python, 21333 tokens: sent
#   Python, 21334 tokens: ValueError: Streaming is required
#   Python, 21334 tokens, timeout of 60 s: sent
#   Node, 21333 tokens: sent
#   Node, 21334 tokens: AnthropicError: Streaming is required
#   Node, 21334 tokens, timeout of 60 s: sent
set -euo pipefail
python_packages="anthropic==2.14.0"
node_packages="@anthropic-ai/sdk@1.14.0"
if [ -n "${NEWEST-}" ]; then
	python_packages=$(sed 's/==[^ ]*//g' <<< "$python_packages")
	node_packages=$(sed 's/@[0-9][^ ]*/@latest/g' <<< "$node_packages")
fi

own=$(realpath "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
{
	python3 -m venv --without-pip env &&
		python3 -m pip --python env/bin/python install -qq --no-compile $python_packages &&
		npm install --silent $node_packages
} || exit 2

# Nothing listens at the address: a connection error means that the request was to be sent.
cat > client.py <<'PYTHON'
import anthropic

for max_tokens, options, name in ((21333, {}, ""), (21334, {}, ""), (21334, {"timeout": 60}, ", timeout of 60 s")):
    client = anthropic.Anthropic(base_url="http://127.0.0.1:9", api_key="none", max_retries=0, **options)
    try:
        client.messages.create(model="m", max_tokens=max_tokens, messages=[{"role": "user", "content": "Hello"}])
    except anthropic.APIConnectionError:
        outcome = "sent"
    except ValueError as error:
        outcome = f"{type(error).__name__}: {' '.join(str(error).split()[:3])}"
    print(f"Python, {max_tokens} tokens{name}: {outcome}")
PYTHON
cat > client.mjs <<'NODE'
import Anthropic from "@anthropic-ai/sdk";

for (const [max_tokens, options, name] of [[21333, {}, ""], [21334, {}, ""], [21334, { timeout: 60000 }, ", timeout of 60 s"]]) {
  const client = new Anthropic({ baseURL: "http://127.0.0.1:9", apiKey: "none", maxRetries: 0, ...options });
  let outcome;
  try {
    await client.messages.create({ model: "m", max_tokens, messages: [{ role: "user", content: "Hello" }] });
  } catch (error) {
    const is_sent = error instanceof Anthropic.APIConnectionError;
    outcome = is_sent ? "sent" : `${error.constructor.name}: ${error.message.split(" ").slice(0, 3).join(" ")}`;
  }
  console.log(`Node, ${max_tokens} tokens${name}: ${outcome}`);
}
NODE
{
	timeout 60 env/bin/python client.py
	timeout 60 node client.mjs
} | tee seen

sed -n '/^# Seen:/,/^set/s/^#   //p' "$own" | diff - seen

#!/usr/bin/env bash
# SDKs take half an answer for the whole: a stream that ends without its last event raises nothing.
#
# Version: openai 3.57.0, anthropic 2.14.0, ollama 0.6.3 (PyPI)
# Behaviour: The server sends the first word of an answer, and the body ends there as HTTP wants it. So does a proxy's whose
# server was killed, for one. Of six ways to read a stream, five give the word and no error; a missing reason for the end
# is the only sign. Where the body is cut off instead (no last chunk), all six raise.
# Seen:
#   ended: openai, chat events: finish_reason None
#   ended: openai, chat stream(): finish_reason None
#   ended: openai, responses stream(): RuntimeError
#   ended: anthropic, events: content_block_delta
#   ended: anthropic, stream(): stop_reason None
#   ended: ollama: done False
#   cut off: openai, chat events: APIConnectionError
#   cut off: openai, chat stream(): APIConnectionError
#   cut off: openai, responses stream(): APIConnectionError
#   cut off: anthropic, events: RemoteProtocolError
#   cut off: anthropic, stream(): RemoteProtocolError
#   cut off: ollama: RemoteProtocolError
set -euo pipefail
packages="openai==3.57.0 anthropic==2.14.0 ollama==0.6.3"
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
import ollama
import openai

MESSAGE = {"id": "1", "type": "message", "role": "assistant", "model": "m", "content": [], "stop_reason": None,
           "stop_sequence": None, "usage": {"input_tokens": 1, "output_tokens": 1}}
RESPONSE = {"id": "1", "object": "response", "created_at": 1, "model": "m", "status": "in_progress", "output": [],
            "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
ITEM = {"id": "2", "type": "message", "role": "assistant", "status": "in_progress", "content": []}
PART = {"type": "output_text", "text": "", "annotations": []}
PLACE = {"item_id": "2", "output_index": 0, "content_index": 0}
BEGINNINGS = {
    "/v1/chat/completions": [
        {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m",
         "choices": [{"index": 0, "delta": {"role": "assistant", "content": "half"}, "finish_reason": None}]},
    ],
    "/v1/responses": [
        {"type": "response.created", "sequence_number": 0, "response": RESPONSE},
        {"type": "response.output_item.added", "sequence_number": 1, "output_index": 0, "item": ITEM},
        {"type": "response.content_part.added", "sequence_number": 2, "part": PART, **PLACE},
        {"type": "response.output_text.delta", "sequence_number": 3, "delta": "half", "logprobs": [], **PLACE},
    ],
    "/v1/messages": [
        {"type": "message_start", "message": MESSAGE},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "half"}},
    ],
}
LINE = b'{"model": "m", "message": {"role": "assistant", "content": "half"}, "done": false}\n'


class Server(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    cuts_off = False

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        events = BEGINNINGS.get(self.path, [])
        named = [f"event: {one.get('type', 'message')}\ndata: {json.dumps(one)}\n\n" for one in events]
        half = "".join(named).encode() or LINE
        self.send_response(200)
        self.send_header("content-type", "text/event-stream" if events else "application/x-ndjson")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"%x\r\n%b\r\n" % (len(half), half) + (b"" if self.cuts_off else b"0\r\n\r\n"))
        self.close_connection = True

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"
gpt = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
claude = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
chat = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}


def read_chat_events():
    *_, last = gpt.chat.completions.create(**chat, stream=True)
    return f"finish_reason {last.choices[0].finish_reason}"


def read_chat_stream():
    with gpt.chat.completions.stream(**chat) as stream:
        return f"finish_reason {stream.get_final_completion().choices[0].finish_reason}"


def read_response_stream():
    with gpt.responses.stream(model="m", input="Hello") as stream:
        return f"status {stream.get_final_response().status}"


def read_message_events():
    *_, last = claude.messages.create(**chat, max_tokens=9, stream=True)
    return last.type


def read_message_stream():
    with claude.messages.stream(**chat, max_tokens=9) as stream:
        return f"stop_reason {stream.get_final_message().stop_reason}"


def read_ollama():
    *_, last = ollama.Client(url).chat(**chat, stream=True)
    return f"done {last.done}"


WAYS = {
    "openai, chat events": read_chat_events,
    "openai, chat stream()": read_chat_stream,
    "openai, responses stream()": read_response_stream,
    "anthropic, events": read_message_events,
    "anthropic, stream()": read_message_stream,
    "ollama": read_ollama,
}
for Server.cuts_off in (False, True):
    for name, read in WAYS.items():
        try:
            outcome = read()
        except Exception as error:
            outcome = type(error).__name__
        print(f"{'cut off' if Server.cuts_off else 'ended'}: {name}: {outcome}")
PYTHON

sed -n '/^# Seen:/,/^set/s/^#   //p' "$own" | diff - seen

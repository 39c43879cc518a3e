#!/usr/bin/env bash
# llguidance reads a JSON schema more narrowly than the schema's own rules: a model cannot write valid values.
#
# Version: llguidance 1.9.1 (PyPI), Node 20.20.2 as the reference for patterns
# Behaviour: A schema's `pattern` is JavaScript's (JSON Schema, "Core", 6.4), and llguidance reads Rust's regular expressions.
# There `&&`, `--`, `~~` and `[` within a class are operators: two patterns below are refused, and two allow less than they
# say, without a word. A number with any bound cannot have an exponent, which a number without bounds may have.
# Seen:
#   ^[a&&b]+$ "a&b": JavaScript yes, llguidance refuses the schema
#   ^[[a]+$ "[a": JavaScript yes, llguidance refuses the schema
#   ^[a~~b]+$ "a~b": JavaScript yes, llguidance no
#   ^[+--]$ ",": JavaScript yes, llguidance no
#   ^[a-z]+$ "ab": JavaScript yes, llguidance yes
#   {"type": "number"} 1e-3: llguidance yes
#   {"type": "number", "minimum": 0} 1e-3: llguidance no
#   {"type": "number", "minimum": 0} 0.001: llguidance yes
set -euo pipefail
packages="llguidance==1.9.1"
[ -z "${NEWEST-}" ] || packages=$(sed 's/==[^ ]*//g' <<< "$packages")

own=$(realpath "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv --without-pip env &&
	python3 -m pip --python env/bin/python install -qq --no-compile $packages || exit 2

timeout 60 env/bin/python - <<'PYTHON' | tee seen
import json
import subprocess

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

PATTERNS = [("^[a&&b]+$", "a&b"), ("^[[a]+$", "[a"), ("^[a~~b]+$", "a~b"), ("^[+--]$", ","), ("^[a-z]+$", "ab")]
NUMBERS = [({"type": "number"}, "1e-3"), ({"type": "number", "minimum": 0}, "1e-3"), ({"type": "number", "minimum": 0}, "0.001")]


class Bytes:
    """A vocabulary of one token a byte, and the end."""

    tokens = [bytes([byte]) for byte in range(256)] + [b"<end>"]
    special_token_ids = [256]
    eos_token_id = 256
    bos_token_id = None

    def __call__(self, text):
        return list(text)


tokenizer = LLTokenizer(TokenizerWrapper(Bytes()))


def accepts(schema, text):
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    if matcher.is_error():
        return "refuses the schema"
    tokens = list(text.encode())
    return "yes" if matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting() else "no"


for pattern, text in PATTERNS:
    matches = "console.log(new RegExp(process.argv[1], 'u').test(process.argv[2]) ? 'yes' : 'no')"
    javascript = subprocess.check_output(["node", "-e", matches, pattern, text], text=True).strip()
    ours = accepts({"type": "string", "pattern": pattern}, json.dumps(text))
    print(f"{pattern} {json.dumps(text)}: JavaScript {javascript}, llguidance {ours}")
for schema, text in NUMBERS:
    print(f"{json.dumps(schema)} {text}: llguidance {accepts(schema, text)}")
PYTHON

sed -n '/^# Seen:/,/^set/s/^#   //p' "$own" | diff - seen

#!/usr/bin/env bash
# gguf's writer leaves out metadata whose value is empty, without a word.
#
# Version: gguf 0.19.0 (PyPI)
# Behaviour: `add_string(key, "")`, `add_chat_template("")` and `add_array(key, [])` write nothing, while zeros and False are
# written. A program that empties a field of a file this way makes a file without the field, and readers take their
# default for it. `add_key_value` writes an empty string.
# Seen:
#   general.architecture 'llama'
#   example.zero 0
#   example.false False
#   example.string_by_add_key_value ''
#   example.array_of_zero [0]
set -euo pipefail
packages="gguf==0.19.0"
[ -z "${NEWEST-}" ] || packages=$(sed 's/==[^ ]*//g' <<< "$packages")

own=$(realpath "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv --without-pip env &&
	python3 -m pip --python env/bin/python install -qq --no-compile $packages || exit 2

timeout 60 env/bin/python - <<'PYTHON' | tee seen
from gguf import GGUFReader, GGUFValueType, GGUFWriter

writer = GGUFWriter("example.gguf", "llama")
writer.add_uint32("example.zero", 0)
writer.add_bool("example.false", False)
writer.add_string("example.string", "")
writer.add_chat_template("")
writer.add_key_value("example.string_by_add_key_value", "", GGUFValueType.STRING)
writer.add_array("example.array", [])
writer.add_array("example.array_of_zero", [0])
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.close()
for key, field in GGUFReader("example.gguf").fields.items():
    if not key.startswith("GGUF."):
        print(key, repr(field.contents()))
PYTHON

sed -n '/^# Seen:/,/^set/s/^#   //p' "$own" | diff - seen

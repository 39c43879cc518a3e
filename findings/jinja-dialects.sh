#!/usr/bin/env bash
# One chat template gives different prompts in Python's and in JavaScript's Jinja, without an error in either.
#
# Version: jinja2 3.1.6 (PyPI), @huggingface/jinja 0.5.11 (npm), Node 20.20.2
# Behaviour: Jinja2's own `tojson` sorts keys and writes `<` and `'` as escapes, for web pages; transformers replaces it, as in
# "like transformers" below. In JavaScript, keys that are numbers come first, whole floats lose their point, long integers
# lose their last digits, booleans are lower case, `none` is empty, and a smiley counts as two characters.
# Seen:
#   {{ tool | tojson }}
#     Jinja2: {"10": "it\u0027s \u003cb\u003e", "2": 1.0, "id": 12345678901234567890}
#     like transformers: {"id": 12345678901234567890, "10": "it's <b>", "2": 1.0}
#     JavaScript: {"2": 1, "10": "it's <b>", "id": 12345678901234567000}
#   {{ yes }}|{{ nothing }}|{{ [yes, 'a'] }}
#     Jinja2: True|None|[True, 'a']
#     like transformers: True|None|[True, 'a']
#     JavaScript: true||[true, "a"]
#   {{ smiley | length }}|{{ -7 % 3 }}|{{ 1 == yes }}
#     Jinja2: 1|2|True
#     like transformers: 1|2|True
#     JavaScript: 2|-1|true
set -euo pipefail
python_packages="jinja2==3.1.6"
node_packages="@huggingface/jinja@0.5.11"
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

cat > render.mjs <<'NODE'
import { Template } from "@huggingface/jinja";

const [template, values] = process.argv.slice(2);
process.stdout.write(new Template(template).render(JSON.parse(values)));
NODE

timeout 60 env/bin/python - <<'PYTHON' | tee seen
import json
import subprocess

import jinja2

TEMPLATES = [
    "{{ tool | tojson }}",
    "{{ yes }}|{{ nothing }}|{{ [yes, 'a'] }}",
    "{{ smiley | length }}|{{ -7 % 3 }}|{{ 1 == yes }}",
]
VALUES = {
    "tool": {"id": 12345678901234567890, "10": "it's <b>", "2": 1.0},
    "yes": True,
    "nothing": None,
    "smiley": "\N{GRINNING FACE}",
}
plain = jinja2.Environment()
like_transformers = jinja2.Environment()
like_transformers.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
for template in TEMPLATES:
    print(template)
    print("  Jinja2:", plain.from_string(template).render(VALUES))
    print("  like transformers:", like_transformers.from_string(template).render(VALUES))
    rendered = subprocess.check_output(["node", "render.mjs", template, json.dumps(VALUES)], text=True)
    print("  JavaScript:", rendered)
PYTHON

sed -n '/^# Seen:/,/^set/s/^#   //p' "$own" | diff - seen

"""`lm-eval`, with a task of one's own over chats."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

URL = sys.argv[1]
TASK = """\
task: capitals
dataset_path: json
dataset_kwargs:
  data_files: {test: capitals.jsonl}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 24, temperature: 0}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
CAPITALS = {"Italy": "Rome", "France": "Paris", "Portugal": "Madrid"}

lines = (
    {"question": f"What is the capital of {land}?", "answer": f"The capital of {land} is {city}."}
    for land, city in CAPITALS.items()
)
Path("capitals.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
Path("capitals.yaml").write_text(TASK)
model = f"model=demo,base_url={URL}/v1/chat/completions,num_concurrent=2"
asked = ["--model", "local-chat-completions", "--model_args", model, "--apply_chat_template"]
files = ["--tasks", "capitals.yaml", "--output_path", "found"]
done = subprocess.run(
    [Path(sys.executable).with_name("lm_eval"), *asked, *files],
    env={**os.environ, "HF_HUB_OFFLINE": "1"},
    capture_output=True,
    text=True,
    check=False,
)
assert done.returncode == 0, done.stdout + done.stderr
(found,) = Path("found").rglob("results_*.json")
score = json.loads(found.read_text())["results"]["capitals"]["exact_match,none"]
assert abs(score - 2 / 3) < 1e-6, score  # Madrid is not Portugal's

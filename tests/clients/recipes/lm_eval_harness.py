"""`lm-eval`, with tasks of one's own: answers over chats, and scores of given answers."""

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

SCORED = """\
task: choices
dataset_path: json
dataset_kwargs:
  data_files: {test: capitals.jsonl}
test_split: test
output_type: multiple_choice
doc_to_text: "The capital of {{land}} is"
doc_to_choice: ["Rome", "Paris", "Madrid", "Lisbon"]
doc_to_target: "{{city}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


def evaluate(task: str, definition: str, metric: str, *options: str) -> float:
    """The score of a task. The server has the tokenizer."""
    Path(f"{task}.yaml").write_text(definition)
    command = [Path(sys.executable).with_name("lm_eval"), "--tasks", f"{task}.yaml", *options]
    done = subprocess.run(
        [*command, "--output_path", task],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = Path(task).rglob("results_*.json")
    return float(json.loads(found.read_text())["results"][task][f"{metric},none"])


lines = (
    {
        "land": land,
        "city": city,
        "question": f"What is the capital of {land}?",
        "answer": f"The capital of {land} is {city}.",
    }
    for land, city in CAPITALS.items()
)
Path("capitals.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
model = f"model=demo,base_url={URL}/v1/chat/completions,num_concurrent=2"
chats = ("--model", "local-chat-completions", "--model_args", model, "--apply_chat_template")
score = evaluate("capitals", TASK, "exact_match", *chats)
assert abs(score - 2 / 3) < 1e-6, score  # Madrid is not Portugal's
model = f"model=demo,base_url={URL}/v1/completions,tokenizer_backend=remote,num_concurrent=2"
score = evaluate("choices", SCORED, "acc", "--model", "local-completions", "--model_args", model)
assert abs(score - 2 / 3) < 1e-6, score

"""`llm`, the command line tool, with a model of its `extra-openai-models.yaml`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

URL = sys.argv[1]
LLM = [sys.executable, "-m", "llm"]

folder = subprocess.run([*LLM, "logs", "path"], check=True, capture_output=True, text=True).stdout
(Path(folder.strip()).parent / "extra-openai-models.yaml").write_text(
    f'- model_id: corral\n  model_name: demo\n  api_base: "{URL}/v1"\n  api_key_name: corral\n'
)
for streams in ([], ["--no-stream"]):
    asked = [*LLM, "-m", "corral", "--key", "none", "-o", "temperature", "0", *streams]
    done = subprocess.run(
        [*asked, "What is the capital of Italy?"], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "The capital of Italy is Rome.", done.stdout + done.stderr

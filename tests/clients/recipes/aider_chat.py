"""`aider`, asked on its command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

URL = sys.argv[1]
AIDER = [Path(sys.executable).with_name("aider"), "--model", "openai/demo"]
SERVER = ["--openai-api-base", f"{URL}/v1", "--openai-api-key", "none"]
QUIETLY = ["--no-git", "--yes-always", "--no-pretty", "--no-show-model-warnings", "--map-tokens=0"]
ALONE = ["--analytics-disable", "--no-check-update"]

for streams in ("--stream", "--no-stream"):
    asked = ["--chat-mode", "ask", streams, "--message", "What is the capital of Italy?"]
    done = subprocess.run(
        [*AIDER, *SERVER, *QUIETLY, *ALONE, *asked],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "The capital of Italy is Rome." in done.stdout.splitlines(), done.stdout + done.stderr

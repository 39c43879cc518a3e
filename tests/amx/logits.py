"""How far the logits of llama.cpp's chosen kernels are from its plain ones.

    python -m tests.amx.logits FORMAT N_TOKENS...

Prints a JSON list with an error for each number of tokens, which are read at once: the greatest of the
rows' errors, each relative to the row's root mean square.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np

from cluster.llama_cpp import probe
from serve_app.kernels.llama.quantising import quantise
from tools.random_models.model import SHAPES, write_random_gguf


def error(path: Path, n_tokens: int) -> float:
    """The greatest of the rows."""
    plain, chosen = (
        probe.logits(path, chosen=chosen, n_tokens=n_tokens).astype(np.float64)
        for chosen in (False, True)
    )
    squares = ((chosen - plain) ** 2).mean(axis=1) / (plain**2).mean(axis=1)
    return float(np.sqrt(squares).max())


def main() -> None:
    """Print the errors of a random model in the format of the arguments."""
    name, *numbers = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "f16.gguf", Path(folder) / "quantised.gguf"
        write_random_gguf(source, SHAPES["tiny"], "f16")
        quantise(source, target, name, alike=True)
        print(json.dumps([error(target, int(number)) for number in numbers]))


if __name__ == "__main__":
    main()

"""Starts a module of Python with the stack that workers need.

    python -m serve_app.ingress.workers.stack MODULE [ARGUMENT ...]

The kernel leaves room for the stack when a program starts, by the limit of that moment. So the limit is
raised first, by a program that imports next to nothing.
"""

from __future__ import annotations

import os
import resource
import sys

STACK_BYTES = 32 * 2**20
"""Stack of a worker. llama.cpp's tokenizer takes some 300 bytes of it for each character of a word, with
the pre-tokenizers that it leaves to `std::regex`; beyond, the process dies."""


def main() -> None:
    """Become that module's program. The hard limit is kept."""
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    wanted = STACK_BYTES if hard == resource.RLIM_INFINITY else min(hard, STACK_BYTES)
    resource.setrlimit(resource.RLIMIT_STACK, (wanted, hard))
    os.execv(sys.executable, [sys.executable, "-m", *sys.argv[1:]])


if __name__ == "__main__":
    main()

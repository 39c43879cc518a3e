"""Runs a command with llama.cpp's AMX kernels, on an emulated AMX where the processor has none.

    python -m tests.amx COMMAND...

The processes that it starts have them, too. The libraries are compiled at the first run, some minutes. At
the end, it says on stderr how many instructions of AMX were emulated, and ends as the command did.
"""

from __future__ import annotations

import subprocess
import sys

from tests.amx import builds
from tests.amx.emulation import emulation


def main() -> None:
    """Run the command of the arguments."""
    if lacking := builds.lacking():
        sys.exit(f"this processor lacks {' '.join(lacking)}")
    with emulation(builds.WITH_HEADER) as amx:
        status = subprocess.run(sys.argv[1:], env=amx.variables).returncode
        told = ", ".join(f"{n} {name}" for name, n in amx.counts().items())
        print(f"emulated: {told or 'nothing'}", file=sys.stderr)
    sys.exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main()

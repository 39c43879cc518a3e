"""`python -m serve_app.config FILE`: check a Serve config file; what is wrong is one line."""

from __future__ import annotations

import sys
from pathlib import Path

from serve_app.config.schema import load
from serve_app.errors import ConfigError

try:
    load(Path(sys.argv[1]))
except ConfigError as error:
    sys.exit(str(error))

"""What is left in a process that loads a model on demand again and again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import asyncio, gc, sys
from pathlib import Path
from serve_app.base import metrics
from serve_app.config import schema
from serve_app.run.replica.loaded_model import LoadedModel
from serve_app.run.replica.on_demand import _clean_up
from serve_app.run.replica.place import ReplicaPlace
from serve_app.run.resolving import resolve
from serve_app.store import shared_entries

folder = Path(sys.argv[1])
for part in ("metrics", "entries"):
    (folder / part).mkdir()
metrics.keep_in(folder / "metrics")
shared_entries.keep_in(folder / "entries")
engine = {"n_slots": 1, "n_ctx_slot": 256, "threads": 1}
entry = {"id": "m", "source": {"builtin": True}, "keep_alive": "1m", "engine": engine}
(model,) = resolve(schema.parse({"models": [entry]}), only_here=True)
place = ReplicaPlace("corral", "m", "m-1", "local", folder, measures_again=False)

async def load(times):
    for _ in range(times):
        loaded = await LoadedModel.load(model, place)
        await loaded.close()
        loaded.forget()
        del loaded
        _clean_up()

async def main():
    await load(3)
    gc.collect()
    before = len(gc.get_objects())
    await load(10)
    gc.collect()
    print(len(gc.get_objects()) - before)

asyncio.run(main())
"""


def test_a_load_leaves_no_objects_behind(tmp_path: Path) -> None:
    """Some that come and go, such as timers of threads, are there by chance."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    found = subprocess.run(command, check=True, timeout=120, stdout=subprocess.PIPE)
    assert int(found.stdout.split()[-1]) < 100

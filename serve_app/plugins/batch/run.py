"""The whole work, as a pipeline of Ray Data's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
from ray.data import ActorPoolStrategy, DataContext

from serve_app.base.errors import ConfigError
from serve_app.plugins.batch import parts
from serve_app.plugins.batch.answerer import AT_ONCE, Answerer, PartSettings
from serve_app.plugins.batch.parts import FORMATS, Parts

_BLOCK_BYTES = 1
"""Each part is a block of its own: Ray Data gives blocks to engines, and takes those of a dead one back."""


@dataclass(slots=True)
class Done:
    lines: int = 0
    errors: int = 0
    prompt: int = 0
    cached: int = 0
    """Tokens of prompts that were not computed again."""
    generated: int = 0
    read: int = 0
    """Bytes of the input, with those of parts that were done before."""

    def summary(self, seconds: float) -> str:
        seconds = max(seconds, 1e-3)
        hits = self.cached / self.prompt if self.prompt else 0.0
        return (
            f"{self.lines} lines, {self.errors} errors, {self.lines / seconds:.1f} lines/s, "
            f"{self.generated / seconds:.1f} tokens/s, {hits:.0%} of prompts cached"
        )

    def add(self, row: Mapping[str, Any]) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + int(row[name]))


def inputs(folder: Path) -> dict[str, int]:
    """The input's files, numbered in the order of their names. Raises ConfigError."""
    found = [folder] if folder.is_file() else sorted(folder.rglob("*") if folder.is_dir() else [])
    files = [str(path.resolve()) for path in found if path.suffix in FORMATS]
    if not files:
        raise ConfigError(
            f"{folder} is neither a file nor a folder with files of {', '.join(FORMATS)}."
        )
    return {path: number for number, path in enumerate(files)}


def about(files: Mapping[str, int], work: PartSettings, n_lines: int) -> dict[str, Any]:
    """A description of all that the output depends on."""
    source = work.model.source
    model_files = [] if source.path is None else [str(source.path.expanduser())]
    return {
        "files": {path: _file_version(path) for path in (*files, *model_files)},
        "lines_per_part": n_lines,
        "model": source.model_dump(mode="json", exclude_none=True),
        "reading": asdict(work.reading),
    }


def _file_version(path: str) -> list[int]:
    """Size and time of a file: almost certainly others if the content is another."""
    status = Path(path).stat()
    return [status.st_size, status.st_mtime_ns]


def run(
    files: Mapping[str, int],
    work: PartSettings,
    n_lines: int,
    n_replicas: int,
    on_part: Callable[[Done], None],
) -> Done:
    """Answer all that is not done. Ray is connected. Raises ConfigError, and what Ray Data raises."""
    finished = parts.begin(work.folder, about(files, work, n_lines))
    context = DataContext.get_current()
    context.target_max_block_size = _BLOCK_BYTES
    context.enable_progress_bars = False
    # Reading waits for the disk; cores are for the engines.
    source = ray.data.read_datasource(Parts(files, n_lines, finished), num_cpus=0)
    pool = ActorPoolStrategy(
        min_size=1,
        max_size=n_replicas,
        max_tasks_in_flight_per_actor=2 * AT_ONCE,
        max_concurrent_calls_per_actor=AT_ONCE,
        enable_true_multi_threading=True,
    )
    answered = source.map_batches(
        Answerer,
        fn_constructor_args=(work,),
        batch_size=1,
        compute=pool,
        num_cpus=work.model.num_cpus,
    )
    done = Done()
    for row in answered.iter_rows():
        done.add(row)
        on_part(done)
    return done

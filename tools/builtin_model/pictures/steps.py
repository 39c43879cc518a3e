"""A stage of training: its steps, its log, and its checkpoints."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from tools.builtin_model.pictures.rows import NOTHING, Batch

_SAY_EVERY, _SAVE_EVERY = 25, 50


class Progress:
    """The last steps, for the log."""

    def __init__(self) -> None:
        self._right: Counter[str] = Counter()
        self._all: Counter[str] = Counter()
        self._noted: dict[str, list[float]] = {}

    def answers(self, batch: Batch, guessed: Tensor) -> None:
        """`guessed` are the likeliest tokens where the batch wants one."""
        right = torch.zeros_like(batch.wanted, dtype=torch.bool)
        right[batch.wanted != NOTHING] = guessed == batch.wanted[batch.wanted != NOTHING]
        for row, marks in zip(batch.rows, right, strict=True):
            for asked, start, end in row.answers:
                self.count(asked.kind, right=bool(marks[start:end].all()))

    def count(self, kind: str, *, right: bool) -> None:
        self._all[kind] += 1
        self._right[kind] += right

    def note(self, name: str, value: Tensor) -> None:
        self._noted.setdefault(name, []).append(value.item())

    def __str__(self) -> str:
        noted = [f"{n} {sum(v) / len(v):.4f}" for n, v in self._noted.items()]
        shares = (f"{kind} {self._right[kind] / n:.2f}" for kind, n in sorted(self._all.items()))
        all_of_them = self._right.total() / max(1, self._all.total())
        return ", ".join([*noted, f"right {all_of_them:.3f} ({', '.join(shares)})"])


Loss = Callable[[int, Progress], Tensor]
"""Of a step, by its number."""


def train_stage(
    path: Path, network: nn.Module, rate: float, steps: int, loss: Loss, *, hold: float = 0.5
) -> None:
    """So many steps; the learning rate falls behind the part `hold` of them. A former run's file is taken
    up: the whole stage, or its last checkpoint."""
    optimizers = _optimizers(network, rate)
    began = _resume(path, network, optimizers)
    progress, spent = Progress(), time.process_time()
    for step in range(began, steps):
        factor = min(1.0, (step + 1) / 20, (steps - step) / ((1 - hold) * steps))
        _step(network, optimizers, rate * factor, loss(step, progress), progress)
        if (step + 1) % _SAY_EVERY == 0:
            seconds = time.process_time() - spent
            print(f"{path.stem} {step + 1}/{steps}: {seconds:.0f} s, {progress}", flush=True)
            progress = Progress()
        if (step + 1) % _SAVE_EVERY == 0 or step + 1 == steps:
            _save(path, network, optimizers, step + 1)


def _step(
    network: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    rate: float,
    loss: Tensor,
    progress: Progress,
) -> None:
    network.zero_grad()
    loss.backward()
    progress.note("loss", loss)
    nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    for optimizer in optimizers:
        is_muon = isinstance(optimizer, torch.optim.Muon)
        optimizer.param_groups[0]["lr"] = rate if is_muon or len(optimizers) == 1 else rate / 2
        optimizer.step()


def _resume(path: Path, network: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """The steps that are done."""
    if not path.is_file():
        return 0
    kept = torch.load(path, weights_only=True)
    network.load_state_dict(kept["network"])
    for optimizer, state in zip(optimizers, kept["optimizers"], strict=True):
        optimizer.load_state_dict(state)
    return int(kept["step"])


def _save(
    path: Path, network: nn.Module, optimizers: Iterable[torch.optim.Optimizer], step: int
) -> None:
    part = path.with_suffix(".part")
    states = [optimizer.state_dict() for optimizer in optimizers]
    torch.save({"network": network.state_dict(), "optimizers": states, "step": step}, part)
    part.replace(path)


def _optimizers(network: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices in the layers of the eyes, AdamW for all else."""
    matrices = {
        name
        for name, one in network.named_parameters()
        if one.ndim == 2 and name.startswith("eyes.layers.")
    }
    named = [*network.named_parameters()]
    others = [one for name, one in named if name not in matrices]
    made: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(others, rate, (0.9, 0.98), weight_decay=0.0)
    ]
    if matrices:
        inside = [one for name, one in named if name in matrices]
        made.append(
            torch.optim.Muon(inside, rate, weight_decay=0.02, adjust_lr_fn="match_rms_adamw")
        )
    return made

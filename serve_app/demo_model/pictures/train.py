"""Trains the built-in model's eyes on drawn pictures and writes their GGUF.

    python -m serve_app.demo_model.pictures.train WORK_DIR

Needs the `train` extra. The language model's weights stay as they are. There are four stages. First, a
teacher learns which embeddings make the language model answer questions about a scene that is known.
Then the encoder learns to find things in pictures, and the eyes learn to make the teacher's embeddings of
them. In the end, they learn from the answers themselves. Run again with the same folder, it goes on after
the last stage that was finished.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from serve_app.demo_model.pictures.album import Album, album, maps
from serve_app.demo_model.pictures.export import write_gguf
from serve_app.demo_model.pictures.language import Language
from serve_app.demo_model.pictures.network import Eyes
from serve_app.demo_model.pictures.rows import NOTHING, PICTURE, Batch, Rows
from serve_app.demo_model.pictures.scenes import COLOURS, scene
from serve_app.demo_model.pictures.shape import SHAPE
from serve_app.demo_model.pictures.teacher import N_ATTRIBUTES, NAMES, Teacher, attributes

FILE = "corral-demo-mmproj-q8_0.gguf"
_N_PICTURES = 16_000
_TEACHER_ROWS, _SIGHT_ROWS, _ANSWER_ROWS = 16, 64, 16
"""Scenes of a step, by stage."""
_SAY_EVERY = 20


class Answers:
    """How well the language model answers, for the log."""

    def __init__(self) -> None:
        self._right: Counter[str] = Counter()
        self._all: Counter[str] = Counter()

    def add(self, batch: Batch, guessed: Tensor) -> None:
        """`guessed` are the likeliest tokens where the batch wants one."""
        right = torch.zeros_like(batch.wanted, dtype=torch.bool)
        right[batch.wanted != NOTHING] = guessed == batch.wanted[batch.wanted != NOTHING]
        for row, marks in zip(batch.rows, right, strict=True):
            for asked, start, end in row.answers:
                self._all[asked.kind] += 1
                self._right[asked.kind] += bool(marks[start:end].all())

    def __str__(self) -> str:
        shares = (f"{kind} {self._right[kind] / n:.2f}" for kind, n in sorted(self._all.items()))
        all_of_them = self._right.total() / max(1, self._all.total())
        return f"right {all_of_them:.3f} ({', '.join(shares)})"


class Trainer:
    """The networks, and the folder that keeps them from stage to stage."""

    def __init__(self, folder: Path, seed: int) -> None:
        torch.manual_seed(seed)
        self._folder, self._seed = folder, seed
        self._language = Language()
        self._hidden = torch.compile(self._language.hidden, dynamic=False)
        self._rows = Rows(SHAPE.n_tokens)
        self.teacher = Teacher(SHAPE.n_tokens, self._language.embedding)
        self.eyes = Eyes(SHAPE)

    def stage(self, name: str, network: nn.Module, train: Callable[[], None]) -> None:
        """Train, unless a former run has."""
        path = self._folder / f"{name}.pt"
        if path.is_file():
            network.load_state_dict(torch.load(path, weights_only=True))
            return
        train()
        torch.save(network.state_dict(), path)

    def train_teacher(self, steps: int, rate: float = 5e-3) -> None:
        """Stage 1."""
        dice = random.Random(f"{self._seed}/teacher")

        def loss(answers: Answers) -> Tensor:
            batch = self._rows.batch([scene(dice) for _ in range(_TEACHER_ROWS)], dice)
            known = attributes([row.scene for row in batch.rows])
            return self._answer_loss(batch, self.teacher(known), answers)

        self._run(
            steps,
            [torch.optim.AdamW(self.teacher.parameters(), rate, (0.9, 0.98), weight_decay=0.0)],
            loss,
        )

    def train_sight(self, steps: int, rate: float = 3e-3) -> None:
        """Stage 2: the encoder finds what is in a picture, and where."""
        pictures = self._album()
        dice = random.Random(f"{self._seed}/sight")
        heads = nn.ModuleList(
            nn.Linear(SHAPE.n_embd, n) for n in (N_ATTRIBUTES, len(NAMES) + 1, len(COLOURS) + 1)
        )
        encode = torch.compile(self.eyes.encode, dynamic=False)

        def loss(_: Answers) -> Tensor:
            scenes, pixels = pictures.some(dice, _SIGHT_ROWS)
            with torch.autocast("cpu", torch.bfloat16):
                features = encode(pixels)
                told, names, colours = (head(features).float() for head in heads)
            wanted_names, wanted_colours = maps(scenes, SHAPE.n_side)
            return (
                functional.binary_cross_entropy_with_logits(told.mean(1), attributes(scenes))
                + 0.2 * functional.cross_entropy(names.flatten(0, 1), wanted_names.flatten())
                + 0.2 * functional.cross_entropy(colours.flatten(0, 1), wanted_colours.flatten())
            )

        self._run(steps, _optimizers([self.eyes, heads], rate), loss)

    def train_eyes(self, steps: int, rate: float = 3e-3) -> None:
        """Stage 3: the embeddings become the teacher's."""
        pictures = self._album()
        dice = random.Random(f"{self._seed}/eyes")
        with torch.no_grad():
            scale = 1 / self.teacher(attributes(pictures.scenes[:2000])).var(0).mean()
        see = torch.compile(self.eyes, dynamic=False)

        def loss(_: Answers) -> Tensor:
            scenes, pixels = pictures.some(dice, _SIGHT_ROWS)
            with torch.no_grad():
                wanted = self.teacher(attributes(scenes))
            with torch.autocast("cpu", torch.bfloat16):
                found = see(pixels)
            return scale * functional.mse_loss(found.float(), wanted)

        self._run(steps, _optimizers([self.eyes], rate), loss)

    def train_answers(self, steps: int, rate: float = 1e-3) -> None:
        """Stage 4."""
        pictures = self._album()
        dice = random.Random(f"{self._seed}/answers")

        def loss(answers: Answers) -> Tensor:
            scenes, pixels = pictures.some(dice, _ANSWER_ROWS)
            batch = self._rows.batch(scenes, dice)
            with torch.autocast("cpu", torch.bfloat16):
                found = self.eyes(pixels)
            return self._answer_loss(batch, found.float(), answers)

        self._run(steps, _optimizers([self.eyes], rate), loss)

    def _album(self) -> Album:
        return album(self._folder, SHAPE, _N_PICTURES, self._seed)

    def _answer_loss(self, batch: Batch, pictures: Tensor, answers: Answers) -> Tensor:
        """The loss of what the language model says, if it sees a picture's embeddings, `[rows, n_tokens,
        n_embd]`, in each of the batch's rows."""
        seen = (batch.tokens == PICTURE)[..., None]
        times = (seen.sum((1, 2)) // SHAPE.n_tokens).tolist()
        in_order = [one for one, n in zip(pictures, times, strict=True) for _ in range(n)]
        words = self._language.embedding[batch.tokens.clamp(min=0)]
        x = words.masked_scatter(seen, torch.cat(in_order))
        hidden = self._hidden(x, batch.positions, batch.visible)
        wanted = batch.wanted != NOTHING
        logits = self._language.logits(hidden[wanted])
        answers.add(batch, logits.argmax(-1))
        return functional.cross_entropy(logits, batch.wanted[wanted])

    def _run(
        self,
        steps: int,
        optimizers: Sequence[torch.optim.Optimizer],
        loss: Callable[[Answers], Tensor],
    ) -> None:
        """So many steps, with a line of progress now and then."""
        answers, losses, began = Answers(), [], time.process_time()
        rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
        for step in range(steps):
            factor = min(1.0, (step + 1) / 20, (steps - step) / (0.5 * steps))
            for optimizer, rate in zip(optimizers, rates, strict=True):
                optimizer.param_groups[0]["lr"] = rate * factor
            now = loss(answers)
            for optimizer in optimizers:
                optimizer.zero_grad()
            now.backward()
            for optimizer in optimizers:
                nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
                optimizer.step()
            losses.append(now.item())
            if (step + 1) % _SAY_EVERY == 0:
                mean, spent = sum(losses) / len(losses), time.process_time() - began
                print(
                    f"{step + 1} of {steps}: loss {mean:.3f}, {spent:.0f} s, {answers}", flush=True
                )
                answers, losses = Answers(), []


def _optimizers(networks: Iterable[nn.Module], rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside, AdamW for all else."""
    named = [one for network in networks for one in network.named_parameters()]
    inside = [
        p for name, p in named if p.ndim == 2 and name.startswith(("layers.", "hidden", "output"))
    ]
    others = [p for _, p in named if all(p is not one for one in inside)]
    return [
        torch.optim.Muon(inside, rate, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, rate, (0.9, 0.98), weight_decay=0.0),
    ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train the eyes of Corral's built-in model.")
    parser.add_argument("folder", type=Path, help="for the pictures, the stages and the GGUF")
    parser.add_argument("--teacher-steps", type=int, default=800)
    parser.add_argument("--sight-steps", type=int, default=1000)
    parser.add_argument("--eyes-steps", type=int, default=400)
    parser.add_argument("--answer-steps", type=int, default=600)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(arguments.folder, arguments.seed)
    trainer.stage(
        "teacher", trainer.teacher, lambda: trainer.train_teacher(arguments.teacher_steps)
    )
    trainer.stage("sight", trainer.eyes, lambda: trainer.train_sight(arguments.sight_steps))
    trainer.stage("eyes", trainer.eyes, lambda: trainer.train_eyes(arguments.eyes_steps))
    trainer.stage("answers", trainer.eyes, lambda: trainer.train_answers(arguments.answer_steps))
    weights = {name: one.numpy() for name, one in trainer.eyes.state_dict().items()}
    path = arguments.folder / FILE
    write_gguf(path, SHAPE, weights)
    print(f"{path}: {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()

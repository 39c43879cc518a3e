"""Trains the built-in model's eyes on drawn pictures and writes their GGUF.

    python -m tools.builtin_model.pictures.train WORK_DIR

Needs the `train` extra. The language model's weights stay as they are. There are three stages. First, a
teacher learns which embeddings make the language model answer questions about a scene that is known.
Then the eyes learn to find things in pictures, and to make the teacher's embeddings of them. In the end,
they learn from the answers themselves. Run again with the same folder, it goes on from the last
checkpoint.
"""

from __future__ import annotations

import argparse
import random
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.builtin_model.pictures.album import Album, Maps, album, maps
from tools.builtin_model.pictures.export import write_gguf
from tools.builtin_model.pictures.language import Language
from tools.builtin_model.pictures.network import Eyes
from tools.builtin_model.pictures.rows import NOTHING, PICTURE, Batch, Rows
from tools.builtin_model.pictures.scenes import COLOURS, Scene, scene
from tools.builtin_model.pictures.shape import SHAPE, EyesShape
from tools.builtin_model.pictures.steps import Progress, train_stage
from tools.builtin_model.pictures.teacher import N_ATTRIBUTES, NAMES, Teacher, attributes

FILE = "corral-demo-mmproj-q8_0.gguf"
_N_PICTURES = 16_000
_TEACHER_ROWS, _EYES_ROWS, _ANSWER_ROWS = 16, 32, 16
"""Scenes of a step, by stage."""
_THERE, _FAR = 4.0, 3.0
"""The weights of losses: of what is where, and of the distance to the teacher."""


class Learner(nn.Module):
    """The eyes, and what they have to tell while they learn: of each patch, what is there; of the patches
    of each embedding, all attributes of the scene."""

    def __init__(self, shape: EyesShape) -> None:
        super().__init__()
        self.eyes = Eyes(shape)
        self.norm = nn.LayerNorm(shape.n_embd)
        self.there = nn.Linear(shape.n_embd, len(NAMES) + 1 + len(COLOURS) + 1 + 1)
        self.told = nn.Linear(shape.n_embd, N_ATTRIBUTES)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`[rows, patches, things that can be there]`, `[rows, n_tokens, N_ATTRIBUTES]`, and the
        embeddings."""
        middle, features = self.eyes.look(pixels)
        told = self.told(self.eyes.gathered(features).mean(2))
        return self.there(self.norm(middle)), told, self.eyes.project(features)


class Trainer:
    """The networks, and the folder that keeps them from stage to stage."""

    def __init__(self, folder: Path, seed: int) -> None:
        torch.manual_seed(seed)
        self._folder, self._seed = folder, seed
        self._language = Language()
        self._hidden = torch.compile(self._language.hidden, dynamic=False)
        self._rows = Rows(SHAPE.n_tokens)
        self.teacher = Teacher(SHAPE.n_tokens, self._language.embedding, self._rows.tokens)
        self.learner = Learner(SHAPE)
        self._learn = torch.compile(self.learner, dynamic=False)

    def train_teacher(self, steps: int, rate: float = 5e-3) -> None:
        """Stage 1."""

        def loss(step: int, progress: Progress) -> Tensor:
            dice = random.Random(f"{self._seed}/teacher/{step}")
            batch = self._rows.batch([scene(dice) for _ in range(_TEACHER_ROWS)], dice)
            known = attributes([row.scene for row in batch.rows])
            return self._answer_loss(batch, self.teacher(known), progress)

        train_stage(self._folder / "teacher.pt", self.teacher, rate, steps, loss)

    def train_eyes(self, steps: int, rate: float = 5e-3) -> None:
        """Stage 2: the eyes find what is in a picture, and where, and make the teacher's embeddings."""
        with torch.no_grad():
            scale = 1 / self.teacher(attributes(self._album.scenes[:2000])).var(0).mean()

        def loss(step: int, progress: Progress) -> Tensor:
            dice = random.Random(f"{self._seed}/eyes/{step}")
            scenes, pixels = self._album.some(dice, _EYES_ROWS)
            wanted = attributes(scenes)
            with torch.no_grad():
                taught = self.teacher(wanted)
            with torch.autocast("cpu", torch.bfloat16):
                there, told, embeddings = (one.float() for one in self._learn(pixels))
            far = scale * functional.mse_loss(embeddings, taught)
            progress.note("far", far)
            return _FAR * far + _sight_loss(there, told, scenes, wanted, progress)

        train_stage(self._folder / "eyes.pt", self.learner, rate, steps, loss, hold=0.6)

    def train_answers(self, steps: int, rate: float = 5e-4) -> None:
        """Stage 3."""

        def loss(step: int, progress: Progress) -> Tensor:
            dice = random.Random(f"{self._seed}/answers/{step}")
            scenes, pixels = self._album.some(dice, _ANSWER_ROWS)
            with torch.autocast("cpu", torch.bfloat16):
                embeddings = self.learner.eyes(pixels)
            return self._answer_loss(self._rows.batch(scenes, dice), embeddings.float(), progress)

        train_stage(self._folder / "answers.pt", self.learner, rate, steps, loss, hold=0.2)

    @cached_property
    def _album(self) -> Album:
        return album(self._folder, SHAPE, _N_PICTURES, self._seed)

    def _answer_loss(self, batch: Batch, pictures: Tensor, progress: Progress) -> Tensor:
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
        progress.answers(batch, logits.argmax(-1))
        return functional.cross_entropy(logits, batch.wanted[wanted])


def _sight_loss(
    there: Tensor, told: Tensor, scenes: list[Scene], wanted: Tensor, progress: Progress
) -> Tensor:
    """Of what the learner tells. `wanted` are the scenes' attributes."""
    right = ((told.mean(1) > 0) == (wanted > 0)).all(1)
    for one, all_of_it in zip(scenes, right.tolist(), strict=True):
        progress.count(one.kind, right=all_of_it)
    told_loss = N_ATTRIBUTES * functional.binary_cross_entropy_with_logits(
        told, wanted[:, None].expand_as(told)
    )
    there_loss = _there_loss(there, maps(scenes, SHAPE.n_side))
    progress.note("told", told_loss)
    progress.note("there", there_loss)
    return told_loss + _THERE * there_loss


def _there_loss(there: Tensor, wanted: Maps) -> Tensor:
    """Things weigh more than the ground around them."""
    names, colours, middles = there.split([len(NAMES) + 1, len(COLOURS) + 1, 1], -1)
    loss = functional.binary_cross_entropy_with_logits(middles[..., 0], wanted.middles.clamp(max=1))
    for told, right in ((names, wanted.names), (colours, wanted.colours)):
        weights = torch.ones(told.shape[-1])
        weights[-1] = 0.2
        loss = loss + functional.cross_entropy(told.flatten(0, 1), right.flatten(), weights)
    return loss


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train the eyes of Corral's built-in model.")
    parser.add_argument("folder", type=Path, help="for the pictures, the stages and the GGUF")
    parser.add_argument("--teacher-steps", type=int, default=400)
    parser.add_argument("--eyes-steps", type=int, default=2600)
    parser.add_argument("--answer-steps", type=int, default=600)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(arguments.folder, arguments.seed)
    trainer.train_teacher(arguments.teacher_steps)
    trainer.train_eyes(arguments.eyes_steps)
    trainer.train_answers(arguments.answer_steps)
    weights = {name: one.numpy() for name, one in trainer.learner.eyes.state_dict().items()}
    path = arguments.folder / FILE
    write_gguf(path, SHAPE, weights)
    print(f"{path}: {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()

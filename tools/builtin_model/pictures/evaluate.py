"""Scores what the built-in model sees in drawn pictures, through Corral's own engine.

    python -m tools.builtin_model.pictures.evaluate [--projector FILE] [--pictures 300] [--show]

No picture was trained with: they are of other seeds, from 64 to 512 pixels, most of them with noise or
as JPEG, half of them on paper with lines or dots, which training never had. Half of the questions are
worded as none in training. An answer counts only if it is word for word the right one. The exit status
is 1 if fewer than 90% are right.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from serve_app.base.values.media import MEDIUM, Picture
from serve_app.engine import Engine, EngineOptions, GenerationRequest, SamplingParams, TokenStream
from serve_app.prompt.conversation import Attachment, Turn
from serve_app.prompt.tokenizer import Tokenizer
from serve_app.store.builtin_model import BUILTIN_MODEL, BUILTIN_PROJECTOR
from tools.builtin_model.pictures.drawing import draw, flawed
from tools.builtin_model.pictures.questions import Asked, questions
from tools.builtin_model.pictures.scenes import scene

WANTED = 0.9
_SEED = "held out"
_N_CTX_SLOT = 256


@dataclass(frozen=True, slots=True)
class Case:
    """A question about a picture. `new` says whether its wording, and the paper, were not trained with."""

    picture: Picture
    asked: Asked
    new: tuple[bool, bool]


def cases(n_pictures: int) -> list[Case]:
    """All questions about so many pictures. The same number gives the same ones."""
    made = []
    for number in range(n_pictures):
        dice = random.Random(f"{_SEED}/{number}")
        about, new = scene(dice), (number % 2 == 0, number % 4 < 2)
        drawn = draw(about, dice, round(2 ** dice.uniform(6, 9)), held_out=new[1])
        if dice.random() < 0.7:
            drawn = flawed(drawn, dice)
        picture = Picture.of(drawn.tobytes(), *drawn.size)
        made += [Case(picture, asked, new) for asked in questions(about, dice, held_out=new[0])]
    return made


def ask(engine: Engine, tokenizer: Tokenizer, asked: Sequence[Case]) -> list[str]:
    """The model's answers."""
    return asyncio.run(_answers(engine, tokenizer, asked))


async def _answers(engine: Engine, tokenizer: Tokenizer, asked: Sequence[Case]) -> list[str]:
    greedy = SamplingParams(temperature=0, max_tokens=40)
    outcomes = engine.submit_many(
        [
            GenerationRequest(
                f"question {number}",
                _prompt(tokenizer, case.asked.question),
                greedy,
                media=(case.picture,),
            )
            for number, case in enumerate(asked)
        ]
    )
    answers = []
    for outcome in outcomes:
        if not isinstance(outcome, TokenStream):
            raise outcome
        answers.append("".join([delta.text async for delta in outcome]))
    return answers


def _prompt(tokenizer: Tokenizer, question: str) -> tuple[int, ...]:
    tokens = tokenizer.encode_chat([Turn("user", (Attachment(""), question))])
    return tuple(MEDIUM if token < 0 else token for token in tokens)


class Tally:
    """Counts right answers."""

    def __init__(self) -> None:
        self._right: Counter[str] = Counter()
        self._all: Counter[str] = Counter()

    def add(self, case: Case, *, right: bool) -> None:
        new_words, new_paper = case.new
        for name in (
            case.asked.kind,
            "wording: new" if new_words else "wording: as in training",
            "paper: new" if new_paper else "paper: as in training",
            "all",
        ):
            self._all[name] += 1
            self._right[name] += right

    @property
    def share(self) -> float:
        """Of all answers, those that were right."""
        return self._right["all"] / self._all["all"]

    def __str__(self) -> str:
        lines = [f"| {name} | {n} | {self._right[name] / n:.1%} |" for name, n in self._all.items()]
        return "\n".join(["| what | questions | right |", "| --- | --- | --- |", *sorted(lines)])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Score what the built-in model sees.")
    parser.add_argument("--projector", type=Path, default=BUILTIN_PROJECTOR)
    parser.add_argument("--pictures", type=int, default=300, help="default: 300")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--show", action="store_true", help="the wrong answers, too")
    arguments = parser.parse_args()
    asked = cases(arguments.pictures)
    options = EngineOptions(
        8, _N_CTX_SLOT, arguments.threads, max_waiting=len(asked), projector=arguments.projector
    )
    engine = Engine.load(BUILTIN_MODEL, options)
    tally = Tally()
    for case, answer in zip(asked, ask(engine, Tokenizer(BUILTIN_MODEL), asked), strict=True):
        tally.add(case, right=answer == case.asked.answer)
        if arguments.show and answer != case.asked.answer:
            print(f"    {case.asked.question!r} -> {answer!r}, and not {case.asked.answer!r}")
    engine.close()
    print(tally)
    raise SystemExit(tally.share < WANTED)


if __name__ == "__main__":
    main()

"""Trains the built-in model, or a draft model for it, on the corpus and writes its GGUF.

    python -m tools.builtin_model.train WORK_DIR [--steps 4600] [--device cpu|cuda]
    python -m tools.builtin_model.train WORK_DIR --draft [--steps 4600] [--threads 1]

Needs the `train` extra. Run again with the same folder, it goes on from the last checkpoint. The
same seed and steps make the same text; on the same machine, nearly the same model.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from serve_app.prompt.chat_template import ChatTemplate
from tools.builtin_model import vocabulary
from tools.builtin_model.corpus.conversation import Conversation
from tools.builtin_model.corpus.source import Source
from tools.builtin_model.export import write_gguf
from tools.builtin_model.network import Network
from tools.chat_template import CHAT_TEMPLATE, CONTROL_TOKENS
from tools.gguf_file import ModelShape

SHAPE = ModelShape("corral-demo", 6, 256, 768, 4, 2, 64, 3072, 2048)
"""The trained model: 5.5 million parameters, 5.9 MB as Q8_0."""

DRAFT_SHAPE = ModelShape("corral-demo-draft", 2, 192, 416, 3, 1, 64, 3072, 2048)
"""A draft model for it: 1.3 million parameters, 1.5 MB as Q8_0."""

_TOKENS_PER_STEP, _DRAFT_TOKENS_PER_STEP = 8192, 4096
_CURRICULUM = ((0.65, (512,)), (1.0, (512, 2048, 1024, 2048)))
"""Until which part of the training, rows of which lengths take turns."""
_DRAFT_LENGTH = 512  # all that a draft model sees
_WARM_UP_STEPS = 100
_DECAY_FROM = 0.6
"""From this part of the training on, the learning rate falls to nothing."""
_TEMPLATE = ChatTemplate(CHAT_TEMPLATE, bos="", eos=CONTROL_TOKENS[2])
_CHECKPOINT_STEPS = 250


@dataclass(frozen=True, slots=True)
class Plan:
    """One training run; the checkpoint of another plan is not taken up."""

    steps: int
    learning_rate: float
    seed: int
    draft: bool

    @property
    def shape(self) -> ModelShape:
        """The trained model's."""
        return DRAFT_SHAPE if self.draft else SHAPE

    @property
    def tokens_per_step(self) -> int:
        """In all rows."""
        return _DRAFT_TOKENS_PER_STEP if self.draft else _TOKENS_PER_STEP

    def length(self, step: int) -> int:
        """How many tokens long the rows of this step are."""
        if self.draft:
            return _DRAFT_LENGTH
        lengths = next(lengths for until, lengths in _CURRICULUM if step < until * self.steps)
        return lengths[step % len(lengths)]

    def rate(self, step: int) -> float:
        """The learning rate's factor: a short rise, a plateau, a straight fall."""
        decay = (self.steps - step) / (self.steps * (1 - _DECAY_FROM))
        return min(1.0, (step + 1) / _WARM_UP_STEPS, decay)


def text_of(conversation: Conversation) -> str:
    """The conversation as the chat template lays it out."""
    return _TEMPLATE.render(conversation.messages, conversation.tools, add_generation_prompt=False)


class Rows:
    """Conversations as rows of token ids, and which of them the assistant says."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pad, self._start, self._end = (tokenizer.token_to_id(t) for t in CONTROL_TOKENS)
        self._assistant = tokenizer.encode("assistant").ids

    def batch(self, seed: str, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Token ids, `[rows, length + 1]`; and for each whether it is to be learned."""
        made = [self._row(f"{seed}/{row}", length + 1) for row in range(rows)]
        return torch.tensor([ids for ids, _ in made]), torch.tensor([said for _, said in made])

    def _row(self, seed: str, length: int) -> tuple[list[int], list[bool]]:
        conversation = Conversation(Source(seed))
        turns = conversation.grow()
        ids: list[int] = []
        wanted = length
        while len(ids) < length:
            while _estimate(conversation) < wanted:
                next(turns)
            ids = self._tokenizer.encode(text_of(conversation)).ids
            wanted += length // 4
        return ids[:length], self.said_by_assistant(ids[:length])

    def said_by_assistant(self, ids: list[int]) -> list[bool]:
        """For each token whether the assistant says it; the end of his turn is his."""
        said = [False] * len(ids)
        header = [self._start, *self._assistant]
        speaking = False
        for index, token in enumerate(ids):
            if token == self._start:
                speaking = ids[index : index + len(header)] == header
                body = index + len(header) + 1  # after the line's end
            said[index] = speaking and index >= body
            if token == self._end:
                speaking = False
        return said


def _estimate(conversation: Conversation) -> int:
    """About how many tokens the conversation has."""
    text = sum(len(message["content"]) for message in conversation.messages)
    return text // 5 + 6 * len(conversation.messages) + 120 * len(conversation.tools)


def _sample_texts(seed: int) -> Iterator[str]:
    """Conversations to learn the tokens from."""
    for index in range(6000):
        conversation = Conversation(Source(f"{seed}/tokens/{index}"))
        for _ in islice(conversation.grow(), 6):
            pass
        yield text_of(conversation)


def _tokenizer(folder: Path, seed: int) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        vocabulary.learn(_sample_texts(seed), SHAPE.n_vocab).save(str(path))
    return Tokenizer.from_file(str(path))


class Trainer:
    """The model, its optimizers and where in the plan they are."""

    def __init__(self, folder: Path, plan: Plan, device: str) -> None:
        torch.manual_seed(plan.seed)
        self._plan, self._device = plan, device
        self._checkpoint = folder / "checkpoint.pt"
        self._rows = Rows(_tokenizer(folder, plan.seed))
        self.network = Network(plan.shape).to(device)
        self._hidden = torch.compile(self.network, dynamic=False)
        matrices = [p for n, p in self.network.named_parameters() if p.ndim == 2 and "blocks" in n]
        others = [p for n, p in self.network.named_parameters() if p.ndim < 2 or "blocks" not in n]
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices, lr=plan.learning_rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(others, lr=plan.learning_rate, betas=(0.9, 0.98), weight_decay=0.0),
        ]
        self.step, self.seconds = 0, 0.0
        if self._checkpoint.is_file():
            self._resume()

    def run(self) -> None:
        """Train to the end of the plan, with a line of progress and a checkpoint now and then."""
        losses: list[float] = []
        while self.step < self._plan.steps:
            began = time.monotonic()
            losses.append(self._train_step())
            self.step += 1
            self.seconds += time.monotonic() - began
            if self.step % 25 == 0 or self.step == self._plan.steps:
                left = self.seconds / self.step * (self._plan.steps - self.step)
                print(
                    f"step {self.step}/{self._plan.steps}  loss {sum(losses) / len(losses):.4f}  "
                    f"rows of {self._plan.length(self.step - 1)}  {self.seconds / 60:.1f} min, "
                    f"about {left / 60:.0f} to go",
                    flush=True,
                )
                losses.clear()
            if self.step % _CHECKPOINT_STEPS == 0 or self.step == self._plan.steps:
                self._save()

    def _train_step(self) -> float:
        length = self._plan.length(self.step)
        seed = f"{self._plan.seed}/{self.step}"
        tokens, said = self._rows.batch(seed, self._plan.tokens_per_step // length, length)
        tokens, learned = tokens.to(self._device), said[:, 1:].flatten().to(self._device)
        with torch.autocast(self._device, dtype=torch.bfloat16):
            hidden = self._hidden(tokens[:, :-1]).flatten(0, 1)[learned]
            logits = self.network.logits(hidden)
        loss = functional.cross_entropy(logits.float(), tokens[:, 1:].flatten()[learned])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self._plan.learning_rate * self._plan.rate(self.step)
            optimizer.step()
            optimizer.zero_grad()
        return float(loss.item())

    def _save(self) -> None:
        part = self._checkpoint.with_suffix(".part")
        torch.save(
            {
                "plan": asdict(self._plan),
                "network": self.network.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
                "step": self.step,
                "seconds": self.seconds,
            },
            part,
        )
        part.replace(self._checkpoint)

    def _resume(self) -> None:
        state = torch.load(self._checkpoint, map_location=self._device, weights_only=True)
        if state["plan"] != asdict(self._plan):
            raise SystemExit(f"{self._checkpoint} belongs to another plan: {state['plan']}")
        self.network.load_state_dict(state["network"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.seconds = state["step"], state["seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train Corral's built-in model, or its draft.")
    parser.add_argument("folder", type=Path, help="for the tokenizer, the checkpoint and the GGUF")
    parser.add_argument(
        "--steps", type=int, default=4600, help="of 8192 tokens, or 4096 of the draft's"
    )
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draft", action="store_true", help="the draft model")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(arguments.threads)
    plan = Plan(arguments.steps, arguments.learning_rate, arguments.seed, arguments.draft)
    trainer = Trainer(arguments.folder, plan, arguments.device)
    trainer.run()
    weights = {
        name: values.float().cpu().numpy() for name, values in trainer.network.state_dict().items()
    }
    tokens, merges = vocabulary.tokens_and_merges(arguments.folder / "tokenizer.json")
    path = arguments.folder / f"{plan.shape.name}-q8_0.gguf"
    write_gguf(path, plan.shape, weights, tokens, merges)
    size = path.stat().st_size / 1e6
    print(f"{path}: {size:.1f} MB, trained for {trainer.seconds / 60:.0f} minutes on {plan}")


if __name__ == "__main__":
    main()

"""Writes and scores answers with a model on this machine, a group of answers to each prompt.

What a batch of prompts is answered follows from its number, the seed and the versions of the
weights that wrote each token, and from nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Reward = Callable[..., Sequence[float | None]]
Text = str | list[dict[str, Any]]  # a prompt, or the messages of a conversation


@dataclass(frozen=True)
class Writing:
    """How answers are written.

    answers: to each prompt.
    most_tokens: of an answer.
    """

    answers: int
    most_tokens: int
    temperature: float = 1.0
    seed: int = 0


class Answers(NamedTuple):
    """Answers to a list of prompts, a row each: `answers` rows to the first prompt, and so on."""

    prompts: list[list[int]]  # a row each, as tokens
    tokens: list[list[int]]
    log_probs: list[list[float]]
    rewards: np.ndarray[Any, Any]  # NaN where a reward is None


class Sampler:
    """A model, its tokenizer, prompts and rewards.

    prompts: rows with a column `prompt`; the rewards get the other columns as arguments, as in TRL.
    """

    def __init__(
        self, model: Any, tokenizer: Any, prompts: Any, rewards: Reward | Sequence[Reward]
    ):
        self.model, self.tokenizer, self.prompts = model.eval(), tokenizer, prompts
        self.rewards = [rewards] if callable(rewards) else list(rewards)
        ends = model.generation_config.eos_token_id
        ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
        if tokenizer.eos_token_id is not None:
            ends.append(tokenizer.eos_token_id)
        self._ends = torch.tensor(ends, dtype=torch.long)
        self._pad = tokenizer.pad_token_id or 0  # never attended to

    def batch(
        self, writing: Writing, number: int, size: int, take: Callable[[int], None]
    ) -> Answers:
        """The answers to the `size` prompts of batch `number`; take: called before each token."""
        first = number * size
        rows = [self.prompts[i % len(self.prompts)] for i in range(first, first + size)]
        return self.answer(rows, writing, number, take)

    def answer(
        self,
        rows: Sequence[dict[str, Any]],
        writing: Writing,
        number: int,
        take: Callable[[int], None] = lambda step: None,
        *,
        greedy: bool = False,
    ) -> Answers:
        """Answers to these rows, scored. number: of the random stream."""
        repeated = [row for row in rows for _ in range(writing.answers)]
        encoded = {id(row): self._encode(row["prompt"]) for row in rows}
        ids = [encoded[id(row)] for row in repeated]
        seed = np.random.SeedSequence([writing.seed, number]).generate_state(2, np.uint32)
        generator = torch.Generator().manual_seed(int(seed[0]) << 31 ^ int(seed[1]))
        tokens, log_probs = self._write(ids, writing, generator, take, greedy)
        return Answers(ids, tokens, log_probs, self._score(repeated, tokens))

    def _encode(self, prompt: Text) -> list[int]:
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt)["input_ids"])
        encoded = self.tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, tokenize=True, return_dict=True
        )
        return list(encoded["input_ids"])

    @torch.no_grad()
    def _write(
        self,
        prompts: list[list[int]],
        writing: Writing,
        generator: torch.Generator,
        take: Callable[[int], None],
        greedy: bool,
    ) -> tuple[list[list[int]], list[list[float]]]:
        model = self.model
        device, longest = model.device, max(map(len, prompts))
        padded = [[self._pad] * (longest - len(one)) + one for one in prompts]
        ids = torch.tensor(padded, device=device)
        mask = torch.tensor(
            [[0] * (longest - len(one)) + [1] * len(one) for one in prompts], device=device
        )
        ended = torch.zeros(len(prompts), dtype=torch.bool)
        columns: list[Tensor] = []
        chances: list[Tensor] = []
        alive: list[Tensor] = []
        cache = None
        for step in range(writing.most_tokens):
            take(step)
            places = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            out = model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=places,
                cache=cache,
                use_cache=True,
            )
            cache = out.cache
            log_probs = (out.logits[:, -1].float() / writing.temperature).log_softmax(-1).cpu()
            if greedy:
                token = log_probs.argmax(-1, keepdim=True)
            else:
                token = torch.multinomial(log_probs.exp(), 1, generator=generator)
            columns.append(token)
            chances.append(log_probs.gather(1, token))
            alive.append(~ended)
            ended = ended | torch.isin(token[:, 0], self._ends)
            if ended.all():
                break
            ids = token.to(device)
            mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], 1)
        lengths = torch.stack(alive, 1).sum(1).tolist()
        return tuple(
            [row[:length] for row, length in zip(torch.cat(all_, 1).tolist(), lengths, strict=True)]
            for all_ in (columns, chances)
        )  # type: ignore[return-value]

    def _score(self, rows: Sequence[dict[str, Any]], tokens: list[list[int]]) -> Any:
        texts = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        chat = not isinstance(rows[0]["prompt"], str)
        written: list[Any] = (
            [[{"role": "assistant", "content": text}] for text in texts] if chat else texts
        )
        columns = {key: [row[key] for row in rows] for key in rows[0] if key != "prompt"}
        total = np.zeros(len(rows))
        for reward in self.rewards:
            scores = reward(
                prompts=[row["prompt"] for row in rows],
                completions=written,
                completion_ids=tokens,
                **columns,
            )
            if len(scores) != len(rows):
                name = getattr(reward, "__name__", type(reward).__name__)
                raise ValueError(f"{name} returned {len(scores)} rewards for {len(rows)} answers")
            total += [math.nan if score is None else score for score in scores]
        return total


def advantages(rewards: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Of the answers to one prompt, as TRL's own worker computes them; 0 without a reward."""
    scored = ~np.isnan(rewards)
    result = np.zeros_like(rewards)
    if scored.any():
        values = rewards[scored]
        result[scored] = (values - values.mean()) / (values.std() + 1e-8)
    return result

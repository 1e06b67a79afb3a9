"""Writes and scores answers with a model on this machine, a group of answers to each prompt.

What a batch of prompts is answered follows from its number, the seed and the versions of the
weights that wrote each token, and from nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

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


@dataclass
class SampledAnswer:
    """One answer to a prompt.

    reward: NaN if all rewards are None.
    number, group: of the answer and of its prompt in the run.
    versions: pairs (token, version): from this token on, this version wrote it.
    staleness: TRL's own figure, of when the trainer took it.
    """

    prompt: list[int]
    tokens: list[int]
    log_probs: list[float]
    reward: float
    number: int
    group: int
    versions: list[tuple[int, int]] = field(default_factory=list)
    staleness: int = 0

    def spans(self) -> list[tuple[int, int, int]]:
        """Triples (version, first token, first token of another version)."""
        ends = [step for step, _ in self.versions[1:]] + [len(self.tokens)]
        pairs = zip(self.versions, ends, strict=True)
        return [(version, start, end) for (start, version), end in pairs]


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

    def answer(
        self,
        rows: Sequence[dict[str, Any]],
        writing: Writing,
        batch: int,
        take: Callable[[int], None] = lambda step: None,
        *,
        greedy: bool = False,
    ) -> list[SampledAnswer]:
        """Answers to these rows, which are a batch of this number; those to one row in a row.

        take: called before each token.
        """
        repeated = [row for row in rows for _ in range(writing.answers)]
        prompts = [ids for row in rows for ids in [self._encode(row["prompt"])] * writing.answers]
        seed = np.random.SeedSequence([writing.seed, batch]).generate_state(2, np.uint32)
        generator = torch.Generator().manual_seed(int(seed[0]) << 31 ^ int(seed[1]))
        texts = self._write(prompts, writing, generator, take, greedy)
        rewards = self._score(repeated, [tokens for tokens, _ in texts])
        first = batch * len(repeated)
        return [
            SampledAnswer(prompt, *text, reward, number, number // writing.answers)
            for number, (prompt, text, reward) in enumerate(
                zip(prompts, texts, rewards, strict=True), first
            )
        ]

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
    ) -> list[tuple[list[int], list[float]]]:
        """Tokens with their log-probabilities, for each prompt."""
        device, longest = self.model.device, max(map(len, prompts))
        padded = [[self._pad] * (longest - len(one)) + one for one in prompts]
        ids = torch.tensor(padded, device=device)
        masks = [[0] * (longest - len(one)) + [1] * len(one) for one in prompts]
        mask = torch.tensor(masks, device=device)
        ended = torch.zeros(len(prompts), dtype=torch.bool)
        columns: list[Tensor] = []
        chances: list[Tensor] = []
        alive: list[Tensor] = []
        cache = None
        for step in range(writing.most_tokens):
            take(step)
            places = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            out = self.model(
                input_ids=ids, attention_mask=mask, position_ids=places, cache=cache, use_cache=True
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
        tokens, log_probs = (torch.cat(one, 1).tolist() for one in (columns, chances))
        rows = zip(tokens, log_probs, lengths, strict=True)
        return [(row[:length], chance[:length]) for row, chance, length in rows]

    def _score(self, rows: Sequence[dict[str, Any]], tokens: list[list[int]]) -> list[float]:
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
        return list(total.tolist())


def advantages(rewards: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Of the answers to one prompt, as TRL's own worker computes them; 0 without a reward."""
    scored = ~np.isnan(rewards)
    result = np.zeros_like(rewards)
    if scored.any():
        values = rewards[scored]
        result[scored] = (values - values.mean()) / (values.std() + 1e-8)
    return result

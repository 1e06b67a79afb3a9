"""Small language tasks: a prompt is read, an answer is written one token a step, a score ends it.

    observation  the text so far: prompt, then the answer's tokens, then zeros
    action       the next token, less one
    reward       0, and at the last token the score of the answer, from 0 to 1

Every answer of a task has the same length. In a vector, `group_size` environments beside each other
have the same prompts, one after another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

Array = np.ndarray[Any, Any]
# Zero is the padding after a text; a digit d is 1 + d.
PLUS, MINUS, TIMES, EQUALS = 11, 12, 13, 14
NUM_TOKENS = 15


class Task(ABC):
    """A kind of prompt, and how its answers are scored."""

    shortest, longest = 1, 64  # of `length`
    prompt_length: int
    answer_length: int
    num_actions = 10  # digits alone

    @property
    def text_length(self) -> int:
        """Of a prompt with its answer."""
        return self.prompt_length + self.answer_length

    @abstractmethod
    def prompt(self, rng: np.random.Generator) -> Array:
        """Draw a prompt."""

    @abstractmethod
    def score(self, prompts: Array, answers: Array) -> Array:
        """How good each answer is, from 0 to 1."""


class Copy(Task):
    """Write the digits again. The score is the share of the tokens that are right."""

    def __init__(self, length: int):
        self.prompt_length = length + 1
        self.answer_length = length

    def prompt(self, rng: np.random.Generator) -> Array:
        return np.append(1 + rng.integers(10, size=self.answer_length), EQUALS)

    def score(self, prompts: Array, answers: Array) -> Array:
        return (answers == self.expected(prompts)).mean(1)

    def expected(self, prompts: Array) -> Array:
        """The right answers."""
        return prompts[:, :-1]


class Sort(Copy):
    """Write the digits in rising order."""

    def expected(self, prompts: Array) -> Array:
        return np.sort(prompts[:, :-1], axis=1)


class Addition(Copy):
    """Add two numbers of `length` digits: 12+94= is answered by 106."""

    longest = 18  # sums are 64-bit integers

    def __init__(self, length: int):
        self.length = length
        self.prompt_length = 2 * length + 2
        self.answer_length = length + 1

    def prompt(self, rng: np.random.Generator) -> Array:
        digits = 1 + rng.integers(10, size=(2, self.length))
        return np.concatenate([digits[0], [PLUS], digits[1], [EQUALS]])

    def expected(self, prompts: Array) -> Array:
        worth = 10 ** np.arange(self.length)[::-1]
        first, second = prompts[:, : self.length] - 1, prompts[:, self.length + 1 : -1] - 1
        total = first @ worth + second @ worth
        return 1 + total[:, None] // 10 ** np.arange(self.length + 1)[::-1] % 10


class Countdown(Task):
    """Reach a number of two digits with `length` given ones: 2 3 4 and 20 by 2+3*4.

    It is read from the left, without precedence. The score is 1 if the answer uses each number once
    and reaches the target, 0.1 if it only alternates numbers and signs, and 0 otherwise.
    """

    shortest, longest = 2, 9
    num_actions = 13  # digits and signs

    def __init__(self, length: int):
        self.length = length
        self.prompt_length = length + 3
        self.answer_length = 2 * length - 1

    def prompt(self, rng: np.random.Generator) -> Array:
        while True:
            numbers, signs = rng.integers(1, 10, self.length), rng.integers(3, size=self.length - 1)
            target = self._value(rng.permutation(numbers), PLUS + signs)
            if 0 <= target < 100:
                return np.concatenate([1 + numbers, [1 + target // 10, 1 + target % 10, EQUALS]])

    def score(self, prompts: Array, answers: Array) -> Array:
        return np.array([self._score(*pair) for pair in zip(prompts, answers, strict=True)])

    def _score(self, prompt: Array, answer: Array) -> float:
        numbers, signs = answer[::2] - 1, answer[1::2]
        if (numbers > 9).any() or (signs < PLUS).any():
            return 0.0
        target = 10 * (prompt[self.length] - 1) + prompt[self.length + 1] - 1
        allowed = np.sort(prompt[: self.length] - 1)
        is_right = (np.sort(numbers) == allowed).all() and self._value(numbers, signs) == target
        return 1.0 if is_right else 0.1

    def _value(self, numbers: Array, signs: Array) -> int:
        value = int(numbers[0])
        for number, sign in zip(numbers[1:], signs, strict=True):
            step = {PLUS: value + number, MINUS: value - number, TIMES: value * number}
            value = int(step[int(sign)])
        return value


TASKS = {"copy": Copy, "sort": Sort, "addition": Addition, "countdown": Countdown}


def make_task(task: str, length: int) -> Task:
    """The task of a name."""
    if task not in TASKS:
        raise ValueError(f"task={task!r}: it is one of {', '.join(TASKS)}")
    kind = TASKS[task]
    if not kind.shortest <= length <= kind.longest:
        raise ValueError(f"length={length}: it is {kind.shortest} to {kind.longest} for {task}")
    return kind(length)


def spaces_of(task: Task) -> tuple[Box, Discrete]:
    """The spaces of texts and of tokens."""
    texts = Box(0, NUM_TOKENS - 1, (task.text_length,), np.int64)
    return texts, Discrete(task.num_actions)


class Tokens(gym.Env[Any, Any]):
    """One environment."""

    def __init__(self, task: str = "sort", length: int = 6, group_size: int = 1):
        self.task = make_task(task, length)
        self.observation_space, self.action_space = spaces_of(self.task)

    def reset(
        self, *, seed: int | None = None, options: Any = None
    ) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        self._text: Array = np.zeros(self.task.text_length, np.int64)
        self._length = self.task.prompt_length
        self._text[: self._length] = self.task.prompt(self.np_random)
        return self._text.copy(), {}

    def step(self, action: int) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        self._text[self._length] = 1 + action
        self._length += 1
        if self._length < len(self._text):
            return self._text.copy(), 0.0, False, False, {}
        prompt, answer = np.split(self._text[None], [self.task.prompt_length], axis=1)
        return self._text.copy(), float(self.task.score(prompt, answer)[0]), True, False, {}


class TokensVector(VectorEnv[Array, Array, Array]):
    """Many at once. Prompt k of a group is the same for all of its members, whenever it is read."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012 - gymnasium's

    def __init__(self, num_envs: int, task: str = "sort", length: int = 6, group_size: int = 1):
        if group_size < 1:
            raise ValueError(f"group_size={group_size}: it is 1 or more")
        self.num_envs, self.group_size = num_envs, group_size
        self.task = make_task(task, length)
        self.single_observation_space, self.single_action_space = spaces_of(self.task)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        which = (options or {}).get("reset_mask")
        if which is None:
            which = np.ones(self.num_envs, bool)
            self._texts: Array = np.zeros((self.num_envs, self.task.text_length), np.int64)
            self._lengths = np.zeros(self.num_envs, np.int64)
            self._episodes = np.zeros(self.num_envs, np.int64)
            self._stream = int(self.np_random.integers(2**32))
        self._begin(which)
        return self._texts.copy(), {}

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        self._texts[np.arange(self.num_envs), self._lengths] = 1 + np.asarray(actions)
        self._lengths += 1
        ended: Array = np.equal(self._lengths, self.task.text_length)
        rewards, info = np.zeros(self.num_envs), {}
        if ended.any():
            info["final_obs"] = self._texts.copy()
            prompts, answers = np.split(self._texts[ended], [self.task.prompt_length], axis=1)
            rewards[ended] = self.task.score(prompts, answers)
            self._begin(ended)
        return self._texts.copy(), rewards, ended, np.zeros(self.num_envs, bool), info

    def state_dict(self) -> dict[str, Any]:
        """Where each episode is, and which come next."""
        return {
            "random": self.np_random.bit_generator.state,
            "stream": self._stream,
            "texts": self._texts.copy(),
            "lengths": self._lengths.copy(),
            "episodes": self._episodes.copy(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.np_random.bit_generator.state = state["random"]
        self._stream, self._texts = state["stream"], state["texts"]
        self._lengths, self._episodes = state["lengths"], state["episodes"]

    def _begin(self, which: Array) -> None:
        """Start the next episodes of some."""
        self._texts[which] = 0
        self._lengths[which] = self.task.prompt_length
        for i in np.flatnonzero(which):
            place = (self._stream, int(i) // self.group_size, int(self._episodes[i]))
            rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(place)))
            self._texts[i, : self.task.prompt_length] = self.task.prompt(rng)
        self._episodes[which] += 1


gym.register(
    "lockstep/Tokens-v0",
    "harness.environments.tokens:Tokens",
    vector_entry_point="harness.environments.tokens:TokensVector",
)

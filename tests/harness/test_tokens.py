"""The language tasks, by worked examples."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

from harness.environments.tokens import Tokens, TokensVector, make_task

SIGNS = {"+": 11, "-": 12, "*": 13, "=": 14}


def tokens(text: str) -> np.ndarray:
    return np.array([SIGNS.get(sign) or 1 + int(sign) for sign in text])


def score(task: str, length: int, prompt: str, answer: str) -> float:
    (result,) = make_task(task, length).score(tokens(prompt)[None], tokens(answer)[None])
    return float(result)


@pytest.mark.parametrize(
    ("task", "length", "prompt", "answer", "expected"),
    [
        ("copy", 3, "305=", "305", 1),
        ("copy", 3, "305=", "335", 2 / 3),
        ("sort", 4, "3051=", "0135", 1),
        ("sort", 4, "3051=", "3135", 3 / 4),
        ("addition", 2, "12+94=", "106", 1),
        ("addition", 2, "02+03=", "005", 1),
        ("addition", 2, "12+94=", "006", 2 / 3),
        ("addition", 18, "9" * 18 + "+" + "9" * 18 + "=", "1" + "9" * 17 + "8", 1),
        ("sort", 16, "9876543210543210=", "0011223344556789", 1),
        ("countdown", 3, "23420=", "2+3*4", 1),  # from the left: (2 + 3) * 4
        ("countdown", 3, "23420=", "4+3+2", 0.1),
        ("countdown", 3, "23420=", "5+0*4", 0.1),  # other numbers
        ("countdown", 3, "23420=", "23*44", 0),
    ],
)
def test_the_score_of_an_answer(task, length, prompt, answer, expected):
    assert score(task, length, prompt, answer) == pytest.approx(expected)


@pytest.mark.parametrize("task", ["copy", "sort", "addition", "countdown"])
def test_an_episode_is_a_text(task):
    env = Tokens(task, 3)
    text, _ = env.reset(seed=1)
    prompt = text[text > 0]
    assert len(prompt) == env.task.prompt_length
    written, done, reward = [], False, 0.0
    while not done:
        action = int(env.np_random.integers(env.action_space.n))
        text, reward, done, *_ = env.step(action)
        written.append(1 + action)
        assert env.observation_space.contains(text)
        assert text[text > 0].tolist() == [*prompt, *written]
        assert done or reward == 0
    assert len(written) == env.task.answer_length
    assert reward == env.task.score(prompt[None], np.array([written]))[0]


def test_countdown_can_be_solved():
    rng, task = np.random.default_rng(0), make_task("countdown", 3)
    for _ in range(20):
        prompt = task.prompt(rng)
        numbers = prompt[:3]
        scores = [
            task.score(prompt[None], np.array([[numbers[i], s, numbers[j], z, numbers[k]]]))[0]
            for i, j, k in [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
            for s in (11, 12, 13)
            for z in (11, 12, 13)
        ]
        assert max(scores) == 1


def test_a_vector_has_the_same_prompts_within_a_group_and_again_with_its_seed():
    vector, again = (TokensVector(6, "sort", 2, group_size=3) for _ in range(2))
    seen = []
    for one in (vector, again):
        prompts = [one.reset(seed=5)[0]]
        for step in range(6):
            texts, rewards, ended, _, info = one.step(np.arange(6) % 2)
            assert ended.all() == (step % 2 == 1) == ("final_obs" in info)
            if ended.all():
                assert (rewards == one.task.score(*np.split(info["final_obs"], [3], axis=1))).all()
                prompts.append(texts)
        seen.append(np.stack(prompts))
    assert (seen[0] == seen[1]).all()
    for prompts in seen[0]:
        assert (prompts[:3] == prompts[0]).all()
        assert (prompts[3:] == prompts[3]).all()
    assert len(np.unique(seen[0].reshape(-1, 5), axis=0)) == 8  # four rounds of two groups


def test_a_member_that_is_reset_alone_reads_its_groups_next_prompt():
    vector = TokensVector(2, "sort", 2, group_size=2)
    vector.reset(seed=0)
    alone, _ = vector.reset(options={"reset_mask": np.array([True, False])})
    vector.step(np.zeros(2, int))
    texts, *_ = vector.step(np.zeros(2, int))
    assert (texts[1] == alone[0]).all()


def test_an_unknown_task_is_refused():
    with pytest.raises(
        ValueError, match="task='sorting': it is one of copy, sort, addition, countd"
    ):
        gym.make("lockstep/Tokens-v0", task="sorting")
    with pytest.raises(ValueError, match="length=1: it is 2 to 9 for countdown"):
        make_task("countdown", 1)
    with pytest.raises(ValueError, match="length=19: it is 1 to 18 for addition"):
        make_task("addition", 19)

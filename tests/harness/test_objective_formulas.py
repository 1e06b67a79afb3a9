"""Each objective against the formula of its source, written again as loops over frames.

The references are taken from the papers (docs/objectives.md says where a formula was read), and
share no code with the objectives. A function of what is trained, `now`, and of the same numbers
held still, `still`, is what the paper writes: sg(x) is x of `still`. Its gradient is a difference
quotient. All numbers are of 64 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from harness.algorithms.objectives import Frames, objective
from tests.harness.actor_critics import options

LENGTHS = (1, 2, 4, 3, 2)  # of five episodes
RATIOS = (1.7, 0.6, 1.12, 1.25, 0.85, 2.6, 0.95, 0.4, 1.05, 0.7, 1.02, 0.97)  # to what acted
WEIGHTS = (0.4, 6.5, 1.3, 0.9, 2.2, 1.1, 5.6, 0.7, 1.9, 1.4, 0.3, 1.05)  # the proximal one to it
ACTED = (0.3, 0.7, 0.25, 0.6, 0.8, 0.2, 0.5, 0.9, 0.4, 0.35, 0.65, 0.55)  # probabilities
OF_FRAMES = (1.3, -0.7, 2.1, -1.9, 0.4, -0.35, 1.6, 0.9, -2.4, -0.8, 0.6, -1.15)  # advantages
OF_EPISODES = (1.3, *2 * (-0.7,), *4 * (2.1,), *3 * (0.45,), *2 * (-1.6,))  # one for each
AGES = (0, 1, 1, 3, 2, 4, 7, 1, 5, 2, 0, 9)
COUNTS = (True, True, True, False, True, False, True, True, True, True, False, False)
GRADIENTS = (  # of each frame's log-probability, by the three weights of a last layer
    *((0.3, -1.2, 0.5), (1.1, 0.2, -0.4), (-0.6, 0.9, 0.8), (0.2, 0.1, -1.5), (1.4, -0.3, 0.6)),
    *((-0.9, 0.7, 0.2), (0.5, 0.5, -0.1), (0.8, -1.1, 0.3), (-0.2, 0.6, 1.7), (0.9, 0.4, -0.7)),
    *((-1.3, 0.1, 0.2), (0.7, -0.5, 1.2)),
)


@dataclass(frozen=True)
class Batch:
    """Twelve frames of five episodes."""

    advantages: Sequence[float]
    counts: Sequence[bool]

    # log-probabilities: of the weights that acted, of what is trained, and of the proximal policy
    acted = tuple(math.log(p) for p in ACTED)
    now = tuple(math.log(p * r) for p, r in zip(ACTED, RATIOS, strict=True))
    anchor = tuple(math.log(p * w) for p, w in zip(ACTED, WEIGHTS, strict=True))

    def episodes(self) -> Iterator[list[int]]:
        """The numbers of the frames of each episode."""
        first = 0
        for length in LENGTHS:
            yield list(range(first, first + length))
            first += length

    def counted(self) -> list[int]:
        return [i for i, counts in enumerate(self.counts) if counts]


Numbers = Sequence[float]
Reference = Callable[[Batch, Numbers, Numbers], float]
"""What is maximised, times the number of frames: of a batch, `now` and `still`."""


def clip(x: float, low: float, high: float) -> float:
    return max(low, min(high, x))


def ratio(to: Numbers, now: Numbers, i: int) -> float:
    return math.exp(now[i] - to[i])


def likelihood_ratio(batch: Batch, now: Numbers, episode: Sequence[int]) -> float:
    """The probability of all actions of an episode, by what is trained over that by what acted."""
    product = 1.0
    for i in episode:
        product *= math.exp(now[i]) / math.exp(batch.acted[i])
    return product


def ppo(batch: Batch, to: Numbers, now: Numbers, i: int) -> float:
    """The clipped surrogate of Schulman et al. 2017, with DAPO's wider range upwards."""
    r, a = ratio(to, now, i), batch.advantages[i]
    return min(r * a, clip(r, 1 - 0.2, 1 + 0.28) * a)


# -- clipped


def behaviour(batch: Batch, now: Numbers, still: Numbers) -> float:
    return sum(ppo(batch, batch.acted, now, i) for i in batch.counted())


def proximal(batch: Batch, now: Numbers, still: Numbers) -> float:
    return sum(ppo(batch, batch.anchor, now, i) for i in batch.counted())


def decoupled(batch: Batch, now: Numbers, still: Numbers) -> float:
    """Hilton et al. 2022: the importance ratio is to the behaviour policy, the clip to the other.

    min(p/p_behav A, clip(p/p_prox, 1 - e, 1 + e) p_prox/p_behav A)
    """
    total = 0.0
    for i in batch.counted():
        a, between = batch.advantages[i], math.exp(batch.anchor[i] - batch.acted[i])
        held = clip(ratio(batch.anchor, now, i), 1 - 0.2, 1 + 0.28)
        total += min(ratio(batch.acted, now, i) * a, held * between * a)
    return total


def truncated_weight(batch: Batch, now: Numbers, still: Numbers) -> float:
    """AReaL: the weight of the proximal policy to the behaviour policy is at most 5."""
    total = 0.0
    for i in batch.counted():
        weight = min(5.0, math.exp(batch.anchor[i]) / math.exp(batch.acted[i]))
        total += weight * ppo(batch, batch.anchor, now, i)
    return total


def masked_weight(batch: Batch, now: Numbers, still: Numbers) -> float:
    """IcePop: frames whose weight is outside of 0.5 to 2 have no gradient."""
    total = 0.0
    for i in batch.counted():
        weight = math.exp(batch.anchor[i]) / math.exp(batch.acted[i])
        if 0.5 <= weight <= 2:
            total += weight * ppo(batch, batch.anchor, now, i)
    return total


def dual_clip(batch: Batch, now: Numbers, still: Numbers) -> float:
    """Ye et al. 2020: max(min(r A, clip(r) A), c A) where A is negative."""
    total = 0.0
    for i in batch.counted():
        gain = ppo(batch, batch.acted, now, i)
        if batch.advantages[i] < 0:
            gain = max(gain, 1.2 * batch.advantages[i])
        total += gain
    return total


def a3po(batch: Batch, now: Numbers, still: Numbers) -> float:
    """Li et al. 2025: log p_prox = a log p_behav + (1 - a) sg(log p), a = 1/d for d versions."""
    total = 0.0
    for i in batch.counted():
        share = 1.0 if AGES[i] == 0 else 1 / AGES[i]
        anchor = share * batch.acted[i] + (1 - share) * still[i]
        r, a = math.exp(now[i] - anchor), batch.advantages[i]
        weight = min(5.0, math.exp(anchor - batch.acted[i]))
        total += weight * min(r * a, clip(r, 1 - 0.2, 1 + 0.28) * a)
    return total


def sapo(batch: Batch, now: Numbers, still: Numbers) -> float:
    """Gao et al. 2025: 4/t sigmoid(t (r - 1)) A, with a temperature for each sign of A."""
    total = 0.0
    for i in batch.counted():
        t = 0.5 if batch.advantages[i] > 0 else 2.0
        gate = 4 / t / (1 + math.exp(-t * (ratio(batch.acted, now, i) - 1)))
        total += gate * batch.advantages[i]
    return total


# -- weighted


def vtrace(batch: Batch, now: Numbers, still: Numbers) -> float:
    """Espeholt et al. 2018: rho (r + gamma v - V) grad log p, with rho = min(rho_bar, p/mu)."""
    total = 0.0
    for i in batch.counted():
        total += min(1.1, ratio(batch.acted, still, i)) * batch.advantages[i] * now[i]
    return total


def cispo(batch: Batch, now: Numbers, still: Numbers) -> float:
    """MiniMax-M1, 2025: sg(clip(r, 1 - low, 1 + high)) A log p."""
    total = 0.0
    for i in batch.counted():
        weight = clip(ratio(batch.acted, still, i), 1 - 0.35, 1 + 0.4)
        total += weight * batch.advantages[i] * now[i]
    return total


def truncated_is(batch: Batch, now: Numbers, still: Numbers) -> float:
    """Ionides 2008: the weights of an importance sampling estimate are at most the truncation."""
    return sum(min(ratio(batch.acted, now, i), 1.5) * batch.advantages[i] for i in batch.counted())


def m2po(batch: Batch, now: Numbers, still: Numbers) -> float:
    """Zheng et al. 2025, Algorithm 1: the largest is masked until the mean is within the limit."""
    squares = {}
    for i in batch.counted():
        r = ratio(batch.acted, still, i)
        if (batch.advantages[i] > 0 and r > 1) or (batch.advantages[i] < 0 and r < 1):
            squares[i] = math.log(r) ** 2
    masked = set()
    while squares and sum(squares.values()) / len(squares) > 0.04:
        largest = max(squares, key=squares.__getitem__)
        masked.add(largest)
        del squares[largest]
    assert masked
    assert squares
    kept = [i for i in batch.counted() if i not in masked]
    return sum(ratio(batch.acted, now, i) * batch.advantages[i] for i in kept)


def dppo_mask(batch: Batch, still: Numbers, i: int, divergence: str) -> bool:
    """Qi et al. 2026, equations 12 to 14: whether a frame is kept."""
    mu, pi, a = math.exp(batch.acted[i]), math.exp(still[i]), batch.advantages[i]
    if divergence == "tv":
        apart, limit = abs(mu - pi), 0.15
    else:
        apart = mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))
        limit = 0.05
    r = pi / mu
    return not (apart > limit and ((a > 0 and r > 1) or (a < 0 and r < 1)))


def dppo(divergence: str) -> Reference:
    """With importance weights of at most 1.5, as the authors' code truncates them."""

    def gain(batch: Batch, now: Numbers, still: Numbers) -> float:
        total = 0.0
        for i in batch.counted():
            if dppo_mask(batch, still, i, divergence):
                weight = min(1.5, ratio(batch.acted, still, i))
                total += weight * batch.advantages[i] * now[i]
        return total

    return gain


def vaco(limit: float) -> Reference:
    """Honari et al. 2026: beyond the limit, no frame has a gradient that adds to the variation."""

    def gain(batch: Batch, now: Numbers, still: Numbers) -> float:
        counted = batch.counted()
        variation = sum(abs(ratio(batch.acted, still, i) - 1) for i in counted) / len(counted) / 2
        total = 0.0
        for i in counted:
            sign = math.copysign(1, ratio(batch.acted, still, i) - 1)
            if variation <= limit or batch.advantages[i] * sign < 0:
                total += ratio(batch.acted, now, i) * batch.advantages[i]
        return total

    return gain


# -- by episode


def gspo(batch: Batch, now: Numbers, still: Numbers) -> float:
    """Zheng et al. 2025, equations 5 and 7: clipped ratios of sequences, one term for each."""
    total = 0.0
    for episode in batch.episodes():
        assert all(batch.counts)
        s = likelihood_ratio(batch, now, episode) ** (1 / len(episode))
        a = batch.advantages[episode[0]]
        total += min(s * a, clip(s, 1 - 0.2, 1 + 0.28) * a)
    return total / len(LENGTHS) * len(RATIOS)


def gspo_token(batch: Batch, now: Numbers, still: Numbers) -> float:
    """Zheng et al. 2025, equations 13 and 14: the same with an advantage for each frame."""
    total = 0.0
    for episode in batch.episodes():
        s = likelihood_ratio(batch, still, episode) ** (1 / len(episode))
        for i in episode:
            if batch.counts[i]:
                of_frame, a = s * math.exp(now[i] - still[i]), batch.advantages[i]
                gain = min(of_frame * a, clip(of_frame, 1 - 0.2, 1 + 0.28) * a)
                total += gain / len(episode)
    return total / len(LENGTHS) * len(RATIOS)


def sequence_is(batch: Batch, now: Numbers, still: Numbers) -> float:
    """sg(min(W, C)) A log p of all actions of an episode (verl's documentation)."""
    total = 0.0
    for episode in batch.episodes():
        weight = min(2.0, likelihood_ratio(batch, still, episode))
        total += sum(weight * batch.advantages[i] * now[i] for i in episode if batch.counts[i])
    return total


def geometric(batch: Batch, now: Numbers, still: Numbers) -> float:
    """PPO without episodes whose geometric mean of ratios is outside (verl's documentation)."""
    total = 0.0
    for episode in batch.episodes():
        if 0.8 <= likelihood_ratio(batch, still, episode) ** (1 / len(episode)) <= 1.3:
            total += sum(ppo(batch, batch.acted, now, i) for i in episode if batch.counts[i])
    return total


def vespo(batch: Batch, now: Numbers, still: Numbers) -> float:
    """Shen et al. 2026: sg(W^k exp(l (1 - W))) A log p(episode), k and l by the sign of A."""
    total = 0.0
    for episode in batch.episodes():
        a, w = batch.advantages[episode[0]], likelihood_ratio(batch, still, episode)
        k, decay = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
        weight = w**k * math.exp(decay * (1 - w))
        total += sum(weight * a * now[i] for i in episode if batch.counts[i])
    return total


def baseline_of_least_variance(batch: Batch) -> tuple[float, float]:
    """Huang et al. 2026: b = sum w^2 |grad log p|^2 R / sum w^2 |grad log p|^2, and ESS / B."""
    above = below = 0.0
    weights = []
    for episode in batch.episodes():
        if any(batch.counts[i] for i in episode):
            w = likelihood_ratio(batch, batch.now, episode)
            gradient = [sum(GRADIENTS[i][place] for i in episode) for place in range(3)]
            norm = sum(x * x for x in gradient)
            above += w * w * norm * batch.advantages[episode[0]]
            below += w * w * norm
            weights.append(w)
    size = sum(weights) ** 2 / sum(w * w for w in weights)
    return above / below, size / len(weights)


def vcpo(batch: Batch, now: Numbers, still: Numbers) -> float:
    """Huang et al. 2026: sg(min(w, cap)) (R - b) log p(episode)."""
    baseline, _ = baseline_of_least_variance(batch)
    total = 0.0
    for episode in batch.episodes():
        weight = min(2.0, likelihood_ratio(batch, still, episode))
        total += sum(
            weight * (batch.advantages[i] - baseline) * now[i] for i in episode if batch.counts[i]
        )
    return total


# -- compared


def computed(chosen: Any, batch: Batch) -> tuple[float, list[float], dict[str, float]]:
    """What an objective maximises, times the number of frames; its gradient; what is measured."""
    config = options(clip=0.2, clip_high=0.28, objective=chosen)

    def column(values: Sequence[Any]) -> torch.Tensor:
        kind = torch.float64 if isinstance(values[0], float) else None
        return torch.tensor(values, dtype=kind)

    now = column(batch.now).requires_grad_()
    frames = Frames(
        now,
        column(batch.acted),
        column(batch.anchor),
        column(batch.advantages),
        column([number for number, n in enumerate(LENGTHS) for _ in range(n)]),
        column(AGES),
        torch.tensor(GRADIENTS, dtype=torch.float64),
        None if all(batch.counts) else column(batch.counts),
    )
    loss, measured = objective(config)(frames, config)
    (gradient,) = torch.autograd.grad(loss, now)
    count = len(RATIOS)
    values = {name: float(value.detach()) for name, value in measured.items()}
    return -float(loss.detach()) * count, (-gradient * count).tolist(), values


def difference_quotients(reference: Reference, batch: Batch) -> list[float]:
    step, slopes = 1e-6, []
    for i in range(len(RATIOS)):
        ends = []
        for sign in (1, -1):
            moved = list(batch.now)
            moved[i] += sign * step
            ends.append(reference(batch, moved, batch.now))
        slopes.append((ends[0] - ends[1]) / (2 * step))
    return slopes


CASES: list[tuple[Any, Reference, Sequence[float]]] = [
    ("behaviour", behaviour, OF_FRAMES),
    ("proximal", proximal, OF_FRAMES),
    ({"decoupled": {"weight_cap": 100}}, decoupled, OF_FRAMES),
    ("decoupled", truncated_weight, OF_FRAMES),
    (
        {"decoupled": {"weight_cap": 2, "weight_floor": 0.5, "above_cap": "mask"}},
        masked_weight,
        OF_FRAMES,
    ),
    ({"ewma": {"weight_cap": 100}}, decoupled, OF_FRAMES),
    ({"dual_clip": {"ratio_cap": 1.2}}, dual_clip, OF_FRAMES),
    ("a3po", a3po, OF_FRAMES),
    ({"sapo": {"temperature": 0.5, "negative_temperature": 2.0}}, sapo, OF_FRAMES),
    ({"vtrace": {"rho": 1.1}}, vtrace, OF_FRAMES),
    ({"cispo": {"low": 0.35, "high": 0.4}}, cispo, OF_FRAMES),
    ({"truncated_is": {"weight_cap": 1.5}}, truncated_is, OF_FRAMES),
    ("m2po", m2po, OF_FRAMES),
    ({"dppo": {"limit": 0.15, "weight_cap": 1.5}}, dppo("tv"), OF_FRAMES),
    ({"dppo": {"divergence": "kl", "limit": 0.05, "weight_cap": 1.5}}, dppo("kl"), OF_FRAMES),
    ("vaco", vaco(0.1), OF_FRAMES),
    ({"vaco": {"limit": 0.3}}, vaco(0.3), OF_FRAMES),
    ("gspo", gspo_token, OF_FRAMES),
    ("sequence_is", sequence_is, OF_FRAMES),
    ({"geometric": {"low": 0.8, "high": 1.3}}, geometric, OF_FRAMES),
    ("vespo", vespo, OF_EPISODES),
    ({"vcpo": {"weight_cap": 2}}, vcpo, OF_EPISODES),
]
ALL = (True,) * len(RATIOS)


@pytest.mark.parametrize("counts", [ALL, COUNTS], ids=["all count", "some count"])
@pytest.mark.parametrize(
    ("chosen", "reference", "advantages"), CASES, ids=[str(chosen) for chosen, *_ in CASES]
)
def test_an_objective_is_the_formula_of_its_source(chosen, reference, advantages, counts):
    batch = Batch(advantages, counts)
    value, gradient, _ = computed(chosen, batch)
    assert value == pytest.approx(reference(batch, batch.now, batch.now), rel=1e-9)
    expected = difference_quotients(reference, batch)
    assert gradient == pytest.approx(expected, rel=1e-6, abs=1e-8)
    assert any(abs(x) > 0.1 for x in expected)


def test_gspo_with_one_advantage_for_a_sequence_is_its_sequence_objective():
    batch = Batch(OF_EPISODES, ALL)
    value, gradient, _ = computed("gspo", batch)
    assert value == pytest.approx(gspo(batch, batch.now, batch.now), rel=1e-9)
    assert gradient == pytest.approx(difference_quotients(gspo, batch), rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_dppo_without_truncation_has_the_gradient_of_its_paper(divergence):
    def paper(batch: Batch, now: Numbers, still: Numbers) -> float:
        kept = (i for i in batch.counted() if dppo_mask(batch, still, i, divergence))
        return sum(ratio(batch.acted, now, i) * batch.advantages[i] for i in kept)

    limit = {"tv": 0.15, "kl": 0.05}[divergence]
    batch = Batch(OF_FRAMES, ALL)
    chosen = {"dppo": {"divergence": divergence, "limit": limit, "weight_cap": 1e9}}
    _, gradient, _ = computed(chosen, batch)
    assert gradient == pytest.approx(difference_quotients(paper, batch), rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("counts", [ALL, COUNTS], ids=["all count", "some count"])
def test_vcpo_scales_the_step_by_the_share_of_episodes_that_count(counts):
    batch = Batch(OF_EPISODES, counts)
    baseline, share = baseline_of_least_variance(batch)
    *_, measured = computed("vcpo", batch)
    assert measured["baseline"] == pytest.approx(baseline, rel=1e-9)
    assert measured["step_scale"] == pytest.approx(math.sqrt(share), rel=1e-9)
    assert 0.2 < share < 0.9


def test_the_numbers_lie_on_both_sides_of_every_bound():
    batch = Batch(OF_FRAMES, ALL)
    for low, high in ((0.8, 1.28), (0.65, 1.4)):
        assert min(RATIOS) < low < 1 < high < max(RATIOS)
    assert min(WEIGHTS) < 0.5 < 2 < 5 < max(WEIGHTS)
    to_anchor = [ratio(batch.anchor, batch.now, i) for i in range(len(RATIOS))]
    assert min(to_anchor) < 0.8 < 1 < 1.28 < max(to_anchor)
    for advantages in (OF_FRAMES, OF_EPISODES):
        signs = {(a > 0, r > 1) for a, r in zip(advantages, RATIOS, strict=True)}
        assert len(signs) == 4
    of_episodes = [likelihood_ratio(batch, batch.now, e) for e in batch.episodes()]
    assert min(of_episodes) < 0.5 < 2 < max(of_episodes)
    means = [w ** (1 / n) for w, n in zip(of_episodes, LENGTHS, strict=True)]
    assert min(means) < 0.8 < sorted(means)[2] < 1.28 < max(means)
    assert not any(all(COUNTS[i] for i in e) for e in list(batch.episodes())[2:3])
    assert not any(COUNTS[i] for i in list(batch.episodes())[4])

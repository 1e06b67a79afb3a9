"""Worked examples of PPO's objectives: every expected number is computed by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.algorithms.objectives import Frames, Objective, objective
from harness.options import PPOConfig
from harness.registry import objectives


def maximised(
    chosen: str | dict[str, Any],
    ratios: list[float],
    advantages: list[float],
    weights: list[float] | None = None,
) -> tuple[float, list[float], dict[str, float]]:
    """What is maximised, its gradient by log-probability, and what is measured.

    ratios: of the policy that is trained to the one that its objective is anchored to.
    weights: of the proximal policy to the one that acted; None: both are the same.
    """
    config = PPOConfig(clip=0.2, objective=chosen)
    proximal = torch.full((len(ratios),), -1.0)
    behaviour = proximal - torch.tensor(weights).log() if weights else proximal
    now = (proximal + torch.tensor(ratios).log()).requires_grad_()
    frames = Frames(now, behaviour, proximal, torch.tensor(advantages))
    loss, measured = objective(config)(frames, config)
    (gradient,) = torch.autograd.grad(loss, now)
    return (
        -float(loss.detach()),
        (-gradient).tolist(),
        {key: float(x) for key, x in measured.items()},
    )


def near(values: list[float]) -> Any:
    return pytest.approx(values, abs=1e-6)


# -- clipped


@pytest.mark.parametrize("name", ["behaviour", "proximal"])
def test_the_clipped_objective(name):
    ratios = [1.5, 1.5, 0.5, 0.5, 1.1]
    gain, gradient, measured = maximised(name, ratios, [1.0, -1.0, 1.0, -1.0, 2.0])
    # the worse of ratio times advantage, clipped or not: 1.2, -1.5, 0.5, -0.8, 2.2
    assert gain == pytest.approx((1.2 - 1.5 + 0.5 - 0.8 + 2.2) / 5)
    # where clipping is the worse, there is no gradient
    assert gradient == near([0, -1.5 / 5, 0.5 / 5, 0, 2.2 / 5])
    assert measured["clip_fraction"] == pytest.approx(0.8)
    kl = sum(r - 1 - math.log(r) for r in ratios) / 5
    assert measured["approx_kl"] == pytest.approx(kl)


def test_the_decoupled_objective_truncates_weights():
    chosen = {"decoupled": {"weight_cap": 5}}
    gain, gradient, measured = maximised(chosen, [1.5, 1, 1], [1.0, 1.0, -3.0], [1.2, 8.0, 0.5])
    # 1.5 is clipped to 1.2; 8 is capped to 5
    assert gain == pytest.approx((1.2 * 1.2 + 5 * 1 - 0.5 * 3) / 3)
    assert gradient == near([0, 5 / 3, -1.5 / 3])
    assert measured["clip_fraction"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("name", ["decoupled", "ewma"])
def test_the_decoupled_objective_masks_weights_above_the_cap(name):
    chosen = {name: {"weight_cap": 5, "above_cap": "mask"}}
    gain, gradient, _ = maximised(chosen, [1.1, 1, 1], [1.0, 1.0, -3.0], [5.0, 8.0, 0.5])
    assert gain == pytest.approx((5 * 1.1 + 0 - 0.5 * 3) / 3)
    assert gradient == near([5.5 / 3, 0, -1.5 / 3])


def test_dual_clip_bounds_the_loss_of_bad_actions():
    chosen = {"dual_clip": {"ratio_cap": 3}}
    gain, gradient, _ = maximised(chosen, [4.0, 2.0, 0.5, 4.0], [-1.0, -1.0, -1.0, 1.0])
    # a ratio of 4 counts as 3 where the advantage is negative, 2 as 2, 0.5 is clipped to 0.8;
    # with a positive advantage 4 is clipped to 1.2, as ever
    assert gain == pytest.approx((-3 - 2 - 0.8 + 1.2) / 4)
    assert gradient == near([0, -2 / 4, 0, 0])


# -- weighted


def test_the_policy_gradient_of_vtrace_has_a_cap_of_its_own():
    chosen = {"vtrace": {"rho": 1.5}}
    _, gradient, measured = maximised(chosen, [0.5, 1.0, 4.0], [1.0, -2.0, 3.0])
    # min(1.5, ratio) times advantage
    assert gradient == near([0.5 / 3, -2 / 3, 1.5 * 3 / 3])
    assert measured["clip_fraction"] == pytest.approx(1 / 3)


def test_cispo_clips_weights_and_keeps_gradients():
    chosen = {"cispo": {"low": 0.2, "high": 0.5}}
    gain, gradient, measured = maximised(chosen, [0.5, 1.0, 4.0, 4.0], [1.0, -2.0, 3.0, -1.0])
    assert gradient == near([0.8 / 4, -2 / 4, 1.5 * 3 / 4, -1.5 / 4])
    # weight times advantage times log-probability, which is -1 where the ratio is 1
    log_probs = [-1 + math.log(r) for r in (0.5, 1, 4, 4)]
    weighted = [0.8, -2, 4.5, -1.5]
    assert gain == pytest.approx(sum(w * p for w, p in zip(weighted, log_probs, strict=True)) / 4)
    assert measured["clip_fraction"] == pytest.approx(3 / 4)


def test_cispo_bounds_weights_above_alone_unless_told():
    _, gradient, _ = maximised("cispo", [0.01, 9.0], [1.0, 1.0])
    assert gradient == near([0.01 / 2, 5 / 2])


def test_truncated_importance_sampling_has_no_gradient_above_its_cap():
    chosen = {"truncated_is": {"weight_cap": 2}}
    gain, gradient, measured = maximised(chosen, [0.5, 1.9, 4.0, 4.0], [1.0, -2.0, 3.0, -1.0])
    assert gain == pytest.approx((0.5 - 1.9 * 2 + 2 * 3 - 2) / 4)
    assert gradient == near([0.5 / 4, -3.8 / 4, 0, 0])
    assert measured["clip_fraction"] == pytest.approx(2 / 4)


def test_the_second_moment_masks_the_fewest_frames_and_none_that_comes_nearer():
    ratios = [math.exp(x) for x in (0.1, -0.2, 0.3, 0.5, 0.9, -0.9)]
    advantages = [1.0, -1.0, 1.0, 1.0, -1.0, 1.0]
    chosen = {"m2po": {"limit": 0.05}}
    gain, gradient, measured = maximised(chosen, ratios, advantages)
    # The last two come nearer to one: they stay. The others' squares are 0.01, 0.04, 0.09 and
    # 0.25; the means of the smallest one, two, three and four are 0.01, 0.025, 0.0467 and 0.0975.
    kept = [ratios[0], -ratios[1], ratios[2], 0, -ratios[4], ratios[5]]
    assert gain == pytest.approx(sum(kept) / 6)
    assert gradient == near([x / 6 for x in kept])
    assert measured["clip_fraction"] == pytest.approx(1 / 6)


def test_a_second_moment_within_the_limit_masks_nothing():
    _, gradient, _ = maximised({"m2po": {"limit": 0.09}}, [1.3, 0.8], [1.0, -1.0])
    assert gradient == near([1.3 / 2, -0.8 / 2])


def test_a_ratio_beyond_all_numbers_is_masked_without_harm():
    gain, gradient, _ = maximised("m2po", [1e38, 1.0], [1e3, 1.0])
    assert (gain, gradient) == (pytest.approx(0.5), near([0, 0.5]))


# -- their options


def test_every_objective_makes_a_loss_of_frames():
    for part in objectives:
        gain, gradient, measured = maximised(part.name, [1.0, 1.0], [1.0, -1.0])
        assert math.isfinite(gain)
        assert gradient == near([0.5, -0.5])
        assert measured == {"approx_kl": 0, "clip_fraction": 0}


def test_every_objective_names_its_paper():
    for part in objectives:
        assert "(" in (part.load().__doc__ or "").partition("\n")[0]


@pytest.mark.parametrize(
    ("chosen", "complaint"),
    [
        ("decupled", r"algo\.objective=decupled: .*did you mean decoupled"),
        ({"proximal": {"cap": 1}}, "proximal takes no options"),
        ({"decoupled": {"weight_cap": 0.0}}, "algo.objective.decoupled.weight_cap=0.0: "),
        ({"decoupled": {"above_cap": "drop"}}, "algo.objective.decoupled.above_cap=drop: "),
        ({"dual_clip": {"ratio_cap": 1}}, "algo.objective.dual_clip.ratio_cap=1: .*more than 1"),
        ({"ewma": {"proximal_decay": 2}}, "algo.objective.ewma.proximal_decay=2: .*0 to 1"),
        ({"m2po": {"limt": 1}}, "algo.objective.m2po.limt=1: there is no such option"),
    ],
)
def test_an_objective_that_makes_no_sense_is_refused(chosen, complaint):
    with pytest.raises(ValueError, match=complaint):
        objective(PPOConfig(objective=chosen))


def test_weights_and_masks_carry_no_gradient():
    def loss(x: Tensor) -> Tensor:
        config = PPOConfig(objective="vtrace")
        frames = Frames(x, torch.zeros(2), torch.zeros(2), torch.tensor([1.0, 2.0]))
        return objective(config)(frames, config)[0]

    x = torch.tensor([-1.0, -2.0], requires_grad=True)
    (gradient,) = torch.autograd.grad(loss(x), x)
    torch.testing.assert_close(gradient, -x.detach().exp() * torch.tensor([1.0, 2.0]) / 2)


def test_what_an_objective_reports_has_one_prefix():
    def own(frames, config, options):
        metrics = {"train/approx_kl": torch.ones(()), "mine": torch.ones(())}
        return frames.log_prob, frames.log_prob, frames.log_prob > 0, metrics

    frames = Frames(*(torch.zeros(2) for _ in Frames._fields))
    _, measured = Objective(own)(frames, PPOConfig())
    assert set(measured) == {"approx_kl", "clip_fraction", "mine"}
    assert measured["approx_kl"] == 1  # in place of the one that is computed for every objective

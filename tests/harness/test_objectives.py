"""Worked examples of PPO's objectives: every expected number is computed by hand."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.algorithms.objectives import Frames, Gain, Objective, mean_of_trajectory, objective
from harness.algorithms.ppo import PPOConfig
from harness.command import main
from harness.config.plan import plan_run
from harness.registry import objectives
from tests.harness.actor_critics import options as config_of


def maximised(
    chosen: str | dict[str, Any],
    ratios: list[float],
    advantages: list[float],
    weights: list[float] | None = None,
    *,
    trajectory: list[int] | None = None,
    age: list[int] | None = None,
    scores: list[float] | None = None,
    now: float = math.exp(-1),
    **options: Any,
) -> tuple[float, list[float], dict[str, float]]:
    """What is maximised, its gradient by log-probability, and what is measured.

    ratios: of the policy that is trained to the one that its objective is anchored to.
    weights: of the proximal policy to the one that acted; None: both are the same.
    trajectory, age, scores (squared norms): of the frames; None: each its own trajectory, and 1.
    now: the probability by the proximal policy.
    """
    config = config_of(clip=0.2, objective=chosen, **options)
    n = len(ratios)
    origin = (
        torch.tensor(trajectory or list(range(n))),
        torch.tensor(age or [1] * n),
        torch.tensor(scores or [1.0] * n)[:, None].sqrt(),
    )
    proximal = torch.full((n,), now).log()
    behaviour = proximal - torch.tensor(weights).log() if weights else proximal
    trained = (proximal + torch.tensor(ratios).log()).requires_grad_()
    frames = Frames(trained, behaviour, proximal, torch.tensor(advantages), *origin)
    loss, measured = objective(config)(frames, config)
    (gradient,) = torch.autograd.grad(loss, trained)
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


# -- for old data


def test_ratios_may_rise_further_than_they_fall():
    gain, gradient, measured = maximised(
        "behaviour", [1.25, 1.3, 0.7], [1.0, 1.0, -1.0], clip_high=0.28
    )
    assert gain == pytest.approx((1.25 + 1.28 - 0.8) / 3)
    assert gradient == near([1.25 / 3, 0, 0])
    assert measured["clip_fraction"] == pytest.approx(2 / 3)


def test_the_decoupled_objective_masks_weights_on_both_sides():
    chosen = {"decoupled": {"weight_cap": 2, "weight_floor": 0.5, "above_cap": "mask"}}
    _, gradient, _ = maximised(chosen, [1, 1, 1], [1.0, 1.0, 1.0], [0.4, 1.0, 3.0])
    assert gradient == near([0, 1 / 3, 0])


@pytest.mark.parametrize(("divergence", "limit"), [("tv", 0.2), ("kl", 0.05)])
def test_a_divergence_masks_frames_that_move_away(divergence, limit):
    chosen = {"dppo": {"divergence": divergence, "limit": limit}}
    # from 0.5 to 0.8, 0.8, 0.2, 0.2 and 0.6, whose divergences are 0.3 and 0.1, or 0.22 and 0.02
    ratios = [1.6, 1.6, 0.4, 0.4, 1.2]
    _, gradient, measured = maximised(chosen, ratios, [1.0, -1.0, -1.0, 1.0, 2.0], now=0.5)
    assert gradient == near([0, -1.6 / 5, 0, 0.4 / 5, 2.4 / 5])
    assert measured["clip_fraction"] == pytest.approx(2 / 5)


def test_a_smooth_gate_in_place_of_a_clip():
    gain, gradient, _ = maximised("sapo", [2, 2, 0.5], [1.0, -3.0, 0.25])

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    # of t (r - 1), with t = 1.05 where the advantage is negative
    gates = [sigmoid(1.0), sigmoid(1.05), sigmoid(-0.5)]
    assert gain == pytest.approx((4 * gates[0] - 3 * 4 / 1.05 * gates[1] + 0.25 * 4 * gates[2]) / 3)
    # 4 sigmoid'(t (r - 1)) r A
    slopes = [4 * gate * (1 - gate) for gate in gates]
    assert gradient == near([slopes[0] * 2 / 3, slopes[1] * 2 * -3 / 3, slopes[2] * 0.5 * 0.25 / 3])


def test_the_baseline_of_least_variance_and_the_step_of_unequal_weights():
    _, gradient, measured = maximised("vcpo", [2, 1, 1], [1.0, 0.0, -1.0], scores=[1.0, 1.0, 2.0])
    baseline = (4 * 1 * 1 + 0 - 1 * 2 * 1) / (4 + 1 + 2)  # weights: ratio squared times score
    assert measured["baseline"] == pytest.approx(baseline)
    assert gradient == near([2 * (1 - baseline) / 3, -baseline / 3, (-1 - baseline) / 3])
    assert measured["step_scale"] == pytest.approx(math.sqrt((4 / 3) ** 2 / 2))


def test_a_baseline_is_the_same_however_small_the_gradients_are():
    _, _, measured = maximised("vcpo", [2, 1], [1.0, -0.5], scores=[1e-3, 2e-3])
    assert measured["baseline"] == pytest.approx((4 * 1 - 2 * 0.5) / (4 + 2))


@pytest.mark.parametrize(("limit", "first"), [(0.1, 0.0), (0.2, 1.5 / 3)])
def test_total_variation_beyond_a_limit_masks_what_raises_it(limit, first):
    gain, gradient, measured = maximised({"vaco": {"limit": limit}}, [1.5, 0.5, 1], [1.0] * 3)
    assert gain == pytest.approx(first + 1.5 / 3)
    assert measured["total_variation"] == pytest.approx(1 / 6)
    assert gradient == near([first, 0.5 / 3, 1 / 3])


def test_the_older_a_frame_the_nearer_is_its_proximal_policy():
    _, gradient, measured = maximised("a3po", [1.5] * 3, [1.0] * 3, age=[0, 2, 4])
    # 1.5, 1.22 and 1.11, of which the first two are clipped; ratio times weight is 1.5 again
    assert gradient == near([0, 0, 1.5 / 3])
    assert measured["clip_fraction"] == pytest.approx(2 / 3)


# -- by trajectory


def test_one_clipped_ratio_for_a_trajectory():
    gain, gradient, measured = maximised(
        "gspo", [2, 0.5, 1.1, 1.5], [1.0] * 4, trajectory=[0, 0, 1, 2]
    )
    # 1, 1.1 and 1.5, which is clipped to 1.2: three trajectories, each as much as the other
    assert gain == pytest.approx((1 + 1.1 + 1.2) / 3)
    assert gradient == near([0.5 / 3, 0.5 / 3, 1.1 / 3, 0])
    assert measured["clip_fraction"] == pytest.approx(1 / 4)


def test_the_ratio_of_a_trajectory_is_the_geometric_mean_of_its_frames():
    ratios = [1.3, 0.9, 1.2, 0.7, 0.8, 1.05]
    advantages = [2.0, -0.5, 3.0, 1.5, -2.0, 0.75]
    gain, gradient, measured = maximised(
        "gspo", ratios, advantages, trajectory=[0, 0, 0, 1, 1, 2], clip_high=0.1
    )
    # 1.404, 0.56 and 1.05 are the products; the first mean is clipped where the advantage is
    # positive, the second where it is negative, and each trajectory counts a third
    first, second = 1.404 ** (1 / 3), 0.56 ** (1 / 2)
    gains = [1.1 * 2, first * -0.5, 1.1 * 3, second * 1.5, 0.8 * -2, 1.05 * 0.75]
    assert gain == pytest.approx((sum(gains[:3]) / 3 + sum(gains[3:5]) / 2 + gains[5]) / 3)
    expected = [0, gains[1] / 9, 0, gains[3] / 6, 0, gains[5] / 3]
    assert gradient == near(expected)
    assert measured["clip_fraction"] == pytest.approx(5 / 6)


def test_the_mean_of_a_trajectory_is_over_its_own_frames():
    value = torch.tensor([0.25, -1.0, 1.5, 0.5, 4.0, 0.25])
    frames = Frames(value, value, value, value, torch.tensor([1, 0, 1, 1, 0, 2]))
    assert mean_of_trajectory(frames, value).tolist() == near([0.75, 1.5, 0.75, 0.75, 1.5, 0.25])


def test_trajectories_of_one_frame_are_clipped_as_frames_are():
    ratios, advantages = [1.5, 1.5, 0.5, 0.5, 1.1], [1.0, -1.0, 1.0, -1.0, 2.0]
    gain, gradient, measured = maximised("gspo", ratios, advantages)
    expected_gain, expected_gradient, expected = maximised("behaviour", ratios, advantages)
    assert gain == pytest.approx(expected_gain)
    assert gradient == near(expected_gradient)
    assert measured == pytest.approx(expected)


def test_one_truncated_weight_for_a_trajectory():
    _, gradient, measured = maximised(
        "sequence_is", [2, 1.5, 0.5], [1.0, -1.0, 2.0], trajectory=[0, 0, 1]
    )
    assert gradient == near([2 / 3, -2 / 3, 1 / 3])  # 3 is above the cap
    assert measured["clip_fraction"] == pytest.approx(2 / 3)


def test_trajectories_whose_mean_ratio_is_far_from_one_are_left_out():
    gain, gradient, measured = maximised(
        "geometric", [2, 0.5, 1.2], [1.0] * 3, trajectory=[0, 0, 1]
    )
    assert gain == pytest.approx((1.2 + 0.5) / 3)  # the means are 1 and 1.2
    assert gradient == near([0, 0.5 / 3, 0])
    assert measured["rejected"] == pytest.approx(1 / 3)


def test_the_mean_ratio_that_rejects_a_trajectory_is_that_of_one_frame():
    chosen = {"geometric": {"low": 0.9, "high": 1.15}}
    ratios, advantages = [1.3, 0.9, 1.2, 0.7, 0.95], [2.0, -0.5, 3.0, 1.5, -2.0]
    gain, gradient, measured = maximised(chosen, ratios, advantages, trajectory=[0, 0, 0, 1, 1])
    # the means are 1.404 ** (1/3) = 1.12, which stays, and 0.665 ** (1/2) = 0.82
    assert gain == pytest.approx((1.2 * 2 - 0.9 * 0.5 + 1.2 * 3) / 5)
    assert gradient[1] == pytest.approx(-0.9 * 0.5 / 5)
    assert gradient[3:] == [0, 0]
    assert measured["rejected"] == pytest.approx(2 / 5)


def test_a_smooth_weight_of_a_trajectory():
    _, gradient, _ = maximised("vespo", [2, 1, 1], [1.0, -1.0, 1.0], trajectory=[0, 0, 1])
    assert gradient == near([4 * math.exp(-3) / 3, -8 * math.exp(-2) / 3, 1 / 3])


# -- their options


def test_every_objective_makes_a_loss_of_frames():
    for part in objectives:
        gain, gradient, measured = maximised(part.name, [1.0, 1.0], [1.0, -1.0])
        assert math.isfinite(gain)
        assert gradient == near([0.5, -0.5])
        more = {
            "vcpo": {"baseline": 0, "step_scale": 1},
            "vaco": {"total_variation": 0},
            "geometric": {"rejected": 0},
        }
        expected = {"approx_kl": 0, "clip_fraction": 0, **more.get(part.name, {})}
        assert measured == pytest.approx(expected, abs=1e-6)


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
        ({"geometric": {"high": 0.5}}, "algo.objective.geometric.high=0.5: .*1 or more"),
        ({"m2po": {"limt": 1}}, "algo.objective.m2po.limt=1: there is no such option"),
    ],
)
def test_an_objective_that_makes_no_sense_is_refused(chosen, complaint):
    with pytest.raises(ValueError, match=complaint):
        objective(PPOConfig(objective=chosen))


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (
            ["algo.objective=vaco", "algo.vtrace=false"],
            "algo.vtrace=false algo.objective=vaco: .* expected algo.vtrace=true",
        ),
        (
            ["algo.objective={vtrace:{rho:2}}", "algo.vtrace=false"],
            "algo.vtrace=false algo.objective=vtrace: .* expected algo.vtrace=true",
        ),
        (
            ["algo=grpo", "algo.objective=vaco"],
            "algo.objective=vaco algo=grpo: .*a critic; use algo=ppo, or algo.objective=dppo",
        ),
        (
            ["algo=grpo", "algo.objective=vtrace", "algo.vtrace=true"],
            "algo.objective=vtrace algo=grpo: .*a critic; use algo=ppo, or algo.objective=cispo",
        ),
        *(
            (
                [f"algo.objective={name}"],
                f"algo.objective={name} algo=ppo: .*use algo=grpo, or algo.objective=sequence_is",
            )
            for name in ("vcpo", "vespo")
        ),
        (
            ["env=pendulum", "algo.objective=dppo"],
            "algo.objective=dppo bounds .*expected discrete actions, or algo.objective=m2po",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_the_method_of_its_name_is_refused(overrides, complaint, tmp_path, capsys):
    directory = tmp_path / "run"
    few = ["logger=jsonl", "total_frames=64", f"hydra.run.dir={directory}"]
    assert main([*few, *overrides]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(complaint, line)


@pytest.mark.parametrize("chosen", ["vaco", "vtrace", "{vaco:{limit:0.2}}", "{vtrace:{rho:2}}"])
def test_an_objective_that_needs_vtrace_has_it(chosen):
    assert plan_run([f"algo.objective={chosen}"]).options["algo"]["vtrace"] is True


def test_no_other_objective_changes_what_returns_are():
    for name in objectives.names():
        algo = "grpo" if name in ("vcpo", "vespo") else "ppo"
        if name not in ("vaco", "vtrace"):
            plan = plan_run([f"algo={algo}", f"algo.objective={name}"])
            assert plan.options["algo"]["vtrace"] is False
    assert plan_run(["algo.vtrace=true", "algo.objective=decoupled"]).options["algo"]["vtrace"]


def test_weights_and_masks_carry_no_gradient():
    def loss(x: Tensor) -> Tensor:
        config = PPOConfig(objective="vtrace", vtrace=True)
        frames = Frames(x, torch.zeros(2), torch.zeros(2), torch.tensor([1.0, 2.0]))
        return objective(config)(frames, config)[0]

    x = torch.tensor([-1.0, -2.0], requires_grad=True)
    (gradient,) = torch.autograd.grad(loss(x), x)
    torch.testing.assert_close(gradient, -x.detach().exp() * torch.tensor([1.0, 2.0]) / 2)


def test_what_an_objective_reports_has_one_prefix():
    def own(frames, config, options):
        metrics = {"train/approx_kl": torch.ones(()), "mine": torch.ones(())}
        return Gain(frames.log_prob, frames.log_prob, frames.log_prob > 0, metrics)

    frames = Frames(*(torch.zeros(2) for _ in Frames._fields))._replace(counts=None)
    _, measured = Objective(own)(frames, PPOConfig())
    assert set(measured) == {"approx_kl", "clip_fraction", "mine"}
    assert measured["approx_kl"] == 1  # in place of the one that is computed for every objective

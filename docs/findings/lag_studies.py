"""What became of the hypotheses of the studies in docs/findings/designs.md.

    .venv/bin/python docs/findings/lag_studies.py ages outputs/ages [--figure ages.png]

newest    return of the newest weights with the most probable actions, mean over training
sampled   the same with sampled actions
last      the last policy, with the most probable actions
acting    return of the weights that act in training, old and sampling, mean over training
entropy   of the newest weights' policy, mean over training
kl        estimated divergence of the learner from the weights that acted, before each update
age       the largest in gradient steps, as measured: at the last gradient step on a frame
collapsed the last policy is nearer to the start of training than to the best evaluation of its run

For `horizon` it prints how the step at which runs collapse for good depends on rate and lag.

A claim compares two settings in `newest`, by seed. Equivalence: two one-sided paired t-tests that
the difference lies within the margin. Beyond the margin: a one-sided test, doubled, that it does
not. Both p-values are corrected by Holm's method for all claims of their family, whether or not the
runs of all are complete. A claim has a verdict if all seeds of the design are done. Brackets hold
Student's 95 % interval, which is not corrected.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy.optimize import minimize
from scipy.stats import norm
from scipy.stats import t as student_t

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from harness.report.drawing import Key, draw, line_look, panels  # noqa: E402
from harness.report.runs import read_runs  # noqa: E402
from harness.report.scores import (  # noqa: E402
    EVALUATED,
    LEAST_GAIN,
    LOST,
    SAMPLED,
    TRAINED,
    mean_return,
)
from harness.report.statistics import (  # noqa: E402
    Estimate,
    equivalence_test,
    paired_test,
    student,
)

LEVEL, MARGIN = 0.05, 0.03
ENTROPY, STEPS, KL, AGE = (
    "eval/entropy",
    "train/gradient_steps",
    "policy/kl",
    "policy/lag_steps_max",
)
SCORES = ("newest", "sampled", "last", "acting", "entropy", "kl")
Options = Mapping[str, Any]


@dataclass(frozen=True)
class Claim:
    """A hypothesis about two settings, by their names."""

    family: str
    number: str
    left: str
    kind: str  # a key of WORDS
    right: str

    def __str__(self) -> str:
        return f"{self.number}. {self.left} {WORDS[self.kind]} {self.right}"


WORDS = {
    "same": "is equivalent to",
    "higher": "is higher than",
    "lower": "is lower than",
    "at least": "is at most the margin lower than",
}


class Study(NamedTuple):
    """The settings of a study by name, and what is claimed of them."""

    settings: Mapping[str, Options]
    claims: Sequence[Claim]
    seeds: range
    figure: Callable[[pd.DataFrame], Figure] | None = None
    law: Callable[[pd.DataFrame], Iterator[str]] | None = None  # what else is estimated


# -- is age age?

STEP_FRAMES = 256  # of a gradient step of experiment=ages
SAME_LARGEST = ((0, 64), (3, 16), (15, 4), (63, 1))  # lag in batches, gradient steps on a batch
SAME_MEAN = (31, 1)  # ages of 31 steps; those of (0, 64) are 0 to 63
FRESH = "behaviour (0, 1)"
OBJECTIVES = ("behaviour", "decoupled", "gspo", "m2po", "vespo")


def ages(step_frames: int) -> Study:
    def options(objective: str, lag: int, steps: int) -> Options:
        return {
            "algo.objective": objective,
            "sync.lag": lag,
            "collector.frames_per_batch": steps * step_frames,
        }

    settings = {FRESH: options("behaviour", 0, 1)}
    claims = []
    for name in OBJECTIVES:
        for lag, steps in (*SAME_LARGEST, SAME_MEAN):
            # Without lag, decoupled is behaviour, to the bit.
            run = "behaviour" if (name, lag) == ("decoupled", 0) else name
            settings[f"{name} ({lag}, {steps})"] = options(run, lag, steps)
        reuse, lagged, mean = (f"{name} {cell}" for cell in ((0, 64), (63, 1), SAME_MEAN))
        claims += [
            Claim("primary", "1", reuse, "same", lagged),
            Claim("primary", "2", reuse, "same", mean),
            Claim("secondary", "3", reuse, "at least", FRESH),
            Claim("secondary", "4", lagged, "lower", FRESH),
        ]
    return Study(settings, claims, range(1, 21), ages_figure)


def ages_figure(values: pd.DataFrame) -> Figure:
    """Scores of the four settings with the same largest age, and of that with the same mean."""
    cells = (*SAME_LARGEST, SAME_MEAN)
    looks = {name: line_look(place) for place, name in enumerate(OBJECTIVES)}
    key: Key = list(looks.items())
    shown = {"newest": "newest weights, greedy", "sampled": "newest, sampled", "entropy": "entropy"}
    drawn, axes = panels(
        list(shown.values()), 2.4, "lag in batches, steps a batch", "mean", key, share=False
    )
    for axis, score in zip(axes, shown, strict=True):
        for shift, name in enumerate(OBJECTIVES):
            estimates = [student(of(values, f"{name} {cell}", score)) for cell in cells]
            at = np.arange(len(cells)) + 0.1 * (shift - 2)
            bars = [[e.value - e.low, e.high - e.value] for e in estimates]
            style: Any = looks[name] | {"linestyle": "", "markersize": 4}
            axis.errorbar(at, [e.value for e in estimates], yerr=np.array(bars).T, **style)
        fresh = of(values, FRESH, score)
        if len(fresh):
            axis.axhline(float(fresh.mean()), color="0.5", linewidth=1, linestyle="--")
        axis.set_xticks(range(len(cells)), [f"{lag}, {steps}" for lag, steps in cells])
    return drawn


# -- widen or contract the trust region with lag?

SHORT_STEPS = 10  # gradient steps of an update of experiment=grpo_tokens_short
FRESH_REGION = "behaviour, lag 0"
MORE_ENTROPY = "behaviour, lag 0, more entropy"


def trust_region() -> Study:
    def options(anchor: str, lag: int, clip: float, entropy_weight: float = 0) -> Options:
        return {
            "algo.objective": anchor,
            "sync.lag": lag,
            "algo.clip": clip,
            "algo.entropy_weight": entropy_weight,
        }

    settings = {
        FRESH_REGION: options("behaviour", 0, 0.2),
        MORE_ENTROPY: options("behaviour", 0, 0.2, ENTROPY_WEIGHT),
    }
    claims = []
    for anchor in ("behaviour", "decoupled"):
        for lag in (4, 16, 64):
            names = [f"{anchor}, lag {SHORT_STEPS * lag}, {size}" for size in SIZES]
            widths = [round(0.2 * (1 + lag) ** power, 4) for power in (-0.5, 0, 0.5)]
            settings |= {
                name: options(anchor, lag, width) for name, width in zip(names, widths, strict=True)
            }
            narrow, same, wide = names
            claims += [
                Claim("primary", "1", wide, "higher", same),
                Claim("primary", "2", narrow, "higher", same),
            ]
            if anchor == "behaviour":
                claims.append(Claim("secondary", "3", wide, "at least", f"decoupled{same[9:]}"))
    claims.append(Claim("secondary", "4", "behaviour, lag 160, same", "same", MORE_ENTROPY))
    return Study(settings, claims, range(1, 21))


SIZES = ("narrow", "same", "wide")  # 0.2 over the root of 1 + lag in updates, 0.2, and 0.2 times it
ENTROPY_WEIGHT = 0.2  # of the control whose entropy is near to that of a lag of 160 steps


# -- age or numerics?

CORRECTIONS: dict[str, Options] = {
    "proximal": {"algo.objective": "proximal"},
    "decoupled": {"algo.objective": "decoupled"},
    "truncated_is": {"algo.objective": "truncated_is"},
    "icepop": {"algo.objective.decoupled.above_cap": "mask"},
}
WIRES = ("float32", "bfloat16", "int8")


def numerics() -> Study:
    def name(objective: str, lag: int, wire: str) -> str:
        return f"{objective}, lag {SHORT_STEPS * lag}, {wire}"

    settings = {
        name(objective, lag, wire): {**options, "sync.lag": lag, "sync.wire": wire}
        for objective, options in CORRECTIONS.items()
        for lag in (0, 4, 16)
        for wire in WIRES
    }
    claims = []
    for objective in CORRECTIONS:
        exact, short, byte = (name(objective, 0, wire) for wire in WIRES)
        claims += [
            Claim("primary", "1", short, "same", exact),
            Claim("primary", "2", byte, "same", exact),
        ]
        for lag in (4, 16):
            byte, exact = (name(objective, lag, wire) for wire in ("int8", "float32"))
            claims.append(Claim("primary", "3", byte, "same", exact))
    for objective in ("decoupled", "truncated_is", "icepop"):
        for lag in (4, 16):
            corrected, plain = (name(n, lag, "float32") for n in (objective, "proximal"))
            claims.append(Claim("secondary", "4", corrected, "higher", plain))
        corrected, plain = (name(n, 0, "int8") for n in (objective, "proximal"))
        claims.append(Claim("secondary", "5", corrected, "higher", plain))
    return Study(settings, claims, range(1, 11))


# -- rate times lag, or rate times horizon?

RATES, HORIZON_LAGS = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3), (0, 4, 16, 64)
UNBOUND = ("truncated_is", "decoupled")


def horizon() -> Study:
    settings = {
        f"{objective}, rate {rate:g}, lag {SHORT_STEPS * lag}": {
            "algo.objective": objective,
            "algo.learning_rate": rate,
            "sync.lag": lag,
        }
        for objective in (*UNBOUND, "behaviour")
        for rate in RATES
        for lag in HORIZON_LAGS
    }
    return Study(settings, [], range(1, 11), law=law)


def law(values: pd.DataFrame) -> Iterator[str]:
    """Of each objective: log T = a - b log(rate) - c log(lag) + noise, over runs with lag.

    T is when a run collapses for good, in gradient steps; for others it is known to be later than
    their last step. The noise is normal.
    """
    yield "| objective | runs | collapsed for good | b, of the rate | c, of the lag | b - c | |"
    yield "|---|--:|--:|--:|--:|--:|---|"
    for objective in (*UNBOUND, "behaviour"):
        names = values.index.get_level_values("setting")
        runs = values[names.str.startswith(f"{objective},")].reset_index()
        parts = runs["setting"].str.extract(r"rate (?P<rate>\S+), lag (?P<lag>\d+)").astype(float)
        runs = runs.assign(**parts)
        runs = runs[runs["lag"] > 0]
        collapsed = int(runs["collapse_step"].notna().sum())
        cells = ["", "", "", "too few"]
        if collapsed >= FEWEST_COLLAPSES:
            estimates = estimated_exponents(runs)
            cells = [*map(text, estimates), regime(*estimates)]
        yield f"| {objective} | {len(runs)} | {collapsed} | {' | '.join(cells)} |"


def regime(b: Estimate, c: Estimate, difference: Estimate) -> str:
    """What decides when a run collapses, by the intervals."""

    def within(estimate: Estimate, value: float) -> bool:
        return value - WIDTH < estimate.low and estimate.high < value + WIDTH

    if within(b, 1) and within(c, 0):
        return "rate times horizon"
    if within(difference, 0) and c.low > WIDTH:
        return "rate times lag"
    return "neither is shown"


def estimated_exponents(runs: pd.DataFrame) -> list[Estimate]:
    """b, c and b - c, with the bootstrap's 95 % interval over seeds."""
    by_seed = dict(iter(runs.groupby("seed")))
    random, drawn = np.random.default_rng(0), []
    for _ in range(RESAMPLES):
        seeds = random.choice(list(by_seed), len(by_seed))
        b, c = exponents(pd.concat([by_seed[seed] for seed in seeds]))
        drawn.append((b, c, b - c))
    b, c = exponents(runs)
    lows, highs = np.percentile(drawn, [2.5, 97.5], axis=0)
    return [
        Estimate(value, float(low), float(high), len(by_seed))
        for value, low, high in zip((b, c, b - c), lows, highs, strict=True)
    ]


def exponents(runs: pd.DataFrame) -> tuple[float, float]:
    """b and c by maximum likelihood, where runs that did not collapse are censored."""
    ended = runs["collapse_step"].notna().to_numpy()
    times = np.log(runs["collapse_step"].fillna(runs["steps"]).to_numpy())
    logs = np.log(runs[["rate", "lag"]].to_numpy())
    terms = np.column_stack([np.ones(len(runs)), -(logs - logs.mean(0))])

    def loss(parameters: np.ndarray) -> float:
        scale = math.exp(parameters[-1])
        z = (times - terms @ parameters[:-1]) / scale
        return -float(np.where(ended, norm.logpdf(z) - parameters[-1], norm.logsf(z)).sum())

    fitted = minimize(loss, np.array([times.mean(), 0.5, 0.5, 0.0]), method="BFGS")
    return float(fitted.x[1]), float(fitted.x[2])


FEWEST_COLLAPSES, RESAMPLES = 20, 200
WIDTH = 0.25  # of exponents that count as the same
RANDOM, LEARNED = 0.1, 0.3  # the score of random digits, and from which on a run has learned


STUDIES = {
    "ages": ages(STEP_FRAMES),
    "ages_long": ages(4 * STEP_FRAMES),
    "trust_region": trust_region(),
    "numerics": numerics(),
    "horizon": horizon(),
}


# -- what the runs say


def read_values(sweep: Path, settings: Mapping[str, Options]) -> pd.DataFrame:
    """The scores of each finished run, by setting and seed; a run may have several settings."""
    columns = (EVALUATED, SAMPLED, ENTROPY, TRAINED, STEPS, KL, AGE)
    runs, records = read_runs([sweep], columns)
    done = runs[runs["state"] == "done"]
    of_run = dict(iter(records.groupby("run")))
    rows = []
    for run, options in done["options"].items():
        scores = scores_of(of_run[run], float(done.loc[run, "summary.gradient_steps"]))
        seed = seed_of(options, done.loc[run, "manifest"])
        for name, setting in settings.items():
            if all(equal(value, options.get(key)) for key, value in setting.items()):
                rows.append({"setting": name, "seed": seed, **scores})
    if not rows:
        raise ValueError(f"{sweep}: no finished run has a setting of this study")
    values = pd.DataFrame(rows).set_index(["setting", "seed"]).sort_index()
    return values.assign(collapsed=collapsed(values))


def seed_of(options: Options, manifest: Mapping[str, Any]) -> int:
    """The seed of a run, or that of the parent of a branch."""
    if branch := manifest.get("branch"):
        (seed,) = re.findall(r"seed=(\d+)", Path(branch["parent"]).name)
        return int(seed)
    return int(options["seed"])


def scores_of(records: pd.DataFrame, total_steps: float) -> dict[str, float]:
    evaluated = records.dropna(subset=[EVALUATED])
    returns = evaluated[EVALUATED].to_numpy()
    steps = float(records[STEPS].max())
    return {
        "newest": float(returns.mean()),
        "sampled": float(evaluated[SAMPLED].mean()),
        "last": float(returns[-1]),
        "acting": mean_return(records[["step", TRAINED]].dropna(), metric=TRAINED),
        "entropy": float(evaluated[ENTROPY].mean()),
        "kl": float(records[KL].mean()),
        "age": float(records[AGE].max()) + steps - 1,
        "first": float(returns[0]),
        "best": float(returns.max()),
        "steps": total_steps,
        "collapse_step": total_steps * collapse_share(returns),
    }


def collapse_share(returns: np.ndarray) -> float:
    """The share of a run after which it has collapsed for good; NaN if it has not.

    From this evaluation on, all are nearer to a random answer's score than to the best so far.
    """
    best = np.maximum.accumulate(returns)
    lost = (best >= LEARNED) & (best - returns > LOST * (best - RANDOM))
    if not lost[-1]:
        return math.nan
    first = len(lost) - int(np.argmin(lost[::-1])) if not lost.all() else 0
    return (first + 1) / len(returns)


def collapsed(values: pd.DataFrame) -> pd.Series:
    """The rule of reports: a run that gained too little has not collapsed."""
    gains = values["best"] - values["first"].median()
    learned = gains >= LEAST_GAIN * gains.max()
    return learned & (gains > 0) & (values["best"] - values["last"] > LOST * gains)


def equal(wanted: Any, value: Any) -> bool:
    """Whether a run's option, which may be a number as text, has this value."""
    if isinstance(wanted, (int, float)):
        try:
            return math.isclose(float(value), wanted)
        except (TypeError, ValueError):
            return False
    return bool(value == wanted)


def of(values: pd.DataFrame, setting: str, score: str) -> pd.Series:
    """A score of a setting by seed; empty if no run is done."""
    if setting not in values.index.get_level_values("setting"):
        return pd.Series(dtype=float)
    return values.loc[setting][score]


class Decision(NamedTuple):
    """What the runs say of a claim."""

    claim: Claim
    difference: Estimate
    p: float  # of the claim, corrected
    beyond: float  # that the difference is larger than the margin, or has the other sign; corrected
    verdict: str


def decide(values: pd.DataFrame, study: Study) -> list[Decision]:
    """Each claim of the study with its difference, its corrected p-values and its verdict."""
    decisions = []
    for family in dict.fromkeys(claim.family for claim in study.claims):
        claims = [claim for claim in study.claims if claim.family == family]
        pairs = [pairs_of(values, claim, study.seeds) for claim in claims]
        tests = [test(claim.kind, *pair) for claim, pair in zip(claims, pairs, strict=True)]
        supported = corrected([p for p, _ in tests])
        against = corrected([p for _, p in tests])
        for claim, pair, p, beyond in zip(claims, pairs, supported, against, strict=True):
            complete = len(pair[0]) == len(study.seeds)
            shown = verdict(p, beyond) if complete else f"{len(pair[0])} of {len(study.seeds)}"
            decisions.append(Decision(claim, paired_test(*pair)[0], p, beyond, shown))
    return decisions


def pairs_of(
    values: pd.DataFrame, claim: Claim, seeds: range, score: str = "newest"
) -> tuple[np.ndarray, np.ndarray]:
    """The scores of both sides, of the seeds of the design that both have."""
    sides = [of(values, name, score) for name in (claim.left, claim.right)]
    both = pd.concat(sides, axis=1, join="inner").dropna()
    both = both[both.index.isin(seeds)]
    return both.iloc[:, 0].to_numpy(), both.iloc[:, 1].to_numpy()


def test(kind: str, left: np.ndarray, right: np.ndarray) -> tuple[float, float]:
    """The p-value of the claim, and that of what would contradict it."""
    if len(left) < 2:
        return math.nan, math.nan
    if kind == "same":
        beyond = min(exceeds(left - right, MARGIN), exceeds(right - left, MARGIN))
        return equivalence_test(left, right, MARGIN), min(1.0, 2 * beyond)
    if kind == "at least":
        return exceeds(left - right, -MARGIN), exceeds(right - left, MARGIN)
    if kind == "lower":
        left, right = right, left
    return exceeds(left - right, 0.0), exceeds(right - left, 0.0)


def exceeds(differences: np.ndarray, bound: float) -> float:
    """The p of a one-sided t-test that the mean difference is above the bound."""
    error = float(differences.std(ddof=1)) / len(differences) ** 0.5
    if error == 0:
        return 0.0 if differences.mean() > bound else 1.0
    value = (float(differences.mean()) - bound) / error
    return float(student_t.sf(value, len(differences) - 1))


def corrected(p_values: Sequence[float]) -> list[float]:
    """Holm's correction, in which a claim without runs counts as one with p = 1."""
    order = np.argsort([1.0 if math.isnan(p) else p for p in p_values], kind="stable")
    adjusted, largest = [math.nan] * len(p_values), 0.0
    for place, i in enumerate(order):
        if not math.isnan(p_values[i]):
            largest = max(largest, min(1.0, p_values[i] * (len(p_values) - place)))
            adjusted[i] = largest
    return adjusted


def verdict(p: float, beyond: float) -> str:
    if p < LEVEL:
        return "shown"
    return "contradicted" if beyond < LEVEL else "not shown"


# -- what is printed


def lines(study: Study, values: pd.DataFrame) -> Iterator[str]:
    inside = values[values.index.get_level_values("seed").isin(study.seeds)]
    runs = inside.groupby(["seed", *SCORES]).ngroups
    yield f"{runs} runs are done; margin {MARGIN:g}"
    yield ""
    yield f"| setting | seeds | age | {' | '.join(SCORES)} | collapsed |"
    yield f"|---|--:|--:|{'--:|' * len(SCORES)}--:|"
    for name in study.settings:
        if len(of(inside, name, "newest")):
            rows = inside.loc[name]
            cells = " | ".join(text(student(rows[score].to_numpy())) for score in SCORES)
            age = f"{rows['age'].max():.0f}"
            yield f"| {name} | {len(rows)} | {age} | {cells} | {rows['collapsed'].mean():.0%} |"
    for family in dict.fromkeys(claim.family for claim in study.claims):
        yield ""
        yield f"| {family} claim | newest | p | p of the contrary | verdict | sampled | last |"
        yield "|---|--:|--:|--:|---|--:|--:|"
        for claim, difference, p, beyond, shown in decide(inside, study):
            if claim.family == family:
                others = (
                    paired_test(*pairs_of(inside, claim, study.seeds, score))[0]
                    for score in ("sampled", "last")
                )
                cells = " | ".join(text(one) for one in others)
                row = f"{text(difference)} | {p:.2g} | {beyond:.2g} | {shown}"
                yield f"| {claim} | {row} | {cells} |"
    if study.law is not None:
        yield ""
        yield from study.law(inside)


def text(estimate: Estimate) -> str:
    value, low, high, _ = estimate
    return f"{value:.3f} [{low:.3f}, {high:.3f}]"


def seed_range(text: str) -> range:
    """`1-20` has both ends."""
    first, last = map(int, text.split("-"))
    return range(first, last + 1)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("sweep", type=Path, help="the directory of its sweep")
    parser.add_argument(
        "--seeds", type=seed_range, help="other seeds than the design's, as 101-102: for pilots"
    )
    parser.add_argument("--figure", type=Path, help="where to write it, as .png")
    arguments = parser.parse_args(argv)
    study = STUDIES[arguments.study]
    if arguments.seeds:
        study = study._replace(seeds=arguments.seeds)
    try:
        values = read_values(arguments.sweep, study.settings)
        print("\n".join(lines(study, values)))
    except ValueError as error:
        parser.error(str(error))
    if arguments.figure and study.figure is not None:
        figure = study.figure
        picture = draw(lambda: figure(values), arguments.study, "")
        assert picture is not None
        arguments.figure.write_bytes(picture.png)


if __name__ == "__main__":
    main()

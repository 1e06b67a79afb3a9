"""Whether what is lost follows learning rate times lag: docs/findings/dose_and_response.md.

    .venv/bin/python docs/findings/rate_lag.py outputs/rate_lag [outputs/rate_lag_tokens …]

A directory holds the sweep of one task. Printed are the retained shares, and for each hypothesis
the numbers that decide it.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import isotonic_regression
from scipy.stats import rankdata

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from harness.report.runs import read_runs  # noqa: E402
from harness.report.scores import TRAINED, mean_return  # noqa: E402
from harness.report.statistics import equivalence_test, holm  # noqa: E402

LEARNS = 1 / 3  # of the way from the floor to the best rate, at lag 0: else a rate is left out
MARGIN = 0.1  # of shares that count as the same
RESAMPLES = 2_000


def read_scores(sweep: Path) -> tuple[pd.DataFrame, float]:
    """`rate`, `lag`, `seed` and `score` of each finished run; and the floor."""
    runs, records = read_runs([sweep], (TRAINED,))
    runs = runs[runs["state"] == "done"]
    records = records[records["run"].isin(runs.index)].dropna(subset=[TRAINED])
    floor = float(records.groupby("run")[TRAINED].first().mean())
    scores = {run: mean_return(inside) for run, inside in records.groupby("run")}
    table = pd.DataFrame(
        {
            "rate": [float(options["algo.learning_rate"]) for options in runs["options"]],
            "lag": [int(options["sync.lag"]) for options in runs["options"]],
            "seed": [int(seed) for seed in runs["seed"]],
            "score": [scores[run] for run in runs.index],
        }
    )
    return table, floor


def learning_rates(scores: pd.DataFrame, floor: float) -> tuple[list[float], list[float]]:
    """The rates that learn without lag, and those that hardly do."""
    fresh = scores[scores["lag"] == 0].groupby("rate")["score"].mean() - floor
    learns = fresh >= LEARNS * fresh.max()
    return fresh.index[learns].tolist(), fresh.index[~learns].tolist()


def retained(scores: pd.DataFrame, floor: float) -> pd.DataFrame:
    """`share`: what each run keeps of the score of its rate at lag 0, of the mean over seeds.

    `gain` is what the run has above the floor, `fresh` what its rate has at lag 0 with its seed.
    """
    gain = scores["score"] - floor
    at_once = scores["lag"] == 0
    keys = ["rate", "seed"]
    fresh = scores[at_once].set_index(keys)["score"].rename("fresh") - floor
    scores = scores.assign(gain=gain, product=scores["rate"] * scores["lag"]).join(fresh, on=keys)
    return scores.assign(share=gain / scores["rate"].map(fresh.groupby("rate").mean()))


def explained(shares: pd.DataFrame, by_rate: bool) -> float:
    """R² of falling curves over seeds that they were not fitted to.

    by_rate: a curve over the lag for each rate; else one curve over rate × lag for all.
    """
    errors, spread = 0.0, 0.0
    for seed in sorted(shares["seed"].unique()):
        rest, here = shares[shares["seed"] != seed], shares[shares["seed"] == seed]
        errors += float(((here["share"] - predict(rest, here, by_rate)) ** 2).sum())
        spread += float(((here["share"] - rest["share"].mean()) ** 2).sum())
    return 1 - errors / spread


def predict(rest: pd.DataFrame, here: pd.DataFrame, by_rate: bool) -> np.ndarray:
    """The shares that curves fitted to `rest` give the settings of `here`."""
    if by_rate:
        parts = [
            pd.Series(
                falling(rest[rest["rate"] == rate], inside, "lag"),
                index=inside.index,
            )
            for rate, inside in here.groupby("rate")
        ]
        return pd.concat(parts).reindex(here.index).to_numpy()
    return falling(rest, here, "product")


def falling(rest: pd.DataFrame, here: pd.DataFrame, over: str) -> np.ndarray:
    """Isotonic regression of the share, which falls with `over`."""
    means = rest.groupby(over)["share"].agg(["mean", "size"])
    fitted = isotonic_regression(means["mean"], weights=means["size"], increasing=False)
    return np.interp(here[over], means.index, fitted.x)


def correlations(shares: pd.DataFrame) -> tuple[float, float, tuple[float, float]]:
    """Rank correlation of the settings' shares with the product and with the lag, negated.

    And the bootstrap interval of their difference, over seeds.
    """
    lagged = shares[shares["lag"] > 0]
    gains, fresh = (
        lagged.pivot_table(index=["rate", "lag"], columns="seed", values=name).dropna(axis=1)
        for name in ("gain", "fresh")
    )
    places = gains.index.to_frame()
    ranks = [rankdata(places["rate"] * places["lag"]), rankdata(places["lag"])]

    def both(seeds: np.ndarray) -> tuple[float, float]:
        # The score at lag 0 is an estimate too, so it is drawn with the others.
        means = (table.to_numpy()[:, seeds].mean(axis=1) for table in (gains, fresh))
        order = rankdata(np.divide(*means))
        product, lag = (-float(np.corrcoef(ranked, order)[0, 1]) for ranked in ranks)
        return product, lag

    count = gains.shape[1]
    product, lag = both(np.arange(count))
    random = np.random.default_rng(0)
    drawn = [both(random.integers(count, size=count)) for _ in range(RESAMPLES)]
    low, high = np.percentile([one - other for one, other in drawn], [2.5, 97.5])
    return product, lag, (float(low), float(high))


def same_products(shares: pd.DataFrame) -> list[tuple[float, float, float, float]]:
    """Of neighbouring rates with the same product: it, both rates, corrected p of equivalence."""
    rates = sorted(shares["rate"].unique())
    pairs = []
    for slow, fast in itertools.pairwise(rates):
        for lag in sorted(shares["lag"].unique()):
            left = _of(shares, slow, 2 * lag)
            right = _of(shares, fast, lag)
            if lag > 0 and len(left) and len(left) == len(right):
                pairs.append((fast * lag, slow, fast, equivalence_test(left, right, MARGIN)))
    corrected = holm([p for *_, p in pairs])
    return [(*pair[:3], p) for pair, p in zip(pairs, corrected, strict=True)]


def _of(shares: pd.DataFrame, rate: float, lag: int) -> np.ndarray:
    """The share of a setting seed by seed, as a ratio of two means with errors in both.

    That is the ratio, and for each seed how much it moves the ratio (the delta method).
    """
    chosen = shares[np.isclose(shares["rate"], rate) & (shares["lag"] == lag)].sort_values("seed")
    gain, fresh = chosen["gain"].to_numpy(), chosen["fresh"].to_numpy()
    if not len(gain):
        return gain
    ratio = gain.mean() / fresh.mean()
    moves: np.ndarray = (gain - ratio * fresh) / fresh.mean()
    return ratio + moves


def lines(scores: pd.DataFrame, floor: float) -> Iterator[str]:
    rates, slow = learning_rates(scores, floor)
    yield f"floor {floor:.3g}; rates that hardly learn and are left out: {slow or 'none'}"
    runs = scores.groupby("seed").size()
    if lacking := runs.index[runs < runs.max()].tolist():
        yield f"seeds that lack settings, and are left out of 2: {lacking}"
    shares = retained(scores[scores["rate"].isin(rates)], floor)
    table = shares.pivot_table(index="rate", columns="lag", values="share")
    yield f"| rate | {' | '.join(f'lag {lag}' for lag in table.columns)} |"
    yield f"|--:|{'--:|' * len(table.columns)}"
    for rate, row in table.iterrows():
        yield f"| {rate:g} | {' | '.join(f'{share:.2f}' for share in row)} |"
    one, each = explained(shares, by_rate=False), explained(shares, by_rate=True)
    yield f"1. R² of one curve over rate × lag {one:.2f}, of a curve for each rate {each:.2f}"
    product, lag, (low, high) = correlations(shares)
    yield (
        f"2. rank correlation with rate × lag {product:.2f}, with lag {lag:.2f}, "
        f"difference {product - lag:.2f} [{low:.2f}, {high:.2f}]"
    )
    pairs = same_products(shares)
    same = sum(p < 0.05 for *_, p in pairs)
    yield f"3. equivalent within {MARGIN}: {same} of {len(pairs)} pairs of one product"
    best = scores.groupby(["lag", "rate"])["score"].mean().unstack().idxmax(axis=1)
    named = ", ".join(f"{rate:g} at lag {lag}" for lag, rate in best.items())
    yield f"4. the best rate: {named}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "sweeps", nargs="+", type=Path, help="directories of sweeps over rates and lags"
    )
    parser.add_argument(
        "--floor",
        type=float,
        metavar="RETURN",
        help="that of a policy that does not learn, instead of the mean of the first records",
    )
    arguments = parser.parse_args()
    for sweep in arguments.sweeps:
        try:
            scores, floor = read_scores(sweep)
            floor = floor if arguments.floor is None else arguments.floor
            print(f"{sweep}\n", *lines(scores, floor), sep="\n")
        except ValueError as error:
            parser.error(f"{sweep}: {error}")


if __name__ == "__main__":
    main()

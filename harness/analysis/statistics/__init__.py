"""Statistics of runs, with the seed as the unit of replication.

Scores come as *strata*: one array of scores for each task, an entry for each seed. A single task is
a list of one array. Everything is deterministic given `rng_seed`.
"""

from harness.analysis.statistics.compare import (
    Comparison,
    compare_paired,
    compare_pairs,
    holm,
    pair_by_seed,
    probability_of_improvement,
)
from harness.analysis.statistics.curves import (
    Band,
    Profile,
    band,
    interpolate,
    profile,
    trailing_mean,
)
from harness.analysis.statistics.estimates import (
    LEVEL,
    MEASURES,
    Estimate,
    caution,
    estimate,
    iqm,
    mean,
    median,
    optimality_gap,
    resample,
)

__all__ = [
    "LEVEL",
    "MEASURES",
    "Band",
    "Comparison",
    "Estimate",
    "Profile",
    "band",
    "caution",
    "compare_paired",
    "compare_pairs",
    "estimate",
    "holm",
    "interpolate",
    "iqm",
    "mean",
    "median",
    "optimality_gap",
    "pair_by_seed",
    "probability_of_improvement",
    "profile",
    "resample",
    "trailing_mean",
]

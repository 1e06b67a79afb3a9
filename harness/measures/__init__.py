"""What a run measures, and the names that its metrics are made of.

The names are here for those who read metrics, and import neither torch nor sync.
"""

PHASES = ("collect", "train", "sync", "log")  # of the learner's loop
BUCKETS = {  # of lags, as metrics name them and as a reader sees them
    "lag_0": "0",
    "lag_1": "1",
    "lag_2": "2",
    "lag_3_4": "3–4",
    "lag_5_8": "5–8",
    "lag_9_16": "9–16",
    "lag_17_up": "17+",
}

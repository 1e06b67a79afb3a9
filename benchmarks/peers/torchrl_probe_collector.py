"""One phase of the torchrl probe: its asynchronous multi-process collector on CartPole.

Started by `torchrl_probe.py`, which ends it by force if torchrl hangs. Every frame carries the
range of the weights that computed its action, so that torn frames and wrong stamps can be counted.
"""

import argparse
import functools
import os
import time
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torchrl.collectors import MultiAsyncCollector
from torchrl.envs import GymEnv

from benchmarks.peers.torchrl_common import SCHEMES, claim_stdout, end_with_parent, make_scheme
from benchmarks.peers.torchrl_probe_policy import VersionedCartPolePolicy

FRAMES_PER_BATCH = 50


def count_frames(batch: TensorDictBase, counts: dict[str, int]) -> None:
    """Add one batch to the counts: torn frames, and stamps that name other weights."""
    low, high = batch["weights_low"].flatten(), batch["weights_high"].flatten()
    torn = low != high
    whole, versions = ~torn, low.long()
    after, before = batch["next", "policy_version"].flatten(), batch["policy_version"].flatten()
    counts["frames"] += torn.numel()
    counts["torn_frames"] += int(torn.sum())
    counts["wrong_stamps"] += int((whole & (after != versions)).sum())
    counts["wrong_stamps_before_the_step"] += int((whole & (before != versions)).sum())
    counts["batches"] += 1
    one_version = bool(whole.all()) and bool((versions == versions[0]).all())
    counts["batches_of_one_version"] += one_version
    counts["of_those_stamped_with_several"] += one_version and bool((after != after[0]).any())


def probe(
    *, scheme: str, in_place: bool, readers: int, width: int, seconds: float
) -> dict[str, Any]:
    """Collect for `seconds`, publish after every batch, and return the counts."""
    network = VersionedCartPolePolicy(width)
    policy = TensorDictModule(
        network, in_keys=["observation"], out_keys=["action", "weights_low", "weights_high"]
    )
    collector = MultiAsyncCollector(
        [functools.partial(GymEnv, "CartPole-v1", categorical_action_encoding=True)] * readers,
        policy,
        frames_per_batch=FRAMES_PER_BATCH,
        total_frames=-1,
        device="cpu",
        track_policy_version=True,
        weight_sync_schemes={"policy": make_scheme(scheme, sync=True)},
    )
    counts = dict.fromkeys(
        (
            "frames",
            "torn_frames",
            "wrong_stamps",
            "wrong_stamps_before_the_step",
            "batches",
            "batches_of_one_version",
            "of_those_stamped_with_several",
        ),
        0,
    )
    version = 0
    update_s = 0.0
    start = None
    for batch in collector:
        start = start or time.perf_counter()
        count_frames(batch, counts)
        if time.perf_counter() - start > seconds:
            break
        version += 1
        if in_place:
            network.weights.set_version(version)
        update_start = time.perf_counter()
        if in_place:
            collector.update_policy_weights_()
        else:
            weights = TensorDict.from_module(policy).data
            collector.update_policy_weights_(
                weights.apply(lambda tensor, value=version: torch.full_like(tensor, value))
            )
        update_s += time.perf_counter() - update_start
    return {**counts, "updates": version, "update_ms_mean": round(update_s / version * 1e3, 2)}


def main() -> None:
    """Run one probe and print it as one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scheme", choices=list(SCHEMES), required=True)
    parser.add_argument("--in-place", action="store_true", help="step the collector's own policy")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--readers", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    args = parser.parse_args()
    end_with_parent()
    reply = claim_stdout()
    reply({"collector": probe(**vars(args))})
    os._exit(0)  # the workers end with their pipes; torchrl's own shutdown is not measured here


if __name__ == "__main__":
    main()

"""The adapter of TorchRL: its schemes of one machine, and its asynchronous collector.

Its schemes run as its documentation shows them, with `sync=True` and with its background thread in
the workers. Each has two rows: given the model, whose memory it may share, and given memory apart
from the trainer's (`params_map`, `device_map_fn`).
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable, Iterable
from typing import Any

from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.collectors import MultiAsyncCollector
from torchrl.envs import GymEnv

from benchmarks.peers.torchrl_common import (
    make_scheme,
    sender_recipe,
    use_fastest_tensor_sharing,
)
from lockstep_conformance.frames import Collecting, Frame
from lockstep_conformance.processes import Seen, with_processes
from lockstep_conformance.weights import CartPolePolicy, NumberedModel

LIBRARY = f"TorchRL {importlib.metadata.version('torchrl')}"


class Trainer:
    """Sends with a scheme that waits for the workers' acknowledgement."""

    def __init__(self, scheme: str, memory: str, model: NumberedModel, workers: int, context: Any):
        use_fastest_tensor_sharing()
        self.handout = make_scheme(scheme, sync=True)
        self.handout.init_on_sender(**sender_recipe(scheme, memory, model, workers), ctx=context)

    def connect(self) -> None:
        self.handout.connect()

    def publish(self, model: NumberedModel, worker_ids: list[int] | None) -> None:
        self.handout.send(weights=TensorDict.from_module(model).data, worker_ids=worker_ids)

    def close(self) -> None:
        self.handout.shutdown()


class Worker:
    """Calls the policy, into which the scheme's thread writes; there are no stamps."""

    def __init__(self, scheme: Any, model: NumberedModel, index: int):
        use_fastest_tensor_sharing()
        self._scheme = scheme
        scheme.init_on_receiver(model_id="policy", model=model, worker_idx=index)
        scheme.connect(worker_idx=index)

    def step(self, call: Callable[[], Seen]) -> tuple[None, Seen]:
        return None, call()


class Collector(Collecting):
    """`MultiAsyncCollector` on CartPole, with `track_policy_version`."""

    def __init__(self, scheme: str, num_workers: int, width: int):
        super().__init__()
        network = CartPolePolicy(width)
        self.model = network.weights
        self._width = width
        self._policy = _policy_of(network)
        make_env = functools.partial(GymEnv, "CartPole-v1", categorical_action_encoding=True)
        self._collector = MultiAsyncCollector(
            [make_env] * num_workers,
            self._policy,
            frames_per_batch=50,
            total_frames=-1,
            device="cpu",
            track_policy_version=True,
            weight_sync_schemes={"policy": make_scheme(scheme, sync=True)},
        )
        self._batches = iter(self._collector)
        next(self._batches)
        self.pids = [process.pid for process in self._collector.procs]

    def next_frames(self) -> Iterable[Frame]:
        batch = next(self._batches)
        columns = [batch[name].flatten().tolist() for name in ("pid", "low", "high")]
        # A frame has a version before and one after its step; either may be right.
        stamps = [batch["policy_version"], batch["next", "policy_version"]]
        before, after = (stamp.flatten().long().tolist() for stamp in stamps)
        for pid, low, high, one, other in zip(*columns, before, after, strict=True):
            yield Frame(pid, one if one == low else other, low, high)

    def publish(self, model: NumberedModel, worker_ids: list[int] | None) -> None:
        if model is self.model:
            self._collector.update_policy_weights_(worker_ids=worker_ids)
            return
        network = CartPolePolicy(self._width)
        network.weights = model
        weights = TensorDict.from_module(_policy_of(network)).data
        self._collector.update_policy_weights_(weights, worker_ids=worker_ids)

    def close(self) -> None:
        self._collector.shutdown()


def _policy_of(network: CartPolePolicy) -> TensorDictModule:
    return TensorDictModule(network, in_keys=["observation"], out_keys=list(network.outputs))


SCHEMES: dict[str, Any] = {
    f"{scheme}, {text}": with_processes(functools.partial(Trainer, scheme, memory), Worker)
    for scheme in ("shared", "multiprocess")
    for memory, text in {"shared": "model", "private": "memory apart"}.items()
}
SCHEMES |= {
    f"{scheme}, asynchronous collector": functools.partial(Collector, scheme)
    for scheme in ("shared", "multiprocess")
}

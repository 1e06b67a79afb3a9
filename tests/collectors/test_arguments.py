"""What makes no sense is refused in one line before anything starts; nothing is ignored."""

from __future__ import annotations

import multiprocessing
import os
import re
import threading
import warnings
from functools import partial

import gymnasium as gym
import pytest
import torch
from tensordict.nn import InteractionType

from collectors import Collector, MultiSyncCollector, ReplayBuffer
from collectors.options.collector_options import CollectorOptions
from sync import (
    HogwildWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    SharedMemWeightSyncScheme,
    VanillaLocalWeightUpdater,
)
from tests.collectors.support import COLLECTORS, MULTI, CodeEnv, CodePolicy, make_env
from tests.own_process import in_own_process

EACH = tuple(COLLECTORS)
ONE, SYNC, NOT_SYNC = ("single",), ("sync",), ("single", "async")
SCHEME = SharedMemWeightSyncScheme()


def updater():
    policy = CodePolicy()
    return VanillaLocalWeightUpdater(lambda: policy, policy)


def at_once(scheme):
    return {"apply_at": "episode", "weight_sync_schemes": {"policy": scheme()}}


def finals_with(**options):
    return {"next_observation": "final", **options}


# Of these kinds: the arguments, and the message of the ValueError
WRONG_VALUES = [
    (EACH, {"frames_per_batch": 0}, "frames_per_batch=0: it must be 1 or more"),
    (ONE, {"frames_per_batch": [10]}, "frames_per_batch is a list"),
    (MULTI, {"frames_per_batch": [10]}, "frames_per_batch has 1 entries for 2"),
    (SYNC, {"frames_per_batch": 9}, "frames_per_batch=9.*for instance 8 or 10"),
    (EACH, {"total_frames": 0}, "total_frames=0: a number of frames, or -1"),
    (MULTI, {"num_workers": 0}, "num_workers=0: it must be 1 or more"),
    (ONE, {"num_workers": 2}, "num_workers=2 is for Multi.*not for Collector"),
    (EACH, {"max_frames_per_traj": 0}, "max_frames_per_traj=0: it must be 1 or more"),
    (EACH, {"init_random_frames": -1}, "init_random_frames=-1: it must be 0 or more"),
    (EACH, {"num_threads": 0}, "num_threads=0: it must be 1 or more"),
    (MULTI, {"num_sub_threads": 0}, "num_sub_threads=0: it must be 1 or more"),
    (ONE, {"num_sub_threads": 2}, "num_sub_threads=2 is for"),
    (EACH, {"exploration_type": "loud"}, "exploration_type='loud'.*random, mode"),
    (EACH, {"apply_at": "once"}, "apply_at='once': it must be one of 'step', 'batch'"),
    (("async",), {"reset_when_done": False}, "not for MultiAsyncCollector: its workers run ahead"),
    (EACH, {"next_observation": "none"}, "next_observation='none': it must be one of 'all'"),
    (EACH, finals_with(split_trajs=True), '"final" and split_trajs'),
    (EACH, finals_with(replay_buffer=ReplayBuffer(10)), '"final" and replay_buffer'),
    (EACH, {"state_on_update": "drop"}, "state_on_update='drop': it must be one of 'keep'"),
    (EACH, at_once(HogwildWeightSyncScheme), "'episode'.*Hogwild.*, weights change at once"),
    (EACH, at_once(NoWeightSyncScheme), "'episode'.*NoWeight.*, weights change at once"),
    (MULTI, {"on_worker_failure": "cry"}, "on_worker_failure='cry': it must be one of"),
    (MULTI, {"start_method": "thread"}, "start_method='thread': it must be one of"),
    (ONE, {"start_method": "fork"}, "start_method='fork' is for"),
    (MULTI, {"collector_class": MultiSyncCollector}, "collector_class=.*: workers run a Collector"),
    (MULTI, {"collector_class": partial(Collector)}, "collector_class=.*: workers run a Collector"),
    (MULTI, {"max_restarts": 3}, "max_restarts is for on_worker_failure"),
    (EACH, {"timeout": 0}, "timeout=0.*more than 0"),
    (EACH, {"timeout": float("nan")}, "timeout=nan.*more than 0"),
    (EACH, {"timeout": float("inf")}, "timeout=inf.*1000000000 or less"),
    (EACH, {"start_timeout": -1}, "start_timeout=-1.*more than 0"),
    (ONE, {"start_timeout": 9.0}, "start_timeout=9.0 is.*starts no processes"),
    (
        SYNC,
        {"preemptive_threshold": 0},
        "preemptive_threshold=0: it must be more than 0, 1 or less",
    ),
    (
        SYNC,
        {"preemptive_threshold": 1.5},
        "preemptive_threshold=1.5: it must be more than 0, 1 or less",
    ),
    (NOT_SYNC, {"preemptive_threshold": 0.5}, "preemptive_threshold=0.5 is"),
    (NOT_SYNC, {"cat_results": "stack"}, "cat_results='stack' is for"),
    (SYNC, {"cat_results": "pile"}, "cat_results='pile'.*'stack'"),
    (SYNC, {"cat_results": 2}, "cat_results=2.*'stack'"),
    (SYNC, {"cat_results": "stack", "split_trajs": True}, "cat_results.*split_trajs"),
    (ONE, {"use_buffers": False, "copy": False}, "copy=False.*use_buffers=False"),
    (MULTI, {"use_buffers": False}, "use_buffers=False is for Collector.*in buffers"),
    (EACH, {"copy": False, "split_trajs": True}, "copy=False.*but trajectories are copies"),
    (EACH, {"reset_when_done": False, "max_frames_per_traj": 5}, "max_frames_per_traj needs res"),
    (EACH, {"extend_buffer": False}, "extend_buffer=False.*replay_buffer"),
    (MULTI, {"create_env_kwargs": [{}]}, "create_env_kwargs has 1 entries for 2"),
    (MULTI, {"policy_factory": [CodePolicy]}, "policy_factory has 1 entries for 2"),
    (EACH, {"device": "gpu"}, "device='gpu'"),
    (EACH, {"policy_device": "gpu"}, "policy_device='gpu'"),
    (EACH, {"storing_device": "gpu"}, "storing_device='gpu'"),
    (EACH, {"env_device": "meta"}, "env_device.*meta.*CPU memory"),
    (MULTI, {"env_device": ["cpu", "meta"]}, "env_device.*meta.*CPU memory"),
    (MULTI, {"policy_device": ["cpu"]}, "policy_device has 1 entries for 2"),
    (MULTI, {"storing_device": ["cpu", "meta"]}, "storing_device: a batch is on one"),
    (EACH, {"cudagraph_policy": True}, "cudagraph_policy=True needs a CUDA"),
    (EACH, {"no_cuda_sync": True}, "no_cuda_sync=True.*storing_device, but it is cpu"),
    (EACH, {"weight_sync_schemes": {"actor": SCHEME}}, "'actor'"),
    (
        EACH,
        {"weight_updater": updater(), "weight_sync_schemes": {}},
        "weight_updater and weight_sync_schemes exclude",
    ),
    (
        EACH,
        {"update_at_each_batch": True, "weight_sync_schemes": {}},
        "update_at_each_batch: no weights are sent, there is no scheme",
    ),
]
# The same with a TypeError
WRONG_TYPES = [
    (EACH, {"frames_per_bach": 10}, "no argument 'frames_per_bach'.*'frames_per_batch'"),
    *((EACH, {"frames_per_batch": n}, f"={n!r}.*whole number") for n in ("10", 10.5, True, None)),
    (EACH, {"total_frames": "all"}, "total_frames='all'.*whole number"),
    (EACH, {"timeout": "soon"}, "timeout='soon'.*number"),
    (SYNC, {"preemptive_threshold": "half"}, "preemptive_threshold='half'"),
    (EACH, {"replay_buffer": 3}, "replay_buffer=3.*extend"),
    (EACH, {"postproc": "flip"}, "postproc='flip'.*callable"),
    (EACH, {"policy_factory": torch.zeros(1)}, "policy_factory"),
    (EACH, {"create_env_kwargs": 3}, "create_env_kwargs=3"),
    (MULTI, {"collector_class": 3}, "collector_class=3.*callable"),
    (EACH, {"track_policy_version": "uuid"}, "track_policy_version='uuid'.*True or False"),
    (EACH, {"weight_sync_schemes": SCHEME}, "weight_sync_schemes"),
    (EACH, {"weight_sync_schemes": {"policy": 3}}, "weight_sync_schemes=<dict>.*a dict"),
    (EACH, {"weight_recv_schemes": {"policy": 3}}, "weight_recv_schemes=<dict>.*a dict"),
    (EACH, {"weight_updater": print}, "weight_updater=<builtin.*RemoteWeightUpdaterBase"),
    (EACH, {"update_at_each_batch": "often"}, "update_at_each_batch='often'.*True or"),
    (EACH, {"copy": 1}, "copy=1.*True or False"),
]
if not torch.cuda.is_available():
    WRONG_VALUES += [
        (EACH, {"policy_device": "cuda"}, "policy_device='cuda'.*no CUDA"),
        (EACH, {"storing_device": "cuda:1"}, "storing_device='cuda:1'.*no CUDA"),
    ]


def build(kind, policy=None, **options):
    options.setdefault("frames_per_batch", 10)
    if kind in MULTI:
        options.setdefault("num_workers", 2)
    return COLLECTORS[kind](CodeEnv, policy or CodePolicy(), **options)


def refusal(kind, arguments):
    """The error for these arguments; what is wrong with it is added to its text."""
    files = len(os.listdir("/proc/self/fd"))
    try:
        build(kind, **arguments).shutdown()
    except Exception as error:  # noqa: BLE001 - any other is reported
        found, text = type(error), str(error)
    else:
        return None, "accepted"
    left = len(os.listdir("/proc/self/fd")) - files
    return found, text if left <= 0 else f"{left} open files after: {text}"


@pytest.mark.parametrize("kind", EACH)
@in_own_process
def test_arguments_that_make_no_sense_are_refused_in_one_line(kind, monkeypatch):
    def start(self):
        raise AssertionError("a process was started")

    monkeypatch.setattr("multiprocessing.process.BaseProcess.start", start)
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")  # now, since the driver keeps files open
    wrong = []
    for expected, table in ((ValueError, WRONG_VALUES), (TypeError, WRONG_TYPES)):
        for _, arguments, message in (row for row in table if kind in row[0]):
            found, text = refusal(kind, arguments)
            said = re.search(message, text) and "open files" not in text and "\n" not in text
            if found is not expected or not said:
                wrong.append(f"{arguments}: {found} {text}")
    assert not wrong, "\n".join(wrong)


def test_batches_of_workers_one_below_the_other_may_be_split_into_trajectories():
    assert CollectorOptions.of(
        "MultiSyncCollector", {"cat_results": 0, "split_trajs": True}
    ).split_trajs


OF_A_POLICY = {
    "trust_policy": True,
    "compile_policy": True,
    "exploration_type": "mode",
    "init_random_frames": 20,
    "policy_device": "cpu",
    "apply_at": "batch",
    "state_on_update": "zero",
    "weight_sync_schemes": {"policy": SCHEME},
    "weight_updater": updater(),
}


@pytest.mark.parametrize("kind", EACH)
def test_options_of_a_policy_or_of_weights_need_one(kind):
    for name, value in OF_A_POLICY.items():
        with pytest.raises(ValueError, match=f"^{name}: there is no policy, actions are random$"):
            COLLECTORS[kind](CodeEnv, frames_per_batch=10, **{name: value})
    for name, value in (("update_at_each_batch", True), ("weight_updater", updater())):
        with pytest.raises(ValueError, match=f"^{name}: no weights are sent, the policy has none$"):
            build(kind, lambda observation: torch.zeros(1), **{name: value})


def test_defaults_of_a_policy_may_be_said_without_one():
    said = {"exploration_type": InteractionType.RANDOM, "apply_at": "step", "init_random_frames": 0}
    with Collector(CodeEnv, frames_per_batch=10, device="cpu", **said) as collector:
        assert (collector.next()["policy_version"] == -1).all()


def test_factories_must_fit_the_number_of_workers_and_be_callable():
    for error, message, make in (
        (ValueError, "num_workers=3, but create_env_fn has 2 factories",
         lambda: MultiSyncCollector([CodeEnv, CodeEnv], CodePolicy(), num_workers=3)),
        (ValueError, "create_env_fn is an empty list", lambda: MultiSyncCollector([])),
        (ValueError, "create_env_fn has 2 factories, but Collector has one worker",
         lambda: Collector([CodeEnv, CodeEnv], CodePolicy())),
        (TypeError, "policy must be callable, got int", lambda: Collector(CodeEnv, 3)),
        (ValueError, r"10 frames cannot be shared evenly by 3.*9 or 12",
         lambda: Collector(partial(make_env, "sync_same_step"), frames_per_batch=10)),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            make()
    with Collector([CodeEnv], CodePolicy(), frames_per_batch=4) as collector:
        assert collector.next().batch_size == (1, 4)


class TooLarge(CodePolicy):
    def __reduce__(self):
        raise MemoryError


def test_a_part_that_cannot_be_sent_to_a_worker_is_named():
    lock = threading.Lock()
    for name in ("create_env_fn", "policy"):
        given = {"create_env_fn": CodeEnv, "policy": CodePolicy(), name: lambda *_: lock}
        with pytest.raises(TypeError, match=f"^{name} cannot be sent to another process: cannot"):
            MultiSyncCollector(**given, num_workers=1)
    with pytest.raises(MemoryError, match=r"^policy takes more memory to send than there is$"):
        MultiSyncCollector(CodeEnv, TooLarge(), num_workers=1)


def test_workers_whose_frames_do_not_fit_in_one_batch_are_told_so():
    factories = [CodeEnv, lambda: gym.make("CartPole-v1")]
    with (
        MultiSyncCollector(factories, None, frames_per_batch=20) as collector,
        pytest.raises(ValueError, match="worker 0 and worker 1 differ in 'observation'"),
    ):
        collector.next()
    with MultiSyncCollector(factories, None, frames_per_batch=20) as collector:
        with pytest.raises(ValueError, match="differ in 'observation'"):
            collector.next()
        counts = collector.counts()
        assert [counts[name] for name in ("delivered", "dropped", "in_flight")] == [0, 20, 0]
    kwargs = [{"kind": "sync_disabled", "num_envs": count} for count in (2, 3)]
    options = {"num_workers": 2, "create_env_kwargs": kwargs, "frames_per_batch": [20, 30]}
    with pytest.raises(ValueError, match=r"cat_results='stack'.*same number.*not \[2, 3\]"):
        MultiSyncCollector(make_env, cat_results="stack", **options)


def test_a_warning_that_is_an_error_leaves_no_workers_behind():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with pytest.raises(UserWarning, match="total_frames=50 is not a multiple") as raised:
            build("sync", total_frames=50, frames_per_batch=40)
    assert raised.value.__traceback__ is not None  # so the collector still exists
    assert not multiprocessing.active_children()


# What is accepted does something (what is not here has tests beside it: data, policies, failures)


def test_threads_are_as_many_as_are_given():
    def counting(observation):
        return {"action": torch.zeros(1, dtype=torch.int64), "n": torch.tensor([threads()])}

    threads = torch.get_num_threads
    with COLLECTORS["async"](CodeEnv, counting, frames_per_batch=4, num_sub_threads=3) as collector:
        assert (collector.next()["n"] == 3).all()
    before = threads()
    with build("single", num_threads=before + 1):
        assert threads() == before + 1
    assert threads() == before


@pytest.mark.parametrize(("kind", "told"), [("single", {}), ("sync", {"cat_results": "stack"})])
def test_extend_buffer_says_whether_frames_come_at_once_or_step_by_step(kind, told):
    class Counting(ReplayBuffer):
        calls = 0

        def extend(self, frames):
            self.calls += 1
            return super().extend(frames)

    for all_at_once in (True, False):
        buffer = Counting(100)
        options = {"replay_buffer": buffer, "extend_buffer": all_at_once, **told}
        with build(kind, **options) as collector:
            assert [collector.next() for _ in range(3)] == [None] * 3
        workers = 1 if kind == "single" else 2
        assert buffer.calls == (3 if all_at_once else 30 // workers)
        assert len(buffer) == 30
        for worker in range(workers):
            mine = buffer[:]["collector", "worker"] == worker
            assert buffer[:]["collector", "traj_ids"][mine].diff().min() >= 0


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [
        ("single", MultiProcessWeightSyncScheme),
        ("sync", SharedMemWeightSyncScheme),
        ("async", MultiProcessWeightSyncScheme),
    ],
)
def test_schemes_bring_the_weights_of_the_models_they_are_for(kind, scheme):
    policy, each = CodePolicy(), "cpu" if kind == "single" else ["cpu", torch.device("cpu")]
    devices = dict.fromkeys(("device", "policy_device", "storing_device", "env_device"), each)
    with build(kind, policy, weight_sync_schemes={"policy": scheme()}, **devices) as collector:
        collector.next()
        with torch.no_grad():
            policy.number += 5
        collector.update_policy_weights_()
        while (batch := collector.next())["policy_version"].min() < 1:
            pass
        assert (batch["weights"] == 5).all()


@pytest.mark.parametrize("kind", EACH)
def test_weight_sync_schemes_may_be_none_at_all(kind):
    with build(kind, weight_sync_schemes={}) as collector:
        assert (collector.next()["policy_version"] == 0).all()
        why = r"no weights are sent for model 'policy'.*weight_sync_schemes is empty"
        for told in ({"model_id": "policy"}, {"weights": CodePolicy()}):
            with pytest.raises(ValueError, match=why):
                collector.update_policy_weights_(**told)


def test_a_collector_class_may_be_said_and_is_a_collector():
    with build("sync", collector_class=Collector) as collector:
        assert collector.next().batch_size == (2, 5)


def test_workers_are_started_as_told():
    def policy(observation):
        return torch.full((1,), os.getppid() == trainer, dtype=torch.int64)

    trainer, options = os.getpid(), {"frames_per_batch": 4, "num_workers": 1}
    for method, ours in (("fork", 1), ("forkserver", 0)):
        with MultiSyncCollector(CodeEnv, policy, start_method=method, **options) as collector:
            assert (collector.next()["action"] == ours).all()

"""What makes no sense is refused in one line before anything starts; nothing is ignored."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import os
import textwrap
import threading

import pytest
import torch
from tensordict.nn import InteractionType

from collectors import (
    Collector,
    MultiAsyncCollector,
    MultiCollector,
    MultiSyncCollector,
    PolicyVersion,
    ReplayBuffer,
)
from collectors.options import _ONLY_FOR, Options
from collectors.rollout.loop import Rollout
from collectors.rollout.make_environment import make_environments
from collectors.rollout.policy import PolicyCaller
from collectors.workers.worker_loop import Worker
from sync import (
    HogwildWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    SharedMemWeightSyncScheme,
    VanillaLocalWeightUpdater,
)
from tests.collectors.support import CodeEnv, CodePolicy, make_env, workers_of
from tests.own_process import in_own_process

KINDS = {"single": Collector, "sync": MultiSyncCollector, "async": MultiAsyncCollector}
EACH = tuple(KINDS)
MULTI = ("sync", "async")


def updater():
    policy = CodePolicy()
    return VanillaLocalWeightUpdater(lambda: policy, policy)


# kinds, arguments, what the error says
REFUSED = [
    (EACH, {"frames_per_bach": 10}, TypeError, "no argument 'frames_per_bach'.*'frames_per_batch'"),
    (EACH, {"frames_per_batch": 0}, ValueError, "frames_per_batch=0: it must be at least 1"),
    (EACH, {"frames_per_batch": "10"}, TypeError, "frames_per_batch='10'.*whole number"),
    (EACH, {"frames_per_batch": 10.5}, TypeError, "frames_per_batch=10.5.*whole number"),
    (EACH, {"frames_per_batch": True}, TypeError, "frames_per_batch=True.*whole number"),
    (EACH, {"frames_per_batch": None}, TypeError, "frames_per_batch=None.*whole number"),
    (("single",), {"frames_per_batch": [10]}, ValueError, "frames_per_batch is a list"),
    (MULTI, {"frames_per_batch": [10]}, ValueError, "frames_per_batch has 1 entries for 2"),
    (("sync",), {"frames_per_batch": 9}, ValueError, "frames_per_batch=9.*for instance 8 or 10"),
    (EACH, {"total_frames": 0}, ValueError, "total_frames=0: a number of frames, or -1"),
    (EACH, {"total_frames": "all"}, TypeError, "total_frames='all'.*whole number"),
    (MULTI, {"num_workers": 0}, ValueError, "num_workers=0: it must be at least 1"),
    (("single",), {"num_workers": 2}, ValueError, "num_workers=2 is for Multi.*not for Collector"),
    (EACH, {"max_frames_per_traj": 0}, ValueError, "max_frames_per_traj=0: it must be at least"),
    (EACH, {"init_random_frames": -1}, ValueError, "init_random_frames=-1: it must be at least 0"),
    (EACH, {"trajs_per_batch": 0}, ValueError, "trajs_per_batch=0: it must be at least 1"),
    (EACH, {"num_threads": 0}, ValueError, "num_threads=0: it must be at least 1"),
    (MULTI, {"num_sub_threads": 0}, ValueError, "num_sub_threads=0: it must be at least 1"),
    (("single",), {"num_sub_threads": 2}, ValueError, "num_sub_threads=2 is for"),
    (EACH, {"exploration_type": "loud"}, ValueError, "exploration_type='loud'.*random, mode"),
    (EACH, {"apply_at": "once"}, ValueError, "apply_at='once': it is one of 'step', 'batch'"),
    (
        ("async",),
        {"reset_when_done": False},
        ValueError,
        "reset_when_done=False is for .*, not for MultiAsyncCollector: its workers run ahead",
    ),
    (EACH, {"next_observation": "none"}, ValueError, "next_observation='none': it is one of 'all'"),
    *(
        (EACH, {"next_observation": "final", **told}, ValueError, f'"final" and {next(iter(told))}')
        for told in (
            {"split_trajs": True},
            {"trajs_per_batch": 3},
            {"replay_buffer": ReplayBuffer(10)},
        )
    ),
    (
        MULTI,
        {"next_observation": "final", "collector_class": Collector},
        ValueError,
        '"final" and collector_class exclude each other',
    ),
    (EACH, {"state_on_update": "drop"}, ValueError, "state_on_update='drop': it is one of 'keep'"),
    *(
        (
            EACH,
            {"apply_at": "episode", "weight_sync_schemes": {"policy": scheme()}},
            ValueError,
            f"apply_at='episode'.*{scheme.__name__}, weights change at once",
        )
        for scheme in (HogwildWeightSyncScheme, NoWeightSyncScheme)
    ),
    (MULTI, {"on_worker_failure": "cry"}, ValueError, "on_worker_failure='cry': it is one of"),
    (MULTI, {"start_method": "thread"}, ValueError, "start_method='thread': it is one of"),
    (("single",), {"start_method": "fork"}, ValueError, "start_method='fork' is for"),
    (MULTI, {"max_restarts": 3}, ValueError, "max_restarts is for on_worker_failure"),
    (EACH, {"timeout": 0}, ValueError, "timeout=0.*above 0"),
    (EACH, {"timeout": float("nan")}, ValueError, "timeout=nan.*above 0"),
    (EACH, {"timeout": "soon"}, TypeError, "timeout='soon'.*number"),
    (EACH, {"timeout": float("inf")}, ValueError, "timeout=inf.*up to 1e.09"),
    (EACH, {"start_timeout": -1}, ValueError, "start_timeout=-1.*above 0"),
    (("single",), {"start_timeout": 9.0}, ValueError, "start_timeout=9.0 is.*starts no processes"),
    (("sync",), {"preemptive_threshold": 0}, ValueError, "preemptive_threshold=0: a share"),
    (("sync",), {"preemptive_threshold": 1.5}, ValueError, "preemptive_threshold=1.5: a share"),
    (("sync",), {"preemptive_threshold": "half"}, TypeError, "preemptive_threshold='half'"),
    (("single", "async"), {"preemptive_threshold": 0.5}, ValueError, "preemptive_threshold=0.5 is"),
    (("single", "async"), {"cat_results": "stack"}, ValueError, "cat_results='stack' is for"),
    (("sync",), {"cat_results": "pile"}, ValueError, "cat_results='pile'.*'stack'"),
    (("sync",), {"cat_results": 2}, ValueError, "cat_results=2.*'stack'"),
    (
        ("sync",),
        {"cat_results": "stack", "split_trajs": True},
        ValueError,
        "cat_results.*split_trajs",
    ),
    (("sync",), {"cat_results": 1, "trajs_per_batch": 3}, ValueError, "cat_results.*trajs_per_ba"),
    (EACH, {"split_trajs": True, "trajs_per_batch": 3}, ValueError, "leave split_trajs out"),
    (
        EACH,
        {"set_truncated": True, "trajs_per_batch": 3},
        ValueError,
        "trajs_per_batch exclude each other",
    ),
    (
        ("single",),
        {"use_buffers": False, "copy": False},
        ValueError,
        "copy=False.*use_buffers=False",
    ),
    (MULTI, {"use_buffers": False}, ValueError, "use_buffers=False is for Collector.*in buffers"),
    (
        EACH,
        {"copy": False, "split_trajs": True},
        ValueError,
        "copy=False reuses memory, but trajectories are copies",
    ),
    (
        EACH,
        {"reset_when_done": False, "max_frames_per_traj": 5},
        ValueError,
        "max_frames_per_traj needs resets",
    ),
    (
        EACH,
        {"reset_when_done": False, "trajs_per_batch": 5},
        ValueError,
        "trajs_per_batch needs many episodes",
    ),
    (EACH, {"replay_buffer": 3}, TypeError, "replay_buffer=3.*extend"),
    (EACH, {"postproc": "flip"}, TypeError, "postproc='flip'.*callable"),
    (EACH, {"policy_factory": CodePolicy()(torch.zeros(1, 5))}, TypeError, "policy_factory"),
    (EACH, {"create_env_kwargs": 3}, TypeError, "create_env_kwargs=3"),
    (MULTI, {"create_env_kwargs": [{}]}, ValueError, "create_env_kwargs has 1 entries for 2"),
    (MULTI, {"policy_factory": [CodePolicy]}, ValueError, "policy_factory has 1 entries for 2"),
    (
        MULTI,
        {"collector_class": functools.partial(Collector, split_trajs=True)},
        ValueError,
        "split_trajs in collector_class: set it on the outer collector",
    ),
    (
        MULTI,
        {"collector_class": functools.partial(Collector, total_frames=100)},
        ValueError,
        "total_frames in collector_class: set it on the outer collector",
    ),
    (MULTI, {"collector_class": 3}, TypeError, "collector_class=3.*callable"),
    (EACH, {"device": "gpu"}, ValueError, "device='gpu'"),
    (EACH, {"policy_device": "gpu"}, ValueError, "policy_device='gpu'"),
    (EACH, {"storing_device": "gpu"}, ValueError, "storing_device='gpu'"),
    (EACH, {"env_device": "meta"}, ValueError, "env_device.*meta.*CPU memory"),
    (MULTI, {"env_device": ["cpu", "meta"]}, ValueError, "env_device.*meta.*CPU memory"),
    (MULTI, {"policy_device": ["cpu"]}, ValueError, "policy_device has 1 entries for 2"),
    (MULTI, {"storing_device": ["cpu", "meta"]}, ValueError, "storing_device: a batch is on one"),
    (EACH, {"cudagraph_policy": True}, ValueError, "cudagraph_policy=True needs a CUDA"),
    (EACH, {"no_cuda_sync": True}, ValueError, "no_cuda_sync=True.*storing_device, but it is cpu"),
    (EACH, {"track_policy_version": "roman"}, ValueError, "track_policy_version='roman'"),
    (EACH, {"weight_sync_schemes": {"actor": SharedMemWeightSyncScheme()}}, ValueError, "'actor'"),
    (EACH, {"weight_sync_schemes": SharedMemWeightSyncScheme()}, TypeError, "weight_sync_schemes"),
    (
        EACH,
        {"weight_sync_schemes": {"policy": 3}},
        TypeError,
        "weight_sync_schemes=<dict>.*a dict",
    ),
    (
        EACH,
        {"weight_recv_schemes": {"policy": 3}},
        TypeError,
        "weight_recv_schemes=<dict>.*a dict",
    ),
    (
        EACH,
        {"weight_updater": updater(), "weight_sync_schemes": {}},
        ValueError,
        "weight_updater and weight_sync_schemes exclude",
    ),
    (
        EACH,
        {"weight_updater": print},
        TypeError,
        "weight_updater=<builtin.*RemoteWeightUpdaterBase",
    ),
    (
        EACH,
        {"update_at_each_batch": True, "weight_sync_schemes": {}},
        ValueError,
        "update_at_each_batch: no weights are sent, there is no scheme",
    ),
    (EACH, {"update_at_each_batch": "often"}, TypeError, "update_at_each_batch='often'.*True or"),
    (EACH, {"copy": 1}, TypeError, "copy=1.*True or False"),
]
if not torch.cuda.is_available():
    REFUSED += [
        (EACH, {"policy_device": "cuda"}, ValueError, "policy_device='cuda'.*no CUDA"),
        (EACH, {"storing_device": "cuda:1"}, ValueError, "storing_device='cuda:1'.*no CUDA"),
    ]


def open_files():
    return len(os.listdir("/proc/self/fd"))


def build(kind, policy=None, **options):
    options.setdefault("frames_per_batch", 10)
    if kind in MULTI and "num_workers" not in options:
        options["num_workers"] = 2
    return KINDS[kind](CodeEnv, policy or CodePolicy(), **options)


CASES = [
    pytest.param(kind, arguments, error, message, id=f"{kind}-{'-'.join(arguments)}")
    for kinds, arguments, error, message in REFUSED
    for kind in kinds
]


@pytest.mark.parametrize(("kind", "arguments", "error", "message"), CASES)
@in_own_process
def test_it_is_refused_in_one_line(kind, arguments, error, message, monkeypatch):
    def start(self):
        raise AssertionError("a process was started")

    monkeypatch.setattr("multiprocessing.process.BaseProcess.start", start)
    files = open_files()
    with pytest.raises(error, match=message) as caught:
        build(kind, **arguments)
    assert "\n" not in str(caught.value)
    del caught
    assert open_files() <= files


OF_A_POLICY = {
    "trust_policy": True,
    "compile_policy": True,
    "exploration_type": "mode",
    "init_random_frames": 20,
    "policy_device": "cpu",
    "apply_at": "batch",
    "state_on_update": "zero",
    "weight_sync_schemes": {"policy": SharedMemWeightSyncScheme()},
    "weight_updater": updater(),
}


@pytest.mark.parametrize("kind", EACH)
@pytest.mark.parametrize("name", OF_A_POLICY)
def test_options_of_a_policy_need_one(kind, name):
    with pytest.raises(ValueError, match=f"^{name}: there is no policy, actions are random$"):
        KINDS[kind](CodeEnv, frames_per_batch=10, **{name: OF_A_POLICY[name]})


@pytest.mark.parametrize("kind", EACH)
@pytest.mark.parametrize("name", ["update_at_each_batch", "weight_updater"])
def test_options_of_weights_need_some(kind, name):
    told = {"update_at_each_batch": True, "weight_updater": updater()}[name]
    with pytest.raises(ValueError, match=f"^{name}: no weights are sent, the policy has none$"):
        build(kind, lambda observation: torch.zeros(1), **{name: told})


def test_what_is_so_of_itself_may_be_said_without_a_policy():
    said = {"exploration_type": InteractionType.RANDOM, "apply_at": "step", "init_random_frames": 0}
    with Collector(CodeEnv, frames_per_batch=10, device="cpu", **said) as collector:
        assert (collector.next()["policy_version"] == -1).all()


def test_extending_by_steps_needs_a_buffer():
    with pytest.raises(ValueError, match=r"extend_buffer=False.*replay_buffer"):
        build("single", extend_buffer=False)


def test_too_few_or_many_factories_are_refused():
    with pytest.raises(ValueError, match="num_workers=3, but create_env_fn has 2 factories"):
        MultiSyncCollector([CodeEnv, CodeEnv], CodePolicy(), num_workers=3)
    with pytest.raises(ValueError, match="create_env_fn is an empty list"):
        MultiSyncCollector([], CodePolicy())


def test_one_worker_takes_one_factory_also_in_a_list():
    with Collector([CodeEnv], CodePolicy(), frames_per_batch=4) as collector:
        assert collector.next().batch_size == (1, 4)
    with pytest.raises(
        ValueError, match="create_env_fn has 2 factories, but Collector has one worker"
    ):
        Collector([CodeEnv, CodeEnv], CodePolicy())


@pytest.mark.parametrize("sync", ["async", None, 1])
def test_what_says_neither_sync_nor_async_is_refused(sync):
    with pytest.raises(TypeError, match=f"sync={sync!r}: it must be True or False"):
        MultiCollector(CodeEnv, CodePolicy(), num_workers=1, sync=sync)


def test_a_policy_that_cannot_be_called_is_refused():
    with pytest.raises(TypeError, match="policy must be callable, got int"):
        Collector(CodeEnv, 3)


@pytest.mark.parametrize("name", ["create_env_fn", "policy"])
def test_what_cannot_travel_is_named(name):
    lock = threading.Lock()
    given = {"create_env_fn": CodeEnv, "policy": CodePolicy(), name: lambda *_: lock}
    with pytest.raises(
        TypeError, match=f"^{name} cannot be sent to another process: cannot pickle"
    ):
        MultiSyncCollector(**given, num_workers=1)


class TooLarge(CodePolicy):
    def __reduce__(self):
        raise MemoryError


def test_a_policy_for_whose_copy_there_is_no_memory_is_not_called_unfit_to_travel():
    with pytest.raises(MemoryError, match=r"^policy takes more memory to send than there is$"):
        MultiSyncCollector(CodeEnv, TooLarge(), num_workers=1)


def test_frames_that_environments_cannot_share_are_refused():
    with pytest.raises(ValueError, match=r"10 frames cannot be shared evenly by 3.*9 or 12"):
        Collector(make_env, CodePolicy(), create_env_kwargs={"kind": "sync_same_step"},
                  frames_per_batch=10)  # fmt: skip


def test_workers_whose_batches_differ_are_told_so():
    import gymnasium as gym

    with (
        MultiSyncCollector(
            [CodeEnv, lambda: gym.make("CartPole-v1")], None, frames_per_batch=20
        ) as collector,
        pytest.raises(ValueError, match="worker 0 and worker 1 differ in 'observation'"),
    ):
        collector.next()


def test_workers_that_cannot_be_put_together_are_refused():
    kwargs = [{"kind": "sync_disabled", "num_envs": count} for count in (2, 3)]
    with pytest.raises(ValueError, match=r"cat_results='stack'.*same number.*not \[2, 3\]"):
        MultiSyncCollector(
            make_env,
            num_workers=2,
            create_env_kwargs=kwargs,
            frames_per_batch=[20, 30],
            cat_results="stack",
        )


# What is accepted does something (what is not here has tests beside it: data, policies, failures)


@pytest.mark.parametrize("kind", MULTI)
def test_workers_use_as_many_threads_as_they_are_given(kind):
    def counting(observation):
        return {"action": torch.zeros(1, dtype=torch.int64), "n": torch.tensor([threads()])}

    threads = torch.get_num_threads
    with KINDS[kind](CodeEnv, counting, frames_per_batch=4, num_sub_threads=3) as collector:
        assert (collector.next()["n"] == 3).all()


def test_the_trainer_uses_as_many_threads_as_it_is_given_while_it_collects():
    before = torch.get_num_threads()
    with build("single", num_threads=before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(("kind", "told"), [("single", {}), ("sync", {"cat_results": "stack"})])
def test_extend_buffer_says_whether_frames_come_at_once_or_step_by_step(kind, told):
    class Counting(ReplayBuffer):
        calls = 0

        def extend(self, frames):
            self.calls += 1
            return super().extend(frames)

    for at_once in (True, False):
        buffer = Counting(100)
        with build(kind, replay_buffer=buffer, extend_buffer=at_once, **told) as collector:
            assert [collector.next() for _ in range(3)] == [None] * 3
        workers = 1 if kind == "single" else 2
        assert buffer.calls == (3 if at_once else 30 // workers)
        assert len(buffer) == 30
        for worker in range(workers):
            mine = buffer[:]["collector", "worker"] == worker
            assert buffer[:]["collector", "traj_ids"][mine].diff().min() >= 0


@pytest.mark.parametrize("kind", EACH)
def test_devices_may_be_named_for_all_or_for_each(kind):
    each = "cpu" if kind == "single" else ["cpu", torch.device("cpu")]
    options = {"device": each, "policy_device": each, "storing_device": each, "env_device": each}
    with build(kind, **options) as collector:
        assert collector.next()["observation"].device.type == "cpu"


@pytest.mark.parametrize("kind", EACH)
@pytest.mark.parametrize("scheme", [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme])
def test_schemes_bring_the_weights_of_the_models_they_are_for(kind, scheme):
    policy = CodePolicy()
    with build(kind, policy, weight_sync_schemes={"policy": scheme()}) as collector:
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


def test_a_policy_version_of_ones_own_is_used():
    mine = PolicyVersion("uuid")
    with build("single", track_policy_version=mine) as collector:
        collector.next()
        collector.increment_version()
        assert collector.policy_version == mine.version == str(mine.uuid(1))


@pytest.mark.parametrize("kind", MULTI)
def test_workers_may_host_collectors(kind):
    with build(kind, collector_class=Collector) as collector:
        batch = collector.next()
        assert (batch["seen"] == batch["observation"]).all()


@pytest.mark.parametrize("kind", MULTI)
def test_workers_are_started_as_told(kind):
    def policy(observation):
        return torch.full((1,), os.getppid() == trainer, dtype=torch.int64)

    trainer = os.getpid()
    for method, ours in (("fork", 1), ("forkserver", 0)):
        with KINDS[kind](
            CodeEnv, policy, frames_per_batch=4, start_method=method, num_workers=1
        ) as collector:
            assert (collector.next()["action"] == ours).all()


def read_in(code, *owners):
    """The options that this code reads from something of one of these names, or of itself."""
    found = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(code)))):
        match node:
            case ast.Attribute(value=ast.Name(owner) | ast.Attribute(attr=owner), attr=name):
                found |= {name} if owner in owners else set()
            case ast.Subscript(value=ast.Name("options"), slice=ast.Constant(str(name))):
                found.add(name)
    return found


@pytest.mark.parametrize("kind", EACH)
def test_every_option_is_read_where_it_is_accepted(kind):
    """An option that nobody reads would be accepted and ignored. Checks do not count."""
    classes = [c for c in KINDS[kind].__mro__ if c.__module__.startswith("collectors.")]
    read = set().union(*(read_in(c, "options") for c in classes))
    read |= read_in(Options.devices, "self") | read_in(Options.storing, "self")
    for part in (make_environments, PolicyCaller, Rollout):
        read |= read_in(part, "options")
    refused = {name for name, (kinds, _) in _ONLY_FOR.items() if KINDS[kind].kind not in kinds}
    checked = {"env_device"}  # there is one place where environments can be
    if kind in MULTI:
        read |= read_in(Worker, "options")
        checked |= {"use_buffers"}  # there is no other way
    assert {field.name for field in dataclasses.fields(Options)} - read - refused == checked


def test_told_workers_are_who_they_were_told_to_be():
    told = workers_of("one", 2)
    with MultiSyncCollector(
        make_env, CodePolicy(), num_workers=2, create_env_kwargs=told, frames_per_batch=10
    ) as collector:
        assert collector.getattr_env("worker") == [0, 1]

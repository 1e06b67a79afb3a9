"""Branches: a run goes on from the state of another one, with an option changed and without."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
import torch

import run
from collectors.options.rollout_options import RolloutOptions
from collectors.rollout.environment import Environments
from collectors.rollout.make_environment import make_environments
from harness import reproduce
from harness.branch.command import main
from harness.branch.study import PARTS, seconds_in_loop
from harness.config.plan import plan_run
from harness.environments.factory import EnvFactory
from harness.files import flatten, read_json, to_yaml, write_json
from harness.options.run import EnvConfig
from harness.run.branch_start import branch_of, seed_of, with_new_streams
from harness.run.checkpoints import Checkpoints, read
from harness.run_comparison import compare_records
from tests.harness.config.composed import config_of
from tests.harness.small import SMALL, wait_until

pytestmark = pytest.mark.usefixtures("here")

LONGER = (*SMALL, "total_frames=1024", "hydra.run.dir=parent")  # of 8 updates
SIMULATED = ("collector=simulated", "collector.num_workers=2", "collector.frames_per_batch=64")
ASYNC = (
    *(*LONGER, "total_frames=2560", "collector=multi_async", "collector.num_workers=2"),
    *("env.num_envs=2", "collector.frames_per_batch=64"),
)


def parent(*overrides: str) -> Path:
    """A run that is done."""
    assert run.main([*LONGER, *overrides]) == 0
    return Path("parent")


def branch(*arguments: str) -> int:
    return main(["parent", "--out", "out", "--repeats", "1", *arguments])


def records(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def is_repeated(directory: Path) -> bool:
    return reproduce.main([str(directory), "--out", f"again-{directory.parent.name}"]) == 0


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a parent and its branches: two repeats, after update 3 of 8."""
    folder = tmp_path_factory.mktemp("made")
    with contextlib.chdir(folder):
        parent("checkpoint.every_frames=384", "checkpoint.keep=9")
        assert branch("--at", "3", "--repeats", "2", "sync.lag=1") == 0
    return folder


@pytest.fixture
def study(here: None, made: Path) -> Path:
    """A copy of it in the current folder: `parent` and `out`."""
    shutil.copytree(made, ".", dirs_exist_ok=True)
    return Path("out")


CONTROL, CHANGED = Path("out/update-3/control"), Path("out/update-3/sync.lag=1")


@pytest.mark.usefixtures("study")
def test_a_branch_goes_on_from_its_moment():
    for directory, lag in ((CONTROL / "1", 0), (CHANGED / "1", 1)):
        first, *rest = records(directory)
        assert first["step"] == 4 * 128
        assert first["policy/version"] == 4
        assert rest[-1]["step"] == 1024
        assert max(record.get("policy/lag_updates_max", 0) for record in rest) == lag
    origin = read_json(CHANGED / "1/manifest.json")["branch"]
    assert origin["changes"] == {"sync.lag": 1}
    assert (origin["update"], origin["arm"], origin["repeat"]) == (3, "sync.lag=1", 1)
    assert origin["parent_id"] == read_json(Path("parent/manifest.json"))["wandb_id"]
    assert Path("out/report/report.html").is_file()


@pytest.mark.usefixtures("study")
def test_a_branch_repeats_to_the_bit():
    assert is_repeated(CHANGED / "2")


@pytest.mark.usefixtures("study")
def test_arms_share_the_streams_of_a_repeat_and_repeats_do_not():
    arms = (CONTROL, CHANGED)
    seeds = [[read_json(arm / f"{i}/manifest.json")["seed"] for i in (1, 2)] for arm in arms]
    assert seeds[0] == seeds[1] == [seed_of(1, 3, 1), seed_of(1, 3, 2)]
    # The lag alone differs: up to the first update, both arms make the same frames.
    first = [[records(arm / f"{i}")[0]["train/policy_loss"] for i in (1, 2)] for arm in arms]
    assert first[0] == first[1]
    assert first[0][0] != first[0][1]
    assert records(CONTROL / "1")[-2] != records(CHANGED / "1")[-2]


def test_the_seed_of_a_branch_follows_from_run_moment_and_repeat():
    seeds = {seed_of(*places) for places in ((1, 3, 1), (2, 3, 1), (1, 4, 1), (1, 3, 2))}
    assert len(seeds) == 4


@pytest.mark.usefixtures("study")
def test_what_is_done_is_not_done_again(capsys):
    before = read_json(CONTROL / "1/manifest.json")
    assert branch("--at", "3,5", "sync.lag=1") == 0
    out = capsys.readouterr().out
    assert "2 branches in out" in out
    assert re.search(r"a branch took \d+\.\d s, of which its start and its end are \d+%", out)
    later = Path("out/update-5/control/1")
    of_all = sum(read_json(later / "summary.json")[f"time/{part}_s"] for part in PARTS)
    assert 0 < seconds_in_loop(later) < of_all  # without the parent's part
    assert read_json(CONTROL / "1/manifest.json") == before


@pytest.mark.usefixtures("study")
def test_the_states_are_those_of_the_parent():
    (of_parent,) = Path("parent/checkpoints").glob("000000000384-*")
    _, saved = Checkpoints(Path("out/moments/3")).load()
    _, start = Checkpoints(CONTROL / "1/start").load()
    for state in (saved, start):
        assert state["updates"] == 3
        for name, value in flatten(state["learner"], lists=True):
            expected = dict(flatten(read(of_parent)["learner"], lists=True))[name]
            assert torch.equal(value, expected) if torch.is_tensor(value) else value == expected
    assert compare_records(Path("parent"), Path("out/parent"), whole=False) is None


def test_an_asynchronous_parent_is_replayed_and_its_branches_are_simulated(capsys):
    assert run.main([*ASYNC]) == 0
    assert branch("--at", "9", "algo.clip=0.1") == 0
    control = Path("out/update-9/control/1")
    assert is_repeated(control)
    for record in records(control)[:-1]:
        counts = {key: record[f"collector/{key}"] for key in ("delivered", "dropped", "in_flight")}
        assert record["collector/collected"] == sum(counts.values())
    assert records(control)[0]["policy/version"] == 10


def test_branches_of_an_asynchronous_run_may_have_real_workers(capsys):
    assert run.main([*ASYNC]) == 0
    assert branch("--at", "9", "--real-workers", "algo.clip=0.1") == 0
    control = Path("out/update-9/control/1")
    assert records(control)[0]["policy/version"] == 10
    assert (control / "schedule.jsonl").is_file()


def test_a_simulated_parent_with_an_exact_lag_has_branches_with_and_without(capsys):
    parent(*SIMULATED, "sync.lag=3")
    assert branch("--at", "9", "sync.lag=0") == 0
    control, changed = Path("out/update-9/control/1"), Path("out/update-9/sync.lag=0/1")
    assert records(changed)[0]["policy/lag_updates_max"] == 0
    assert records(control)[0]["policy/lag_updates_max"] == 3
    assert is_repeated(control)
    assert is_repeated(changed)


@pytest.mark.usefixtures("study")
def test_a_branch_may_be_branched():
    of_branch = [str(CONTROL / "1"), "--at", "5", "--repeats", "1", "--out", "more"]
    assert main([*of_branch, "algo.clip=0.1"]) == 0
    assert records(Path("more/update-5/control/1"))[0]["step"] == 6 * 128


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--at", "8", "sync.lag=1"), "--at 8: parent has 8 updates; expected 7 or less"),
        (("--at", "0", "sync.lag=1"), "--at 0: expected an update from 1 on"),
        (("--at", "3"), "name what the branches change, as sync.lag=0"),
        (("--at", "3", "sync.lag=0"), "sync.lag=0: the parent has sync.lag=0, too"),
        (("--at", "3", "seed=2"), "seed cannot change in a branch: a branch has a seed of its own"),
        (("--at", "3", "env.id=Pendulum-v1"), "env cannot change in a branch: the episodes"),
        (("--at", "3", "model.activation=relu"), "model cannot change in a branch: the saved"),
        (("--at", "3", "total_frames=9"), "total_frames cannot change in a branch"),
        (("--at", "3", "collector.name=multi_sync"), "collector.name cannot change in a branch"),
        (("--at", "3", "sync.max_lag=2"), "which has priority; set algo.max_lag"),
        (("--at", "3", "num_threads=2"), "a branch may change options of algo.*, sync.*, coll"),
        (("--at", "3", "sync.lgg=1"), "did you mean sync.lag?"),
        (("--at", "3", "sync.lag=1,2"), "sync.lag=1,2: expected one value"),
        (("--at", "3", "sync.lag=-1"), "sync.lag=-1"),
        (
            ("--at", "3", "algo.objective=ewma"),
            "algo.objective=ewma needs the state averaged of the learner, which the parent does",
        ),
        (("--at", "3", "--real-workers", "sync.lag=1"), "the parent has collector=single"),
        (("--at", "3", "--repeats", "0", "sync.lag=1"), "--repeats 0: expected 1 or more"),
        (("--at", "3", "--refine", "-1", "sync.lag=1"), "--refine -1: expected 0 or more"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(arguments, message, capsys):
    stored_parent()
    assert branch(*arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not Path("out").exists()


def stored_parent() -> Path:
    """A directory that says it is a run of 8 updates that is done; nothing ran."""
    directory = Path("parent")
    directory.mkdir()
    (directory / "config.yaml").write_text(to_yaml(plan_run([*LONGER]).options))
    write_json(directory / "status.json", {"state": "done"})
    write_json(directory / "summary.json", {"updates": 8})
    return directory


@pytest.mark.parametrize("name", ["config.yaml", "manifest.json", "status.json", "summary.json"])
def test_a_damaged_parent_is_refused_in_one_line(name, capsys):
    (stored_parent() / name).write_text("[1")
    assert branch("--at", "3", "sync.lag=1") == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not Path("out").exists()


def test_only_the_checkpoints_of_a_resumed_parent_are_moments(capsys):
    parent()
    assert run.main(["resume=parent", "total_frames=1280"]) == 0
    assert branch("--at", "3", "sync.lag=1") == 2
    assert "no checkpoint after this update; those of parent are after 8, 10" in (
        capsys.readouterr().err
    )
    assert branch("--at", "8", "sync.lag=1") == 0
    assert records(Path("out/update-8/control/1"))[0]["step"] == 9 * 128


@pytest.mark.usefixtures("study")
def test_a_directory_has_branches_of_one_parent(capsys):
    file = Path("parent/manifest.json")
    write_json(file, read_json(file) | {"wandb_id": "another"})
    assert branch("--at", "3", "sync.lag=1") == 2
    assert "--out out has branches of " in capsys.readouterr().err


@pytest.mark.usefixtures("study")
def test_a_branch_without_its_start_is_refused(capsys):
    directory = CONTROL / "1"
    (start,) = (directory / "start").iterdir()
    start.write_bytes(start.read_bytes()[:-1])
    assert reproduce.main([str(directory), "--out", "again"]) == 2
    assert "no checkpoint to load in out/update-3/control/1/start" in capsys.readouterr().err
    assert not Path("again").exists()


def test_an_interrupted_command_starts_no_further_branch():
    parent()
    arguments = ["branch", "parent", "--at", "3", "--repeats", "500", "--out", "out", "sync.lag=1"]
    command = Popen([sys.executable, "-m", "harness.command", *arguments], start_new_session=True)
    first = Path("out/update-3/control/1")
    try:
        wait_until(lambda: (first / "summary.json").is_file(), command)
        command.send_signal(signal.SIGINT)
        assert command.wait(120) == 130
    finally:
        command.kill()
        command.wait()
    states = [read_json(file)["state"] for file in first.parent.glob("*/status.json")]
    assert len(states) < 500
    assert set(states) <= {"done", "interrupted"}


def test_refine_adds_a_moment_where_the_answer_changes(capsys):
    """Without learning from update 1 on the score is low; one update less at the end is nothing."""
    learning = ("env.id=tests.harness.threshold:Threshold-v0", "algo.learning_rate=0.003")
    parent(*learning, "algo.epochs=4", "algo.gamma=0", "evaluation.num_episodes=20")
    arguments = ["parent", "--import-env", "--at", "1,7", "--refine", "1", "--repeats", "3"]
    assert main([*arguments, "--out", "out", "algo.learning_rate=1e-9"]) == 0
    out = capsys.readouterr().out
    assert "the answer changes between updates 1 and 7" in out
    assert "6 branches in out" in out
    states = [
        read_json(file)["state"] for file in Path("out").glob("update-[147]/*/[123]/status.json")
    ]
    assert states == 18 * ["done"]
    assert "algo.learning_rate=1e-9 scores lower than the control after update" in out
    assert Path("out/report/figures/fans-4.svg").is_file()


@pytest.fixture
def small_disk(here: Path) -> Iterator[Callable[[int], None]]:
    """`out` in the current folder is a disk of its own; what is called sets its size in KiB."""
    Path("out").mkdir()

    def mount(*options: str) -> int:
        return subprocess.run(["mount", "-t", "tmpfs", *options, "lockstep", "out"]).returncode

    if mount("-o", "size=4k"):
        pytest.skip("needs the right to mount a disk")
    yield lambda size: mount("-o", f"remount,size={size}k")
    subprocess.run(["umount", "out"], check=True)


def test_on_a_full_disk_branches_stop_and_go_on_once_there_is_room(small_disk, capsys):
    parent()
    arguments = ("--at", "3,5", "--repeats", "2", "sync.lag=1")
    assert branch(*arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "branch: --at 3: the repetition did not reach this update: it could print nothing: the "
        "disk of out is full"
    )
    small_disk(280)
    assert branch(*arguments) == 1
    out, err = capsys.readouterr()
    assert "No space left on device" in out
    assert re.search(r"stopped: \d+ KB are left on the disk of out, and a branch needs \d+;", out)
    assert not err
    assert len(list(Path("out").glob("update-*/*/*/status.json"))) < 8
    small_disk(4096)
    assert branch(*arguments) == 0
    assert "repeating" not in capsys.readouterr().out  # the states were there
    states = [read_json(file)["state"] for file in Path("out").glob("update-*/*/[12]/status.json")]
    assert states == 8 * ["done"]


def test_all_random_streams_of_a_start_follow_from_the_seed():
    parent("collector=multi_sync", "collector.num_workers=2")
    _, state = Checkpoints(Path("parent/checkpoints")).load()
    config = config_of(*LONGER, "collector=multi_sync", "collector.num_workers=2")
    config.seed = 5
    one, same = (with_new_streams(state, config) for _ in range(2))
    config.seed = 6
    other = with_new_streams(state, config)

    def streams(state: dict[str, Any]) -> list[list[Any]]:
        workers = state["collector"]["workers"]
        return [
            *(
                [w["streams"]["torch"].tolist(), w["streams"]["numpy"], w["actions"]]
                for w in workers
            ),
            *([w["environments"]["next_seeds"]] for w in workers),
            [state["streams"]["torch"].tolist(), state["streams"]["python"]],
            [state["learner"]["algorithm"]["generator"].tolist()],
        ]

    assert streams(one) == streams(same)
    for a, b in zip(streams(one), streams(other), strict=True):
        assert all(left != right for left, right in zip(a, b, strict=True))
    first, second = streams(one)[:2]
    assert all(left != right for left, right in zip(first, second, strict=True))


def test_a_run_that_is_no_branch_has_no_origin():
    assert branch_of(stored_parent()) is None


@pytest.mark.parametrize("vectorisation", ["sync", "none"])
def test_episodes_under_way_go_on_and_the_next_ones_have_the_new_seeds(vectorisation):
    """The first episodes of two branches are one; then each seed has its own."""

    def courses(state: dict[str, Any], seeds: list[int]) -> list[list[float]]:
        environments = made_environments(vectorisation)
        assert environments.load_state_dict({**state, "next_seeds": seeds}).is_exact
        before = [array.copy() for array in environments.current]
        environments.reset()
        return [*(array.tolist() for array in before + environments.current)]

    environments = made_environments(vectorisation)
    count = environments.num_envs
    environments.reset(seeds=list(range(count)))
    state = environments.state_dict()
    one, same, other = (courses(state, [seed + i for i in range(count)]) for seed in (5, 5, 50))
    assert one == same
    assert one[0] == other[0] == state["current"][0].tolist()
    assert one[1] != other[1]


def made_environments(vectorisation: str) -> Environments:
    count = 1 if vectorisation == "none" else 2
    factory = EnvFactory(EnvConfig(num_envs=count, vectorisation=vectorisation))
    return make_environments(factory, {}, RolloutOptions(), worker_idx=0, seed=0)

"""Runs find their setting by what differs between them, and seeds their replicates."""

from __future__ import annotations

from typing import Any

from harness.report.design import make_design
from harness.report.runs import Run, to_tables
from harness.report.settings import SOURCE, Plan
from harness.report.settings import arrange as arranged

BASE = {"algo.name": "ppo", "env.id": "E", "sync.name": "a", "collector.name": "c", "seed": 1}


def run(name: str = "run", state: str = "done", source: str = "sweep", **options: Any) -> Run:
    own = BASE | {key.replace("__", "."): value for key, value in options.items()}
    return Run(name, source, state=state, seed=own["seed"], options=own)


def arrange(runs: list[Run], *, by_source: bool = False) -> Plan:
    return arranged(to_tables(runs).runs, by_source=by_source)


def labels(plan: Plan) -> list[str]:
    return [label for task in plan.tasks for label in plan.labels(task)]


def seeds(plan: Plan) -> dict[str, list[int]]:
    """Setting → the seeds of the runs that count."""
    (task,) = plan.tasks
    return plan.counted(task).groupby("setting")["seed"].apply(list).to_dict()


def test_runs_that_differ_in_their_seed_alone_are_one_setting():
    plan = arrange([run(seed=1), run(seed=2)])
    assert seeds(plan) == {"all runs": [1, 2]}
    assert plan.differing == {"seed": ["1", "2"]}


def test_seeds_of_parts_make_no_settings_either():
    plan = arrange([run(seed=seed, sync__link__seed=seed) for seed in (1, 2)])
    assert seeds(plan) == {"all runs": [1, 2]}
    assert plan.differing == {"seed": ["1", "2"]}
    plan = arrange([run(sync__link__seed=1), run(seed=2, sync__link__seed=3)])
    assert labels(plan) == ["all runs"]
    assert plan.differing == {"seed": ["1", "2"], "sync.link.seed": ["1", "3"]}


def test_replays_of_a_recording_for_each_seed_are_one_setting():
    runs = [
        run(algo__objective=objective, seed=seed, collector__replay=f"outputs/recorded/seed={seed}")
        for objective in ("behaviour", "decoupled")
        for seed in (1, 11)
    ]
    plan = arrange(runs)
    assert labels(plan) == ["objective=behaviour", "objective=decoupled"]
    assert plan.common["collector.replay"] == "outputs/recorded/seed=${seed}"


def test_parts_are_called_by_their_names_and_options_with_theirs():
    plan = arrange([run(), run(sync__name="b"), run(sync__name="b", sync__interval=4)])
    assert labels(plan) == ["a · interval=(not set)", "b · interval=4", "b · interval=(not set)"]


def test_an_option_of_several_kinds_is_one_option():
    two = {"sync.lag.kind": "two_point", "sync.lag.low": 0, "sync.lag.high": 16}
    plan = arrange([run(sync__lag=8), run(sync__lag="null"), run(**two)])
    assert labels(plan) == ["lag=8", "lag=null", "lag=two_point(0, 16)"]
    plan = arrange([run(**two), run(sync__lag__kind="geometric", sync__lag__mean=2)])
    assert labels(plan) == ["lag=geometric(2)", "lag=two_point(0, 16)"]
    plan = arrange([run(**two), run(**two | {"sync.lag.high": 8})])
    assert labels(plan) == ["high=8", "high=16"]


def test_a_name_holds_every_option_in_which_settings_differ():
    runs = [
        run(collector__num_workers=1, total_frames=10),
        run(sync__name="b", collector__name="d", collector__num_workers=2, total_frames=20),
    ]
    assert labels(arrange(runs)) == [
        "a · c · num_workers=1 · total_frames=10",
        "b · d · num_workers=2 · total_frames=20",
    ]


def test_an_option_that_only_some_parts_have_is_named_where_it_distinguishes():
    runs = [run(sync__zero_copy=False), run(sync__name="b")]
    assert labels(arrange(runs)) == ["a", "b"]
    assert "sync.zero_copy" in arrange(runs).differing
    assert arrange(runs).implied == {"sync.zero_copy"}
    runs.append(run(sync__zero_copy=True))
    assert labels(arrange(runs)) == [
        "a · zero_copy=false",
        "a · zero_copy=true",
        "b · zero_copy=(not set)",
    ]
    assert arrange(runs).implied == set()


def test_options_of_one_last_name_are_told_apart():
    runs = [
        run(sync__max_lag=a, algo__max_lag=b, seed=a) for a, b in ((1, 1), (1, 2), (2, 1), (2, 2))
    ]
    assert "sync.max_lag=1 · algo.max_lag=2" in labels(arrange(runs)) or (
        "algo.max_lag=2 · sync.max_lag=1" in labels(arrange(runs))
    )


def test_values_are_sorted_as_numbers():
    runs = [run(sync__interval=n) for n in (10, 9, 100)]
    assert labels(arrange(runs)) == ["interval=9", "interval=10", "interval=100"]
    assert arrange(runs).differing == {"sync.interval": ["9", "10", "100"]}


def test_loggers_and_checkpoints_make_no_setting():
    plan = arrange([run(logger__wandb__mode="offline"), run(seed=2, checkpoint__keep=9, name_=1)])
    assert "logger.wandb.mode" in plan.differing
    assert labels(arrange([run(), run(logger__wandb__tags="[x]", checkpoint__keep=9)])) == [
        "all runs"
    ]


def test_environments_and_algorithms_are_tasks_of_their_own():
    plan = arrange([run(), run(env__id="F"), run(algo__name="sac")])
    assert plan.tasks == ["ppo on E", "ppo on F", "sac on E"]


def test_what_differs_between_tasks_alone_is_left_to_their_names():
    plan = arrange([run(total_frames=1), run(algo__name="sac", total_frames=2, algo__tau=3)])
    assert plan.differing == {"algo.name": ["ppo", "sac"]}


def test_of_two_finished_runs_of_a_seed_the_later_counts_and_the_other_is_named():
    old, new = run("old"), run("new")
    old.manifest = {"started": "2020-01-01"}
    new.manifest = {"started": "2020-01-02"}
    for order in ([old, new], [new, old]):
        plan = arrange(order)
        assert list(plan.counted("ppo on E")["name"]) == ["new"]
        (note,) = plan.notes
        assert note.startswith("old is left out: new ran")


def test_unfinished_runs_belong_to_a_setting_but_are_not_done():
    plan = arrange([run(), run(seed=2, state="failed")])
    assert list(plan.runs["setting"]) == ["all runs", "all runs"]
    assert seeds(plan) == {"all runs": [1]}


def test_runs_without_a_config_are_in_no_setting_and_are_mentioned():
    lost = Run("lost", "sweep")
    plan = arrange([run(), lost])
    assert plan.notes == ["Without a readable config, so in no setting: 1 of 2 runs"]
    assert arrange([lost]).tasks == []


def test_sweeps_are_kept_apart_where_they_are_to_be_compared():
    runs = [run(source="x"), run(source="y")]
    assert labels(arrange(runs)) == ["all runs"]
    plan = arrange(runs, by_source=True)
    assert labels(plan) == ["x", "y"]
    assert plan.differing[SOURCE] == ["x", "y"]


def test_an_environments_own_seed_makes_settings_unless_it_is_the_runs():
    runs = [run(seed=seed, env__kwargs__level_seed=level) for level in (7, 8) for seed in (1, 2)]
    plan = arrange(runs)
    assert labels(plan) == ["level_seed=7", "level_seed=8"]
    assert seeds(plan) == {"level_seed=7": [1, 2], "level_seed=8": [1, 2]}
    assert plan.notes == []
    assert make_design(plan, "env.kwargs.level_seed", None, None).values == ["7", "8"]
    same = arrange([run(seed=seed, env__kwargs__level_seed=seed) for seed in (1, 2)])
    assert labels(same) == ["all runs"]


def test_an_option_that_another_one_sets_is_not_named_beside_it():
    runs = [run(sync__max_lag=lag, algo__max_lag=lag) for lag in (4, None)]
    plan = arrange(runs)
    assert labels(plan) == ["max_lag=4", "max_lag=null"]
    assert plan.differing.keys() == {"sync.max_lag"}
    plan = arrange([*runs, run(sync__max_lag=4, algo__max_lag=8)])  # somebody set it
    assert plan.differing.keys() == {"sync.max_lag", "algo.max_lag"}


def test_an_objective_with_options_is_named_as_it_is_typed():
    weight = {"algo.objective.decoupled.weight_cap": 2, "algo.objective.decoupled.other": 1}
    plan = arrange([run(algo__objective="behaviour"), run(algo__objective="x"), run(**weight)])
    assert labels(plan) == [
        "objective=behaviour",
        "objective=x",
        "objective={decoupled:{weight_cap:2,other:1}}",
    ]
    assert plan.differing.keys() == {"algo.objective"}


def test_a_replay_beside_its_recording_is_named_by_what_it_changes():
    unused = {"collector.costs.step_ms": 1.0, "collector.network.topology": "star", "logger": "{}"}
    replay = {"collector.name": "simulated", "collector.replay": "a/seed=1"} | unused
    plan = arrange([run(algo__objective="a"), run(**replay, algo__objective="b")])
    assert labels(plan) == ["c · objective=a", "simulated · objective=b"]

"""Reports on runs of other programs: what is read of their logs, and what is refused."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import textwrap
from pathlib import Path

import pytest

from harness.report import main
from harness.report.import_runs import PRESETS, import_runs, read_mapping
from harness.report.runs import Run

SAMPLES = Path(__file__).with_name("samples")
SEEDED = {  # what the logs do not say of themselves
    "sb3": 'path: "seed{seed}"\noptions: {algo.name: ppo, env.id: CartPole-v1}',
    "torchrl": 'path: "{algo.name}_seed{seed}_{env.id}_{_}"',
    "verl": 'path: "{env.id}_seed{seed}"',
    "prime-rl": 'path: "seed{seed}"\noptions: {env.id: sorting}',
}


def imported(tmp_path: Path, preset: str, place: Path | None = None, more: str = "") -> list[Run]:
    """The runs of a sample, or of another place, by a preset and what a person adds to it."""
    text = "\n".join([f"preset: {preset}", more or SEEDED.get(preset, "")])
    return import_runs(place or SAMPLES / preset, mapping(tmp_path, text))


def mapping(tmp_path: Path, text: str):
    (tmp_path / "map.yaml").write_text(textwrap.dedent(text))
    return read_mapping(str(tmp_path / "map.yaml"))


def test_every_preset_has_a_sample_and_is_named_in_the_help_and_on_the_page(capsys):
    page = Path(__file__).parents[3].joinpath("docs/report.md").read_text()
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    for name in PRESETS:
        assert (SAMPLES / name).is_dir()
        assert name in shown
        assert f"`{name}`" in page


def test_cleanrls_files_say_all_that_a_report_needs(tmp_path):
    one, two = import_runs(SAMPLES / "cleanrl", read_mapping("cleanrl"))
    assert (one.seed, two.seed) == (1, 2)
    assert one.state == "done"
    assert one.options["framework"] == "CleanRL"
    assert one.options["env.id"] == "CartPole-v1"
    assert one.options["algo.name"] == "ppo"
    assert one.options["algo.learning_rate"] == 0.00025
    assert "exp_name" not in one.options
    returns = one.records["episode/return"].dropna()
    assert len(returns) > 50  # one for each step at which episodes ended
    assert returns.between(1, 500).all()
    assert one.records["step"].is_monotonic_increasing
    assert one.records["step"].max() <= 2048
    assert one.summary["episode/return"] == returns.iloc[-1]


def test_every_setting_of_cleanrls_ppo_has_lockstep_s_name_or_is_left_out(tmp_path):
    """The samples have all settings of its ppo.py; a name without a dot would be CleanRL's own."""
    from harness.algorithms.ppo import PPOConfig

    one, _ = import_runs(SAMPLES / "cleanrl", read_mapping("cleanrl"))
    own = {name for name in one.options if "." not in name}
    assert own == {"framework", "seed", "total_frames"}
    known = {field.name for field in dataclasses.fields(PPOConfig)}
    algo = {name.removeprefix("algo.") for name in one.options if name.startswith("algo.")}
    assert algo <= known
    assert len(algo) == 14
    assert one.options["algo.clip"] == 0.2
    assert one.options["algo.epochs"] == 4
    assert one.options["algo.target_kl"] is None
    assert one.options["algo.anneal_learning_rate"] is True
    assert one.options["collector.frames_per_batch"] == 512
    assert one.options["algo.minibatch_size"] == 128


def test_a_setting_without_a_name_of_lockstep_s_keeps_its_own(tmp_path):
    """Which the comparison with other settings needs."""
    (tmp_path / "map.yaml").write_text("preset: cleanrl\nignore: []")
    one, _ = import_runs(SAMPLES / "cleanrl", read_mapping(str(tmp_path / "map.yaml")))
    assert one.options["num_minibatches"] == 4


def test_sb3s_csv_json_and_tensorboard_files_hold_the_same_run(tmp_path):
    csv = imported(tmp_path, "sb3")
    as_json = imported(tmp_path, "sb3", more=SEEDED["sb3"] + "\nfiles: progress.json")
    events = imported(
        tmp_path, "sb3", more=SEEDED["sb3"] + '\nfiles: "*tfevents*"\nstep: step\ntime: time'
    )
    for runs in (csv, as_json, events):
        assert [run.seed for run in runs] == [1, 2]
        assert [run.options["framework"] for run in runs] == ["stable-baselines3"] * 2
        assert runs[0].records["step"].tolist() == [512, 1024, 1536, 2048]
    for one, other, third in zip(csv, as_json, events, strict=True):
        expected = one.records["episode/return"].tolist()
        assert other.records["episode/return"].tolist() == expected
        assert third.records["episode/return"].tolist() == pytest.approx(expected, rel=1e-6)


def test_torchrls_csv_logger_keeps_a_file_for_each_metric(tmp_path):
    dqn, one, two = imported(tmp_path, "torchrl")
    assert [run.seed for run in (dqn, one, two)] == [1, 1, 2]
    assert (dqn.options["algo.name"], dqn.options["env.id"]) == ("DQN", "CartPole-v1")
    assert dqn.records["episode/return"].iloc[0] == 20.8125
    assert one.options["env.id"] == "Pendulum-v1"
    assert one.records["step"].tolist() == [1024.0 * n for n in range(1, 9)]
    assert one.records["episode/return"].iloc[0] == pytest.approx(-1077.9357)
    assert one.summary["eval/return"] == pytest.approx(-1192.3337)


def test_settings_that_torchrls_logger_was_given_are_options(tmp_path):
    (tmp_path / "one/texts").mkdir(parents=True)
    (tmp_path / "one/scalars/train").mkdir(parents=True)
    (tmp_path / "one/texts/hparams0.txt").write_text(
        "env.env_name: CartPole-v1\noptim.lr: 0.0003\nseed: 1"
    )
    (tmp_path / "one/scalars/train/reward.csv").write_text("512,21.0\n1024,31.0\n")
    more = "options: {algo.name: ppo}\nsettings: {env.env_name: env.id}"
    (run,) = imported(tmp_path, "torchrl", tmp_path / "one", more)
    assert (run.seed, run.options["env.id"], run.options["optim.lr"]) == (1, "CartPole-v1", 0.0003)


@pytest.mark.parametrize(("preset", "lag"), [("verl", 2.4), ("prime-rl", 2.0)])
def test_logs_of_language_model_trainers_have_staleness(preset, lag, tmp_path):
    one, two = imported(tmp_path, preset)
    assert (one.seed, two.seed) == (1, 2)
    assert one.options["algo.name"] == "grpo"
    assert one.records["policy/lag_mean"].iloc[-1] == pytest.approx(lag)
    assert one.summary["policy/lag_max"] == one.records["policy/lag_max"].max()
    assert one.summary["policy/dropped"] == one.records["policy/dropped"].sum()
    assert one.records["episode/return"].notna().all()


def test_an_export_of_a_wandb_chart_holds_several_runs(tmp_path):
    """In the layout of the export in W&B's interface, which no command makes."""
    columns = ["global_step"]
    for metric in ("cart__1 - charts/return", "cart__2 - charts/return"):
        columns += [metric, f"{metric}__MIN", f"{metric}__MAX"]
    rows = ["100,10,10,10,,,", "120,,,,11,11,11", "200,20,20,20,,,"]
    (tmp_path / "wandb_export.csv").write_text("\n".join([",".join(columns), *rows]))
    text = 'metrics: {episode/return: charts/return}\npath: "{env.id}__{seed}"'
    one, two = import_runs(tmp_path / "wandb_export.csv", mapping(tmp_path, text))
    assert (one.seed, two.seed) == (1, 2)
    assert one.options == {"env.id": "cart", "seed": 1}
    assert one.records.to_dict("list") == {"step": [100, 200], "episode/return": [10, 20]}
    assert two.records.to_dict("list") == {"step": [120], "episode/return": [11]}


def test_runs_of_one_name_in_an_export_of_a_wandb_chart_are_all_read(tmp_path):
    columns = ["Step"]
    for metric in ("cart - return", "cart - return", "other - return"):
        columns += [metric, f"{metric}__MIN", f"{metric}__MAX"]
    rows = ["100,10,10,10,50,50,50,1,1,1", "200,20,20,20,60,60,60,2,2,2"]
    (tmp_path / "wandb_export.csv").write_text("\n".join([",".join(columns), *rows]))
    text = "metrics: {episode/return: return}"
    runs = import_runs(tmp_path / "wandb_export.csv", mapping(tmp_path, text))
    assert [run.records["episode/return"].tolist() for run in runs] == [[10, 20], [50, 60], [1, 2]]
    names = ("cart", "cart (2)", "other")
    assert [run.name for run in runs] == [f"wandb_export.csv/{name}" for name in names]


def test_a_table_with_a_dash_in_the_name_of_a_column_is_no_export_of_a_chart(tmp_path):
    (tmp_path / "log.csv").write_text("step,return - mean\n100,10\n200,20\n")
    text = "metrics: {episode/return: return - mean}"
    (run,) = import_runs(tmp_path / "log.csv", mapping(tmp_path, text))
    assert run.records["episode/return"].tolist() == [10, 20]


def test_runs_of_one_name_have_the_seed_that_their_name_says(tmp_path):
    metric = "cart_1 - return"
    header = ",".join(["Step", *[metric, f"{metric}__MIN", f"{metric}__MAX"] * 2])
    (tmp_path / "wandb_export.csv").write_text(f"{header}\n100,1,1,1,2,2,2\n")
    text = 'metrics: {episode/return: return}\npath: "{env.id}_{seed}"'
    runs = import_runs(tmp_path / "wandb_export.csv", mapping(tmp_path, text))
    assert [(run.seed, run.options["env.id"]) for run in runs] == [(1, "cart")] * 2


def test_an_infinite_value_of_a_log_is_no_value(tmp_path):
    (tmp_path / "log.csv").write_text("step,score\n100,1\n200,inf\n300,3\n")
    (run,) = import_runs(
        tmp_path / "log.csv", mapping(tmp_path, "metrics: {episode/return: score}")
    )
    assert run.records["episode/return"].tolist() == pytest.approx([1, math.nan, 3], nan_ok=True)
    assert run.summary["episode/return"] == 3


def test_a_cut_last_line_of_a_log_is_left_out_with_a_word(tmp_path):
    whole = '{"step": 100, "score": 1}\n{"step": 200, "score": 2}\n'
    (tmp_path / "log.jsonl").write_text(f'{whole}{{"step": 300, "sc')
    meaning = mapping(tmp_path, "metrics: {episode/return: score}")
    (run,) = import_runs(tmp_path / "log.jsonl", meaning)
    assert run.records["episode/return"].tolist() == [1, 2]
    assert run.problems[0] == "log.jsonl: its last line is cut off and was left out"
    (tmp_path / "log.jsonl").write_text(f'{{"step": 1\n{whole}')
    with pytest.raises(ValueError, match="line 1: not JSON"):
        import_runs(tmp_path / "log.jsonl", meaning)


def test_the_verdict_says_that_stable_baselines3_logs_trailing_means(tmp_path, capsys):
    (tmp_path / "map.yaml").write_text(f"preset: sb3\n{SEEDED['sb3']}")
    arguments = ["--import", str(SAMPLES / "sb3"), "--map", str(tmp_path / "map.yaml")]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    verdict = (tmp_path / "out" / "report.md").read_text().partition("## What was run")[0]
    assert "are means over its last 100 episodes" in verdict
    assert "are means over its last 100" in " ".join(capsys.readouterr().out.split())


def test_a_table_of_several_runs_is_split_by_a_column(tmp_path):
    (tmp_path / "all.csv").write_text("id,frames,score\na_1,10,1\na_2,10,3\na_1,20,2\n")
    text = 'run: id\nstep: frames\nmetrics: {episode/return: score}\npath: "{_}_{seed}"'
    runs = import_runs(tmp_path / "all.csv", mapping(tmp_path, text))
    assert [(run.seed, run.records["episode/return"].tolist()) for run in runs] == [
        (1, [1, 2]),
        (2, [3]),
    ]


def test_a_run_that_stopped_before_its_frames_is_no_finished_one(tmp_path):
    more = SEEDED["sb3"][:-1] + ", total_frames: 4096}"
    (one, _) = imported(tmp_path, "sb3", more=more)
    assert (one.state, one.error) == ("interrupted", "its records end at 2048 of 4096 frames")
    text = "metrics: {episode/return: score}\noptions: {total_frames: 100}"
    for last, state in ((94, "interrupted"), (95, "done")):
        (tmp_path / "log.csv").write_text(f"step,score\n50,1\n{last},2\n")
        (run,) = import_runs(tmp_path / "log.csv", mapping(tmp_path, text))
        assert run.state == state


def test_runs_of_three_programs_are_compared_on_one_page(tmp_path, capsys):
    map_of = {}
    for preset in ("sb3", "torchrl"):
        map_of[preset] = tmp_path / f"{preset}.yaml"
        map_of[preset].write_text(f"preset: {preset}\n{SEEDED[preset]}")
    arguments = ["--import", str(SAMPLES / "cleanrl"), "--map", "cleanrl"]
    for preset, file in map_of.items():
        arguments += ["--import", str(SAMPLES / preset), "--map", str(file)]
    out = tmp_path / "report"
    assert main([*arguments, "--out", str(out)]) == 0, capsys.readouterr().err
    page = (out / "report.md").read_text()
    assert "CleanRL" in page
    assert "stable-baselines3" in page
    assert "TorchRL" in page
    assert "(not set)" not in page.split("## ")[1]  # settings have names that can be read
    assert json.loads(json.dumps(page))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("preset: sb4", "preset is 'sb4'; did you mean sb3?"),
        ("metric: {}", "there is no key 'metric'; did you mean metrics?"),
        ("metrics: reward", "metrics is 'reward', expected a dict"),
        ("preset: sb3\npath: 'run{seed}'", "does not end like path, 'run{seed}'"),
        (
            "preset: sb3\nmetrics: {episode/return: rollout/reward}",
            "progress.csv has no column rollout/reward, which is episode/return; it has ",
        ),
        (
            "preset: sb3\nmetrics: {episode/return: 'rollout/*'}",
            "episode/return may be rollout/ep_len_mean or rollout/ep_rew_mean; name one of them",
        ),
        ("preset: sb3\nfiles: '*.wandb'", "holds no file like *.wandb"),
    ],
)
def test_a_mistake_is_one_line_that_names_what_there_is(text, error, tmp_path, capsys):
    (tmp_path / "map.yaml").write_text(text)
    arguments = ["--import", str(SAMPLES / "sb3"), "--map", str(tmp_path / "map.yaml")]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 2
    shown = capsys.readouterr().err
    assert error in shown
    assert shown.count("\n") == 1


def test_imports_need_a_map_and_a_report_needs_runs(capsys, tmp_path):
    assert main(["--import", str(SAMPLES / "sb3"), "--out", str(tmp_path)]) == 2
    assert "expected one --map for all or for each" in capsys.readouterr().err
    assert main(["--import", str(SAMPLES / "sb3"), "--map", "cleanlr"]) == 2
    assert "no such file, did you mean cleanrl?" in capsys.readouterr().err
    assert main(["--import", str(tmp_path / "none"), "--map", "sb3"]) == 2
    assert "there is no such file or directory" in capsys.readouterr().err


def test_a_damaged_log_is_an_error_that_names_the_file(tmp_path, capsys):
    for name, content in {
        "a.wandb": b"no",
        "a.jsonl": b"{",
        "a.csv": b"",
        "a.json": b"[1]",
    }.items():
        (tmp_path / name).write_bytes(content)
        assert main(["--import", str(tmp_path / name), "--map", "prime-rl"]) == 2
        assert str(tmp_path / name) in capsys.readouterr().err


def logs(folder: Path, level: float, *names: str) -> Path:
    """A log for each name, whose returns rise to a level."""
    folder.mkdir()
    for number, name in enumerate(names):
        rows = [f"{100 * n},{level * n / 5 + number / 10}" for n in range(1, 6)]
        (folder / f"{name}.csv").write_text("\n".join(["step,score", *rows]))
    return folder


MAP = """
    metrics: {episode/return: score}
    path: "clip{algo.clip}-{seed}"
    options: {algo.name: ppo, env.id: CartPole-v1}
"""


def test_other_programs_are_compared_with_lockstep_setting_by_setting(tmp_path, capsys):
    arguments = []
    for program, level in (("Another", 50.0), ("Lockstep", 40.0)):
        names = [f"clip{clip}-{seed}" for clip in (0.1, 0.2) for seed in (1, 2, 3)]
        place = logs(tmp_path / program, level, *names)
        (tmp_path / f"{program}.yaml").write_text(textwrap.dedent(MAP) + f"framework: {program}\n")
        arguments += ["--import", str(place), "--map", str(tmp_path / f"{program}.yaml")]
    for more in ([], ["--x", "framework"]):
        assert main([*arguments, *more, "--out", str(tmp_path / "out")]) == 0
        with (tmp_path / "out" / "data" / "comparisons.csv").open(newline="") as stream:
            rows = [row for row in csv.DictReader(stream) if row["metric"] == "mean episode/return"]
        assert {(row["setting"], row["baseline"]) for row in rows} == {
            (f"clip={clip} · Another", f"clip={clip} · Lockstep") for clip in (0.1, 0.2)
        }


def test_a_program_with_another_name_for_the_environment_is_said_to_be_alone(tmp_path, capsys):
    arguments = []
    for program, env in (("Another", "Cart"), ("Lockstep", "CartPole-v1")):
        place = logs(tmp_path / program, 50.0, "clip0.1-1", "clip0.1-2")
        text = textwrap.dedent(MAP).replace("CartPole-v1", env) + f"framework: {program}\n"
        (tmp_path / f"{program}.yaml").write_text(text)
        arguments += ["--import", str(place), "--map", str(tmp_path / f"{program}.yaml")]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Not compared with other programs: ppo on Cart has runs of Another alone." in shown

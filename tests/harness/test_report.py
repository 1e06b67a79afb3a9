"""The whole command: what it writes, what it survives and what it refuses."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
import pytest

from harness.report import main
from harness.report.document import _provenance, _what_was_run
from harness.report.drawing import LONGEST_LABEL, shown
from harness.report.pages import MOST_ITEMS, Table, plain, to_text
from harness.report.runs import read_runs
from harness.report.scores import WANTED, analyse
from harness.report.settings import arrange
from harness.report.tables import cell_text
from tests.harness.report.synthetic import HOSTILE, make_run, make_sweep
from tests.harness.small import ROOT

GOLDEN = Path(__file__).with_name("report") / "golden" / "report.md"
FIGURES = ("scores", "learning-frames", "learning-seconds", "throughput")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a sweep in which everything happened at once."""
    root = tmp_path_factory.mktemp("report") / "sweep"
    schemes = {"shared_mem": 100, "hogwild": 20}
    make_sweep(root, schemes=schemes, seeds=range(1, 6), evaluated=True)
    make_run(root / "hostile", scheme=HOSTILE, seed=1, level=50, evaluated=True)
    make_run(root / "failed", seed=8, state="failed", error=f"RuntimeError: {HOSTILE}")
    make_run(root / "interrupted", seed=9, state="interrupted", host="a-private-host")
    cut = make_run(root / "cut", seed=10, evaluated=True)
    with (cut / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 21')
    (cut / "summary.json").unlink()
    (root / "lost").mkdir()
    assert main([str(root), "--baseline", "shared_mem", "--out", str(root / "report")]) == 0
    return root / "report"


class Page(HTMLParser):
    """Tags, addresses and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [v or "" for k, v in attrs if k in ("src", "href", "srcset", "action")]
        assert not [k for k, _ in attrs if k.startswith("on")]

    def handle_data(self, data: str) -> None:
        if data.strip() and self.tags[-1] != "style":
            self.texts.append(data.strip())


@pytest.mark.parametrize(
    ("module", "large"),
    [
        ("harness.report", ["numpy", "scipy", "matplotlib", "gymnasium", "pandas"]),  # --help
        ("harness.report.make", ["torch", "sync", "collectors", "scipy.stats", "wandb"]),
        ("harness.reproduce", ["pandas", "scipy", "matplotlib"]),
    ],
)
def test_a_report_imports_nothing_large_that_it_does_not_need(module, large):
    code = f"import sys, {module}; print(set({large}) & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "set()\n"


def test_the_page_needs_nothing_but_itself(report):
    text = (report / "report.html").read_text()
    page = Page(text)
    assert not {"script", "iframe", "object", "embed", "form"} & set(page.tags)
    assert all(address.startswith(("data:", "#")) for address in page.addresses)
    assert "@import" not in text
    assert "url(" not in text
    assert "default-src 'none'" in text


def test_what_came_from_files_is_shown_and_not_obeyed(report):
    page = Page((report / "report.html").read_text())
    assert any('<script>alert("x")</script>' in text for text in page.texts)
    assert "[b](http" not in (report / "report.md").read_text()
    assert "<script" not in (report / "report.md").read_text()


def test_every_word_and_number_is_that_of_the_report_that_was_read_by_a_person(report):
    """If a change is meant, copy report.md, which the error names, to golden/report.md."""
    found = report / "report.md"
    assert found.read_text() == GOLDEN.read_text(), found


def test_the_page_says_what_the_markdown_says(report):
    words = (report / "report.md").read_text().replace("\\", "")
    for text in Page((report / "report.html").read_text()).texts:
        assert plain(text).replace("\\", "") in words


def test_the_page_is_made_for_phones_dark_screens_and_paper(report):
    text = (report / "report.html").read_text()
    assert 'name="viewport"' in text
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text
    assert text.count('class="light"') == text.count('class="dark"') == len(FIGURES)


@pytest.mark.parametrize("name", FIGURES)
def test_each_figure_is_there_as_png_and_as_sound_svg(report, name):
    assert (report / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    svg = ElementTree.parse(report / "figures" / f"{name}.svg").getroot()
    assert svg.tag.endswith("svg")
    assert not list(svg.iter("{http://www.w3.org/2000/svg}script"))
    assert f"figures/{name}.png" in (report / "report.md").read_text()


def test_provenance_has_versions_hardware_commit_and_command_but_nobody(report):
    text = (report / "report.html").read_text()
    for fact in ("0123abcd", "Abacus", "python run.py --multirun sync=a,b"):
        assert fact in text
    assert "private" not in text


def rows(report: Path, name: str) -> list[dict[str, str]]:
    with (report / "data" / name).open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_every_number_is_in_a_csv(report):
    runs = rows(report, "runs.csv")
    assert len(runs) == 15
    counted = [run for run in runs if run["counted"] == "True"]
    assert len(counted) == 12
    summary = json.loads((report.parent / "sync=hogwild,seed=1" / "summary.json").read_text())
    own = next(run for run in runs if run["run"].endswith("sync=hogwild,seed=1"))
    assert float(own["eval/return"]) == summary["eval/return"]
    assert own["seed"] == "1"
    assert {row["measure"] for row in rows(report, "results.csv")} == {
        *("mean", "median", "iqm", "gap")
    }
    assert {row["axis"] for row in rows(report, "curves.csv")} == {"frames", "seconds"}
    names = ("comparisons", "options")
    assert all(rows(report, f"{name}.csv") for name in names)


def test_made_again_it_is_the_same_to_the_byte(report, tmp_path):
    arguments = [str(report.parent), "--baseline", "shared_mem", "--out", str(tmp_path / "again")]
    settings = dict(matplotlib.rcParams)
    assert main(arguments) == 0
    assert dict(matplotlib.rcParams) == settings
    first, second = (
        {file.relative_to(root): file.read_bytes() for file in root.rglob("*") if file.is_file()}
        for root in (report, tmp_path / "again")
    )
    assert first == second


def test_a_single_damaged_run_still_makes_a_report(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "status.json").write_text("{")
    assert main([str(tmp_path / "run")]) == 0
    text = (tmp_path / "run" / "report" / "report.html").read_text()
    assert "status.json is damaged" in text


def test_without_a_finished_run_the_report_opens_with_what_went_wrong(tmp_path):
    for scheme in ("a", "b"):
        make_run(tmp_path / scheme, scheme=scheme, state="failed", error="ValueError: no such ice")
    assert main([str(tmp_path)]) == 0
    text = (tmp_path / "report" / "report.md").read_text()
    verdict = text.partition("## What was run")[0]
    assert "No run has finished" in verdict
    assert "cannot be told" not in verdict
    assert text.count("ValueError: no such ice") == 1


def test_runs_too_short_for_a_score_are_not_said_to_be_unfinished(tmp_path):
    for seed in (1, 2):
        directory = make_run(tmp_path / str(seed), seed=seed)
        for name, text in (("metrics.jsonl", ""), ("summary.json", '{"frames": 10}')):
            (directory / name).write_text(text)
    assert main([str(tmp_path)]) == 0
    text = (tmp_path / "report" / "report.md").read_text()
    assert "No finished run has a score" in text
    assert "No run has finished" not in text


def test_an_environment_that_is_wrapped_is_shown_so(tmp_path):
    env = {"id": "CartPole-v1", "wrappers": ["sticky_action"], "max_episode_steps": None}
    for seed in (1, 2):
        make_run(tmp_path / str(seed), seed=seed, env=env | {"kwargs": {"sutton": True}})
    assert main([str(tmp_path)]) == 0
    text = (tmp_path / "report" / "report.md").read_text().replace("\\", "")
    assert re.search(r"env.wrappers \| .*sticky_action", text)
    assert "| env.kwargs.sutton | true |" in text
    assert "max_episode_steps" not in text


def test_sweeps_side_by_side(tmp_path):
    for name, level in (("old", 50), ("new", 70)):
        make_sweep(tmp_path / name, schemes={"a": level})
    places = [str(tmp_path / "old"), str(tmp_path / "new")]
    assert main(["--compare", *places, "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "report.md").read_text()
    assert "new is higher than old (difference " in text
    assert "higher than old" in text


def test_watching_ends_with_the_last_running_run(tmp_path, monkeypatch):
    directory = make_run(tmp_path / "run", state="running")
    pauses = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        status = json.loads((directory / "status.json").read_text())
        (directory / "status.json").write_text(json.dumps(status | {"state": "done"}))

    monkeypatch.setattr("harness.report.time.sleep", pause)
    assert main([str(tmp_path), "--watch", "3"]) == 0
    assert pauses == [3]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nowhere"], "nowhere is not there"),
        (["."], "no run in"),
        (["run", "--baseline", "x"], "--baseline is 'x'; known: all runs"),
        (["run", "--compare"], "--compare got 1 directory, expected 2 or more"),
        (["run", "run", "--compare", "--baseline", "x"], "--compare takes no --baseline"),
        (["run", "--compare", "run", "--baseline", "x"], "--compare takes no --baseline"),
        (["run", "--out", "file/below"], "file"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(tmp_path, monkeypatch, capsys, arguments, complaint):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    if arguments[0] == "run":
        make_run(tmp_path / "run")
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("report: ")
    assert complaint in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [[], ["x", "--target", "nan"], ["x", "--watch", "0"], ["x", "--unknown"]]
)
def test_a_wrong_command_line_is_a_usage_error(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: lockstep report" in capsys.readouterr().err


def test_markdown_shows_text_as_it_is():
    assert plain("a|b *c* [d](e)") == r"a\|b \*c\* \[d\](e)"
    assert plain("1. x") == r"1\. x"
    assert plain("-99.5") == "-99.5"
    assert plain("<b>\n& x") == "&lt;b&gt; &amp; x"


@pytest.mark.parametrize(("more", "rest"), [(0, []), (1, ["and 1 more, in the report"])])
def test_a_terminal_has_the_first_items_and_rows_and_the_number_of_the_others(more, rest):
    items = [f"item {n}" for n in range(MOST_ITEMS + more)]
    lines = [*items[:MOST_ITEMS], *rest]
    assert to_text([items]).splitlines() == [f"- {line}" for line in lines]
    table = Table(["of"], [[item] for item in items])
    assert to_text([table], most_rows=MOST_ITEMS).splitlines() == ["of", *lines]


def test_cells_are_no_formulas():
    assert cell_text("=1+1") == "'=1+1"
    assert cell_text(-1.5) == "-1.5"
    assert cell_text(float("nan")) == cell_text(None) == ""


def test_long_names_in_figures_are_wrapped_and_stay_different():
    first, second = (
        shown(
            f"shared_mem · multi_async · num_workers={n} · frames_per_batch=1024 · total_frames=1"
        )
        for n in (1, 2)
    )
    assert first != second
    assert max(map(len, first.splitlines())) <= LONGEST_LABEL + 1
    assert " ".join(second.splitlines()).endswith(
        "num_workers=2 · frames_per_batch=1024 · total_frames=1"
    )
    assert len(shown("word " * 5000).splitlines()) < 10


def test_names_in_figures_are_printable_and_short():
    assert shown("a\x07b") == "a�b"
    assert shown("_hidden").strip() == "_hidden"
    assert len(shown("x" * 500)) <= LONGEST_LABEL + 1


def test_the_terminal_has_the_answer_its_table_and_the_interactions(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    for epochs, loss in ((1, 1.0), (4, 5.0)):
        for lag in (0, 8):
            for seed in range(1, 6):
                options = {
                    "sync": {"name": "a", "lag": lag},
                    "algo": {"name": "ppo", "epochs": epochs},
                }
                place = tmp_path / "runs" / f"{epochs}-{lag}-{seed}"
                make_run(place, seed=seed, level=60 - loss * lag, evaluated=True, **options)
    asked = ["--x", "sync.lag", "--hue", "algo.epochs", "--interaction", "sync.lag*algo.epochs"]
    assert main([str(tmp_path / "runs"), *asked]) == 0
    answer, table, interactions, last = capsys.readouterr().out.split("\n\n")
    assert re.fullmatch(
        r"By the return of the newest weights, 1 of 1 interaction is significant\. The largest: "
        r"changing sync.lag from 0 to 8 adds -2\d.* with algo.epochs=4 and -[45].* with "
        r"algo.epochs=1, a difference of -.* \[-.*, -.*\] \(corrected p = .*\)\.",
        answer.replace("\n", " "),
    )
    assert [line.split("  ")[0] for line in table.splitlines()] == [
        "setting",
        *(f"epochs={epochs} · sync.lag={lag}" for epochs in (1, 4) for lag in (0, 8)),
    ]
    assert "sync.lag from 0 to 8" in interactions
    assert "algo.epochs=4 less algo.epochs=1" in interactions
    assert last.endswith("report.html: 20 runs, 20 done, 0 with damaged files\n")


def test_names_from_files_cannot_move_a_terminals_cursor(tmp_path, capsys):
    for scheme in ("a\x1b[2J", "b"):
        for seed in (1, 2):
            make_run(tmp_path / f"{scheme[0]}{seed}", scheme=scheme, seed=seed)
    assert main([str(tmp_path)]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_a_report_on_one_setting_opens_with_its_learning_curve(tmp_path):
    make_run(tmp_path / "run", evaluated=True)
    assert main([str(tmp_path)]) == 0
    text = (tmp_path / "report" / "report.md").read_text()
    sentence, figure = (text.splitlines()[line] for line in (4, 6))
    assert sentence.startswith("The return of the newest weights, as a mean over training, is ")
    assert figure == "![learning-frames](figures/learning-frames.png)"
    assert text.count("figures/learning-frames.png") == 1


def test_a_share_of_a_negative_return_is_not_printed(tmp_path):
    for scheme, level in (("a", -10.0), ("b", -40.0)):
        for seed in range(5):
            make_run(tmp_path / f"{scheme}{seed}", scheme=scheme, seed=seed, level=level)
    assert main([str(tmp_path)]) == 0
    verdict = (tmp_path / "report" / "report.md").read_text().partition("## What was run")[0]
    assert re.search(r"-?\d %", verdict.replace("95 %", "")) is None
    assert "There is no margin" in verdict


def manifest(**changes: Any) -> dict[str, Any]:
    git = {"sha": "0123", "branch": "main", "diff": ""}
    return {"git": git, "python": "3.11", "command": "python run.py skip_done=false"} | changes


def provenance(*manifests: dict[str, Any]) -> tuple[dict[str, str], list[str]]:
    """The table, and the sentences below it."""
    blocks = list(_provenance(pd.DataFrame({"manifest": manifests})))
    tables = [dict(block.rows) for block in blocks if isinstance(block, Table)]
    return (tables or [{}])[0], [block for block in blocks if isinstance(block, str)]


def test_runs_that_come_from_one_place_and_from_several():
    again = "To run them anew, write `replace_done` for `skip_done` or name another `sweep=`."
    ordered = "The commands that made these runs:"
    table, texts = provenance(manifest(), manifest())
    assert table == {"commit": "0123 on main", "changes on top": "none", "python": "3.11"}
    assert texts == [ordered]
    changed = {"sha": "0123", "branch": "main", "diff": "\ndiff --git a\ndiff --git b"}
    by_hand = manifest(git=changed, command="python run.py skip_done=true")
    table, texts = provenance(manifest(), by_hand, manifest(python="3.12"))
    assert table["python"] == "3.11 (2 runs); 3.12 (1 run)"
    assert table["changes on top"].startswith("3 changed files (1 run); none (2 runs)")
    assert "differ in where they come from (changes on top, python)" in texts[0]
    assert texts[1:] == [
        "The code was not exactly a commit; each run's manifest.json holds the diff.",
        ordered,
        again,
    ]
    assert provenance({}) == (
        {},
        ["No run has a readable manifest: where they come from is not known."],
    )


def test_options_that_differ_are_those_of_one_task_if_there_are_several(tmp_path):
    for lag in (0, 4):
        for task in ("CartPole-v1", "Acrobot-v1"):
            options = {"sync": {"name": "a", "lag": lag}, "env": {"id": task}}
            make_run(tmp_path / f"{task}-{lag}", **options)
    text = "The options in which runs{} differ; all others are the same."
    for place, which in ((tmp_path, " of one task"), (tmp_path / "CartPole-v1-0", None)):
        runs, records = read_runs([place], WANTED)
        texts = list(_what_was_run(analyse(arrange(runs), records)))
        if which:
            assert texts[1] == text.format(which)
    runs, records = read_runs(sorted(tmp_path.glob("CartPole*")), WANTED)
    assert text.format("") in list(_what_was_run(analyse(arrange(runs), records)))

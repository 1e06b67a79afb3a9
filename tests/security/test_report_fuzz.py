"""Whatever a run directory holds, a report on it is written or refused in one line."""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.report import main
from harness.report.document import write
from harness.report.pages import to_html, to_markdown
from harness.report.runs import read_runs
from harness.report.scores import WANTED, analyse
from harness.report.settings import arrange
from harness.report.tables import files
from tests.harness.report.synthetic import make_run
from tests.security.test_config_fuzz import FEW

MARK = "<script>alert(1)</script>"
NASTY = [
    *(MARK, f'"><img src=x onerror={MARK}>', "javascript:alert(1)", "</pre></style>" + MARK),
    *("=cmd|' /C calc'!A0", "+1+1", "-1", "@SUM(1)", "\t=1", " =1", "\uff1d1", "a\n=1", "1;=2"),
    *("[x](http://evil.example)", "![x](http://evil.example)", "| a | b |", "# a", "```"),
    *("$\\frac{1}{0}$", "\x1b[2J", "\x00", "\ud800", "\u202egnp.exe", "${oc.env:HOME}", "x" * 5000),
]
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.floats(),
    st.integers(),
    st.sampled_from([10**300, -(10**300), 2**63, 10**4000, *NASTY]),
    st.text(max_size=8),
)
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.sampled_from(NASTY), st.text(max_size=4)), inner, max_size=3),
    ),
    max_leaves=5,
)


class Tags(HTMLParser):
    """The tags of a page, and whatever in them might do something."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.add(tag)
        for name, value in attrs:
            assert not name.startswith("on")
            if name in ("src", "href"):
                assert (value or "").startswith(("data:", "#"))


def check_html(page: str) -> None:
    tags = Tags()
    tags.feed(page)
    assert not tags.found & {"script", "iframe", "object", "embed", "form", "a:", "base"}
    page.encode()


def check_csv(text: str) -> None:
    text.encode()
    for row in csv.reader(io.StringIO(text)):
        for cell in row:
            if cell.lstrip()[:1] in tuple("=@\uff1d\uff0b\uff0d\uff20"):
                pytest.fail(f"a spreadsheet would compute {cell!r}")
            if cell.lstrip()[:1] in tuple("+-"):
                float(cell)


def report_on(places: list[Path]) -> None:
    """The whole report but for its figures, whose drawing takes most of the time."""
    runs, records = read_runs(places, WANTED)
    report = analyse(arrange(runs), records)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("harness.report.drawing.draw", lambda *args, **options: None)
        document = write(report, runs["name"][0])
    check_html(to_html(document))
    to_markdown(document, figures="figures").encode()
    for content in files(report).values():
        check_csv(content)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "run", frames=500)


def spoilt(sound: Path, folder: Path, name: str, key: str, value: Any) -> Path:
    """A copy of a sound run with one field replaced, or with one added."""
    run = Path(shutil.copytree(sound, folder / "run"))
    if name == "metrics.jsonl":
        with (run / name).open("a") as stream:
            stream.write(json.dumps({"step": 50, "time": 1.0, key: value}) + "\n")
            stream.write(json.dumps(value) + "\n")
        return run
    known = json.loads((run / name).read_text()) if name.endswith(".json") else {}
    if name == "config.yaml":
        (run / name).write_text((run / name).read_text() + json.dumps({"x": value})[1:-1] + "\n")
    else:
        (run / name).write_text(json.dumps({**known, key: value}))
    return run


KEYS = {
    "status.json": ["state", "error", "pid", "traceback", *NASTY],
    "summary.json": ["frames", "fps", "wall_s", "eval/return", "sync/bytes", *NASTY],
    "manifest.json": [
        "command",
        "git",
        "hardware",
        "packages",
        "python",
        "host",
        "started",
        "seed",
    ],
    "metrics.jsonl": ["step", "time", "episode/return", "sync/ack_ms", "time/train_s", *NASTY],
    "config.yaml": ["x"],
}
FIELDS = [(name, key) for name, keys in KEYS.items() for key in keys]


@FEW
@given(field=st.sampled_from(FIELDS), value=VALUES)
def test_any_value_of_any_field_is_reported_on(sound, tmp_path_factory, field, value):
    try:
        json.dumps(value)
    except ValueError:  # more digits than are written
        return
    folder = tmp_path_factory.mktemp("runs")
    report_on([spoilt(sound, folder, *field, value)])


@pytest.mark.parametrize("name", KEYS)
def test_every_nasty_text_in_every_file_is_shown_and_not_obeyed(sound, tmp_path, name):
    nested = {key: value for key in NASTY[:12] for value in NASTY[:3]}
    values = [*NASTY, list(NASTY), nested]
    keys = itertools.cycle(KEYS[name])
    places = [
        spoilt(sound, tmp_path / str(number), name, key, value)
        for number, (key, value) in enumerate(zip(keys, values, strict=False))
    ]
    for first in range(0, len(places), 8):
        report_on(places[first : first + 8])


@pytest.mark.parametrize("content", ["a: 0x" + "f" * 5000, "a: 1e999", "a: .nan", "? [a]"])
def test_numbers_beyond_all_bounds_are_reported_on(sound, tmp_path, content):
    run = Path(shutil.copytree(sound, tmp_path / "run"))
    (run / "config.yaml").write_text(content + "\n")
    report_on([run])


@pytest.mark.parametrize("name", sorted(KEYS))
def test_a_link_is_named_and_not_followed(sound, tmp_path, name):
    secret = tmp_path / "secret"
    secret.write_text("token: s3cret\n")
    run = Path(shutil.copytree(sound, tmp_path / "run"))
    (run / name).unlink()
    (run / name).symlink_to(secret)
    (found,) = read_runs([run], WANTED).runs.to_dict("records")
    assert any(problem.startswith(f"{name} is a link") for problem in found["problems"])
    assert "s3cret" not in str(found)


def test_a_folder_whose_name_is_no_text_is_reported_on(sound, tmp_path):
    place = tmp_path / "sweep"
    shutil.copytree(sound, os.fsdecode(bytes(place) + b"/\xff\x1b[2J<script>"))
    report_on([place])


def test_a_report_is_not_written_through_a_link(sound, tmp_path, capsys):
    run = Path(shutil.copytree(sound, tmp_path / "run"))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (run / "report").symlink_to(elsewhere)
    assert main([str(run)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "is a link: name the folder to write to with --out" in line
    assert list(elsewhere.iterdir()) == []

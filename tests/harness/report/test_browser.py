"""A report in Chromium: at a desk and on a phone, light and dark. `make browser` runs this."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.report import main
from tests.chromium import SIZES, chromium
from tests.harness.report.synthetic import HOSTILE, make_run, make_sweep

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def page_file(tmp_path_factory) -> Path:
    """The page of a sweep with everything in it, names that mean harm among it."""
    folder = tmp_path_factory.mktemp("report") / "sweep"
    make_sweep(folder, schemes={"shared_mem": 60, "multiprocess": 60, "hogwild": 40})
    make_run(folder / "hostile", scheme=HOSTILE, seed=9)
    assert main([str(folder), "--baseline", "shared_mem"]) == 0
    return folder / "report" / "report.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_the_page_shows_without_complaint_request_or_overflow(
    browser, page_file, size, scheme, tmp_path
):
    width, height = SIZES[size]
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    said, asked = [], []
    page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(page_file.as_uri())
    page.wait_for_load_state("networkidle")
    picture = tmp_path / f"{size}-{scheme}.png"
    page.screenshot(path=picture, full_page=True)
    assert said == []
    assert [url for url in asked if not url.startswith("data:")] == [page_file.as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("h2").count() >= 5
    other = {"light": "dark", "dark": "light"}[scheme]
    assert page.locator(f".{scheme}").first.is_visible()
    assert not page.locator(f".{other}").first.is_visible()
    assert picture.stat().st_size > 10_000
    page.close()

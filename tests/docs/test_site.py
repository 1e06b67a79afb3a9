"""The site in Chromium, at a desk and on a phone. `make docs browser` builds it and runs this."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.chromium import SIZES, chromium
from tests.docs.pages import ROOT

pytestmark = pytest.mark.browser

SITE = ROOT / "site"
PAGES = sorted(str(file.relative_to(SITE)) for file in SITE.rglob("*.html"))


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves the site without a line for each request."""

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Where the site is served."""
    handler = functools.partial(Quiet, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture
def browser() -> Iterator[Any]:
    """It ends with the test, and so do processes that it adds."""
    with chromium() as started:
        yield started


@pytest.mark.skipif(not PAGES, reason="there is no site: make docs")
@pytest.mark.parametrize("size", SIZES)
def test_every_page_shows_without_complaint_request_elsewhere_or_overflow(browser, address, size):
    width, height = SIZES[size]
    page = browser.new_page(viewport={"width": width, "height": height})
    said, asked, wide = [], [], []
    page.on("console", lambda message: said.append(f"{page.url}: {message.text}"))
    page.on("pageerror", lambda error: said.append(f"{page.url}: {error}"))
    page.on("request", lambda request: asked.append(request.url))
    for name in PAGES:
        page.goto(address + name)
        page.wait_for_load_state("networkidle")
        if page.evaluate("document.documentElement.scrollWidth") > width:
            wide.append(name)
    page.close()
    assert said == []
    assert [url for url in asked if not url.startswith((address, "data:", "blob:"))] == []
    assert wide == []


@pytest.mark.skipif(not PAGES, reason="there is no site: make docs")
def test_search_finds_a_page_without_help_from_elsewhere(browser, address):
    page = browser.new_page()
    page.goto(address + "index.html")
    page.locator("input.md-search__input").fill("hogwild")
    page.locator(".md-search-result__link").first.wait_for()
    page.close()

"""The report in headless Chromium, wide and light, and on a phone in the dark: no request, no error, all there.

Skipped where no browser is installed: `playwright install --only-shell chromium`, or the system's own chromium.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from megatron_snip.train.report import page as report_page
from megatron_snip.train.report.sections import write_report
from tests.unit.train.recorded import line, run_of_everything, shown, write_run

playwright = pytest.importorskip("playwright.sync_api")
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
SCREENS = {
    "wide": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"},
    "phone": {
        "viewport": {"width": 390, "height": 844}, "color_scheme": "dark", "device_scale_factor": 2,
        "is_mobile": True, "has_touch": True,
    },
}  # fmt: skip
WHITE, DARK = "rgb(255, 255, 255)", "rgb(20, 24, 31)"


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with playwright.sync_playwright() as engine:
        path = next(filter(None, map(shutil.which, BROWSERS)), None)
        try:
            opened = engine.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except playwright.Error as error:
            if path is not None or "playwright install" not in error.message:
                raise
            pytest.skip("no browser: `playwright install --only-shell chromium`, or install chromium")
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def pages(browser, tmp_path_factory) -> dict:
    """Screen -> the page that it shows, with all that went wrong on it; the report is of a run beside another."""
    folder = tmp_path_factory.mktemp("runs")
    mine, theirs = run_of_everything(folder / "mine"), run_of_everything(folder / "theirs", 0.05)
    file = write_report(mine, [theirs])
    found = {}
    for name, screen in SCREENS.items():
        page = browser.new_page(**screen)
        page.wrong, page.requests = [], []
        page.on("console", lambda message, page=page: page.wrong.append(message.text))
        page.on("pageerror", lambda error, page=page: page.wrong.append(str(error)))
        page.on("request", lambda request, page=page: page.requests.append(request.url))
        page.goto(file.as_uri())
        page.wait_for_selector("html[data-drawn=yes]", timeout=60_000)
        page.figures = sum(len(figures) for figures in shown(file).values())
        found[name] = page
    return found


@pytest.mark.parametrize("screen", SCREENS)
def test_nothing_is_missing_and_nothing_is_loaded(pages, screen):
    page = pages[screen]
    assert page.locator(".js-plotly-plot .main-svg").first.is_visible()
    assert page.locator(".js-plotly-plot").count() == page.figures == 17
    for picture in page.locator(".js-plotly-plot").all():
        assert picture.locator(".cartesianlayer path, .cartesianlayer image").count() > 0
    bars = "[...document.querySelectorAll('.modebar-group')].map(bar => getComputedStyle(bar).backgroundColor)"
    assert set(page.evaluate(bars)) <= {"rgba(0, 0, 0, 0)"}, "buttons do not grey out the legend"
    assert page.evaluate("document.documentElement.scrollWidth") <= SCREENS[screen]["viewport"]["width"]
    assert [url.split(":")[0] for url in page.requests] == ["file"] and page.wrong == []


@pytest.mark.parametrize("screen", SCREENS)
def test_light_and_dark(pages, screen):
    """As the system asks, and the other way by the switch; the pictures' text follows."""
    page = pages[screen]
    background = "getComputedStyle(document.body).backgroundColor"
    text = "getComputedStyle(document.querySelector('.xtick text')).fill"
    inks = []
    for expected in (WHITE, DARK) if screen == "wide" else (DARK, WHITE):
        assert page.evaluate(background) == expected
        page.wait_for_function(f"{text} === getComputedStyle(document.body).color")
        inks.append(page.evaluate(text))
        page.locator("#theme").click()
    assert inks[0] != inks[1] and page.evaluate(background) != expected and page.wrong == []


def test_the_slider_shows_each_plan(pages):
    page = pages["wide"]
    picture = "document.querySelector('input[type=range]').parentElement.nextElementSibling"
    shown_at = []
    for step in (0, 9):
        page.locator("input[type=range]").fill(str(step))
        shown_at.append(page.evaluate(f"[{picture}.data[0].z, {picture}.data[0].text]"))
        assert f"iteration {10 * (step + 1)}:" in page.locator("label.slider span").inner_text()
    for (formats, texts), plan in zip(shown_at, (1, 10), strict=True):
        for linear in range(21):  # as run_of_everything says
            row, block = linear % 7, linear // 7
            low = (linear + plan) % 4 != 0
            assert [formats[4 * row + band][block] for band in range(3)] == [int(low)] * 3
            assert texts[4 * row][block].endswith(": fp4" if low else ": fp8")
        assert formats[3] == [None] * 3  # a gap between two kinds


def test_a_page_that_asks_for_something_is_stopped(browser, tmp_path, monkeypatch):
    """The page's policy, not luck, keeps it from the network; console and requests are really heard."""
    asks = report_page._SCRIPT.replace("draw();\n", "fetch('http://127.0.0.1:9/x').catch(() => 0);draw();\n")
    monkeypatch.setattr(report_page, "_SCRIPT", asks)
    file = write_report(write_run(tmp_path, [line(1)]))
    page, wrong = browser.new_page(), []
    page.on("console", lambda message: wrong.append(message.text))
    page.goto(file.as_uri())
    page.wait_for_selector("html[data-drawn=yes]", timeout=60_000)
    assert any("Content Security Policy" in text for text in wrong)


def test_a_script_of_a_stranger_does_not_run(browser, tmp_path):
    """One that came into the page, by a run's name, say."""
    file = write_report(run_of_everything(tmp_path / "run"))
    text = file.read_text().replace("</header>", "</header><script>document.title = 'mine'</script>", 1)
    file.write_text(text)
    page = browser.new_page()
    page.goto(file.as_uri())
    page.wait_for_selector("html[data-drawn=yes]", timeout=60_000)
    assert page.title() != "mine"
    page.close()

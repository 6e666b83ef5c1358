"""The page in a real browser: opens from disk without errors, tells what is under the pointer, opens a unit, sorts.

Needs Chromium and its driver, and skips itself without them. One browser for all tests.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded import HOSTILE, UNITS, Recorded, fake_run, sweep, unit_matrices
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select, WebDriverWait

from gnmr.lab.report.comparisons import compare
from gnmr.lab.report.html_page import render_page
from gnmr.lab.report.recorded_run import Run

pytestmark = pytest.mark.slow

STEPS = 60


def write(path: Path, runs: list[Run]) -> Path:
    path.write_text(render_page(compare(runs), runs, path.parent), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("page")
    runs = sweep(root)
    other = fake_run(root / "other", "bf16", 0)
    other.experiment = HOSTILE
    return write(root / "report.html", [*runs, other])


@pytest.fixture
def page(browser: Any, report: Path) -> Any:
    """The browser with the page just opened."""
    return opened(browser, report)


def opened(browser: Any, path: Path) -> Any:
    browser.get("about:blank")
    browser.get_log("browser")
    browser.get(path.as_uri())
    until(browser, lambda: browser.execute_script("return document.body.dataset.ready"))
    return browser


def until(browser: Any, true: Callable[[], Any]) -> Any:
    replaced = [StaleElementReferenceException]  # between finding an element and reading it
    return WebDriverWait(browser, 20, poll_frequency=0.02, ignored_exceptions=replaced).until(lambda _: true())


def text(browser: Any, selector: str) -> str:
    return browser.find_element(By.CSS_SELECTOR, selector).text


def texts(browser: Any, selector: str) -> list[str]:
    return [one.text for one in browser.find_elements(By.CSS_SELECTOR, selector)]


def pane(browser: Any, selector: str) -> Any:
    found = browser.find_element(By.CSS_SELECTOR, f"{selector} .over")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", found)
    return found


def at_cell(browser: Any, unit: int, step: int) -> ActionChains:
    """A real move of the mouse to the middle of a cell."""
    over = pane(browser, "#map > div:last-child")
    across = round(over.rect["width"] * ((step - 0.5) / STEPS - 0.5))
    down = round(over.rect["height"] * ((unit + 0.5) / len(UNITS) - 0.5))
    return ActionChains(browser, duration=50).move_to_element_with_offset(over, across, down)


def test_it_opens_without_errors_loads_nothing_and_sorts(page: Any) -> None:
    assert page.get_log("browser") == []
    assert not page.find_element(By.ID, "failure").is_displayed()
    assert page.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert page.execute_script("return window.owned") is None
    drawn = page.execute_script(
        "return ['map', 'loss-train', 'loss-val'].map(id => !!document.querySelector(`#${id} svg`))"
    )
    assert drawn == [True] * 3
    assert text(page, "#map-origin code") == f"gnmr train {HOSTILE}"
    assert text(page, ".of:not([hidden]) .verdict").startswith("int4 ended at perplexity 50.50; int4_int8 ended at")
    assert page.execute_script("return document.getElementById('map').getBoundingClientRect().top") < 800

    def arms() -> list[str]:
        return texts(page, "#arms .of:not([hidden]) table:first-of-type tbody td:first-child")[:2]

    heads = page.find_elements(By.CSS_SELECTOR, "#arms .of:not([hidden]) th button")
    head = next(one for one in heads if one.text == "val loss")
    assert arms() == ["int4", "int4_int8"]
    head.click()
    assert arms() == ["int4_int8", "int4"], "sorted: 40 before 50"


def test_the_legend_hides_and_shows_arms(page: Any) -> None:
    def seen() -> set[str]:
        names = "[...document.querySelectorAll('#loss-train path[data-name]')].map(one => one.dataset.name)"
        return {name.partition(",")[0] for name in page.execute_script(f"return {names}")}

    assert seen() == {"int4", "int4_int8"}
    first = page.find_element(By.CSS_SELECTOR, "#loss-legend button")
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", first)
    first.click()
    until(page, lambda: seen() == {"int4_int8"})
    page.find_element(By.CSS_SELECTOR, "#loss-legend button").click()
    until(page, lambda: seen() == {"int4", "int4_int8"})


def test_a_phone_in_the_dark(browser: Any, report: Path) -> None:
    size = {"width": 400, "height": 860, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    try:
        opened(browser, report)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 400
        wider = "filter(one => one.scrollWidth > one.clientWidth)"
        assert browser.execute_script(f"return [...document.querySelectorAll('.scroll')].{wider}") == []
        cell = browser.find_element(By.CSS_SELECTOR, "#arms .of:not([hidden]) td:nth-child(3)")
        assert "val loss" in browser.execute_script("return getComputedStyle(arguments[0], '::before').content", cell)
        assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(21, 24, 28)"
        tops = "['loss-train', 'loss-val'].map(id => document.getElementById(id).getBoundingClientRect().top)"
        first, second = browser.execute_script(f"return {tops}")
        assert second > first + 200, "stacked"
        picture = "return document.querySelector('#map image').getAttribute('href')"
        drawn = browser.execute_script(picture)
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        until(browser, lambda: browser.execute_script(picture) != drawn)
        assert browser.get_log("browser") == []
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_many_arms_are_small_panels(browser: Any, tmp_path: Path) -> None:
    made = unit_matrices(STEPS, UNITS)
    runs: list[Run] = [fake_run(tmp_path / "16", "bf16", 0, ppl=38.0, made=made)]
    for number in range(1, 10):
        one = fake_run(tmp_path / str(number), "int4", 0, ppl=40.0 + number, made=made)
        one.settings["controller.max_o"] = number
        runs.append(one)
    opened(browser, write(tmp_path / "report.html", runs))
    panels = texts(browser, "#loss-multiples figcaption")
    assert panels == [f"max_o={n}\n+{np.log((40 + n) / 38):.4g}" for n in range(1, 10)]
    assert "Difference to bf16" in text(browser, "#loss-lead")
    assert browser.get_log("browser") == []


def test_a_hover_tells_the_cell(page: Any) -> None:
    assert text(page, "#risk-key").startswith("risk: blank below the trigger")
    at_cell(page, 0, 31).perform()
    until(page, lambda: UNITS[0] in text(page, "#tip"))
    words = text(page, "#tip").split("\n")
    assert words[0] == UNITS[0]
    assert dict(zip(words[1::2], words[2::2], strict=True)) == {
        "step": "31",
        "norm": "1.03",
        "gnmr": "1.25",
        "delta_gnmr": "0.625",
        "risk": "2.5",
        "on recovery path": "no",
        "cause of promotion": "delta_gnmr",
        "fault injected": "underflow 16",
    }
    at_cell(page, 0, 35).perform()
    until(page, lambda: "35" in text(page, "#tip"))
    assert "yes" in text(page, "#tip")
    at_cell(page, 1, 31).perform()  # ordered by mean risk
    until(page, lambda: UNITS[2] in text(page, "#tip"))
    assert "∞" in text(page, "#tip")
    assert texts(page, "#verdicts tbody tr") == [f"36 precision {UNITS[0]}", "52 not reproducible -"]
    assert len(page.find_elements(By.CSS_SELECTOR, "#map .spike")) == 2
    at_cell(page, 0, 36).perform()
    until(page, lambda: "precision: this unit" in text(page, "#tip"))
    page.find_element(By.XPATH, "//*[@id='map-order']//button[2]").click()  # by place
    until(page, lambda: texts(page, "#map .unit-name")[1] == UNITS[1])


def test_a_click_opens_the_unit(page: Any) -> None:
    panel = page.find_element(By.ID, "unit")
    assert not panel.is_displayed()
    at_cell(page, 0, 31).click().perform()
    until(page, panel.is_displayed)
    assert text(page, "#unit h3") == UNITS[0]
    assert "1 promotion; highest risk 2.5 at step 31" in panel.text
    assert page.find_element(By.CSS_SELECTOR, "#unit tbody tr").text == "31 32–41 delta_gnmr 2.5 lock"
    assert len(page.find_elements(By.CSS_SELECTOR, "#unit-plot path[data-name]")) == 4, "norm, two ratios, risk"
    Select(panel.find_element(By.TAG_NAME, "select")).select_by_visible_text(UNITS[1])
    until(page, lambda: text(page, "#unit h3") == UNITS[1])
    assert page.find_element(By.CSS_SELECTOR, "#unit tbody tr").text == "50 50–the end retry – -", "a verdict ends none"
    Select(panel.find_element(By.TAG_NAME, "select")).select_by_visible_text(UNITS[2])
    until(page, lambda: text(page, "#unit h3") == UNITS[2])
    address = page.current_url
    page.find_element(By.CSS_SELECTOR, "#unit .close").click()
    assert not panel.is_displayed()
    page.get("about:blank")
    page.get(address)
    until(page, lambda: page.execute_script("return document.body.dataset.ready"))
    assert text(page, "#unit h3") == UNITS[2], "the address opens the unit again"
    assert page.get_log("browser") == []


@pytest.mark.parametrize("plot", ["#loss-train", "#map > div:last-child"])
def test_a_drag_zooms(page: Any, plot: str) -> None:
    def steps() -> list[int]:
        found = texts(page, f"{plot} svg > g:last-of-type > text")
        return [int(one) for one in found if one.isdigit()]

    first = steps()
    over = pane(page, plot)
    across = round(over.rect["width"] / 4)
    corner = ActionChains(page, duration=50).move_to_element_with_offset(over, -across, 0)
    corner.click_and_hold().move_by_offset(2 * across, 20).release().perform()
    until(page, lambda: steps() and max(steps()) < 50 and steps() != first)
    ActionChains(page, duration=50).move_to_element(pane(page, plot)).double_click().perform()
    until(page, lambda: steps() == first)
    assert page.get_log("browser") == []


def test_an_arms_table_with_all_its_columns_fits_a_desktop(browser: Any, tmp_path: Path) -> None:
    made, spent = Recorded(), {"spent_gemm_frac": 0.093, "spent_extra_time": 0.041, "spike_score": 0.012}
    made.add("bf16", 3.6, 3.61, 3.62)
    made.add("int4", 3.7, 3.72, 3.73)
    for signal in ("gnmr_delta", "random", "recovery_gap"):
        losses = 3.65, 3.66, 3.655
        made.add("int4_int8", *losses, summary=spent | {"numbers_sent_frac": 0.03}, controller__signal=signal)
    size = {"width": 1400, "height": 860, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        opened(browser, write(tmp_path / "report.html", made.runs))
        assert len(texts(browser, "#arms th")) >= 10
        table = browser.find_element(By.CSS_SELECTOR, "#arms .scroll")
        assert browser.execute_script("return arguments[0].scrollWidth <= arguments[0].clientWidth", table)
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

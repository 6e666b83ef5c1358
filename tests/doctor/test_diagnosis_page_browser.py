"""The page of a diagnosis in a real browser, wide and narrow, light and dark. Skips itself without Chromium."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plausible import diagnosis
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By

from gnmr.plan.page import page

pytestmark = pytest.mark.slow

PAGES = {
    "big": diagnosis,
    "small": lambda: diagnosis(4),
    "names": lambda: diagnosis(names=["0", "3", "lm_head", "a_long_name.of_an_operator.inside_some_module" * 2]),
    "sides": lambda: diagnosis(against=True, gate=0.003, total=0.004),
}


@pytest.fixture(scope="module")
def opened(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    folder: Path = tmp_path_factory.mktemp("pages")

    def open_page(name: str, width: int, scheme: str = "light") -> Any:
        file = folder / f"{name}.html"
        if not file.exists():
            file.write_text(page(PAGES[name](), f"nvfp4 on {name}", {"command": "gnmr diagnose"}), encoding="utf-8")
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 700}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme_now = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme_now})
        browser.get(file.as_uri())
        return browser

    return open_page


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (400, "dark")])
def test_it_fits_and_loads_nothing(opened: Callable[..., Any], name: str, width: int, scheme: str) -> None:
    shown = opened(name, width, scheme)
    assert shown.get_log("browser") == []
    assert shown.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert shown.execute_script("return document.documentElement.scrollWidth") <= width
    back = shown.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert back == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(21, 24, 28)")
    outside = """return [...document.querySelectorAll('.scroll, .map')]
        .filter(one => one.checkVisibility() && one.scrollWidth > one.clientWidth + 1).length"""
    assert shown.execute_script(outside) == 0, "nothing is cut off"


@pytest.mark.parametrize(("width", "columns"), [(1400, 30), (400, 7)])
def test_layers_lie_across_where_there_is_room(opened: Callable[..., Any], width: int, columns: int) -> None:
    shown = opened("big", width)
    places = "[...document.querySelectorAll('.map .cell')].map(one => one.getBoundingClientRect().left)"
    assert len(set(shown.execute_script(f"return {places}"))) == columns


def test_a_cell_is_told_under_the_pointer_and_all_operators_on_demand(opened: Callable[..., Any]) -> None:
    shown = opened("big", 1400)
    cell = shown.find_elements(By.CSS_SELECTOR, ".map .cell")[40]
    told = "return getComputedStyle(arguments[0], '::after').content"
    assert shown.execute_script(told, cell) == "none"
    ActionChains(shown, duration=50).move_to_element(cell).perform()
    assert cell.get_attribute("aria-label") in shown.execute_script(told, cell)
    table = shown.find_element(By.CSS_SELECTOR, "details table")
    assert not table.is_displayed()
    shown.find_element(By.TAG_NAME, "summary").click()
    assert table.is_displayed() and len(table.find_elements(By.CSS_SELECTOR, "tbody tr")) == 210

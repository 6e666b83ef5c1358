"""The page in a real browser: opens from disk without errors, tells what is under the pointer, opens a unit, sorts.

Needs Chromium and its driver, and skips itself without them. One browser for all tests.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from html_runs import UNITS, fake_run, ratios
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select, WebDriverWait

from gnmr.lab.report import html
from gnmr.lab.report.comparisons import compare
from gnmr.lab.report.html import write_html
from gnmr.lab.report.layout import Table

pytestmark = pytest.mark.slow

HOSTILE = "</script><script>window.owned = 1</script><img src=x onerror='window.owned = 1'>"
STEPS = 60
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--window-size=1300,1000",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    binary = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("no chromium with chromedriver on this machine")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options=options, service=Service(driver))
    yield started
    started.quit()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Static low at perplexity 50, routed at 40; unit 0 of the routed run has its highest risk in step 31."""
    root = tmp_path_factory.mktemp("page")
    risk_SU = np.full((STEPS, 3), 0.5)
    risk_SU[30] = 2.5, 0.75, np.inf
    made = ratios(STEPS, UNITS, risk_SU)
    made.active_SU[31:41, 0] = True
    events = [
        {"step": 31, "unit": UNITS[0], "event": "promote", "cause": "delta_gnmr", "risk": 2.5},
        {"step": 36, "unit": UNITS[0], "event": "verdict", "cause": "precision", "risk": None},
        {"step": 41, "unit": UNITS[0], "event": "release", "cause": "lock", "risk": 0.5},
        {"step": 50, "unit": UNITS[1], "event": "promote", "cause": "retry", "risk": None},
        {"step": 52, "unit": None, "event": "verdict", "cause": "not_reproducible", "risk": None},
    ]
    windows = [{"step": 30, "end": 33, "unit": UNITS[0], "kind": "underflow", "magnitude": 16}]
    runs = [fake_run(root / f"low{seed}", "int4", seed, ppl=50 + seed) for seed in (0, 1)]
    for seed in (0, 1):
        routed: dict[str, Any] = {
            "made": made,
            "events": events,
            "windows": windows,
            "command": f"gnmr train {HOSTILE}",
        }
        runs.append(fake_run(root / f"routed{seed}", "int4_int8", seed, ppl=40 + seed, **routed))
    told = {"verdict": "part of the gap", "vs_low": "better", "vs_random": None, "difference": -3.25, "p": 0.004}
    told |= {"p_random": None, "gap_closed": 0.61, "promoted": 0.012, "diverged": 0, "seeds": 3}
    cells = [
        {"cell": {"gain": gain, "lr": 1e-3}, "low": "hurt", "low_difference": 4.2, "seeds": 3, "arms": {HOSTILE: told}}
        for gain in (1, 20)
    ]
    further = [Table(HOSTILE, ["arm", "PPL"], [["int4", "50.00"]])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(html, "regime_maps", lambda _: {"stress": cells})
        patch.setattr(html, "TITLE", HOSTILE)
        write_html(compare(runs), runs, root / "report.html", tables=further)
    return root / "report.html"


@pytest.fixture
def page(browser: Any, report: Path) -> Any:
    """The browser with the page just opened."""
    opened(browser, report)
    return browser


def opened(browser: Any, path: Path) -> None:
    browser.get("about:blank")
    browser.get_log("browser")
    browser.get(path.as_uri())
    until(browser, lambda: browser.execute_script("return document.body.dataset.ready"))


def until(browser: Any, true: Callable[[], Any]) -> Any:
    replaced = [StaleElementReferenceException]  # between finding an element and reading it
    return WebDriverWait(browser, 20, poll_frequency=0.02, ignored_exceptions=replaced).until(lambda _: true())


def text(browser: Any, selector: str) -> str:
    return browser.find_element(By.CSS_SELECTOR, selector).text


def at_cell(browser: Any, unit: int, step: int) -> ActionChains:
    """A real move of the mouse to the middle of a cell."""
    drag = browser.find_element(By.CSS_SELECTOR, "#map .nsewdrag")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", drag)
    across = round(drag.rect["width"] * ((step - 0.5) / STEPS - 0.5))
    down = round(drag.rect["height"] * ((unit + 0.3) / len(UNITS) - 0.5))
    return ActionChains(browser, duration=50).move_to_element_with_offset(drag, across, down)


def test_it_opens_without_errors_and_loads_nothing(page: Any) -> None:
    assert page.get_log("browser") == []
    assert not page.find_element(By.ID, "failure").is_displayed()
    assert page.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert page.execute_script("return window.owned") is None
    assert page.title == HOSTILE and text(page, "h1") == HOSTILE
    drawn = [one.get_attribute("id") for one in page.find_elements(By.CSS_SELECTOR, ".js-plotly-plot")]
    assert drawn == [
        "map", "loss-plot", "promotion-plot", "regime-plot", "gnmr-plot", "operator-plot", "tokens-plot",
    ]  # fmt: skip
    assert not page.find_elements(By.CSS_SELECTOR, "[data-title*='Share']"), "nothing is sent to plotly's servers"


def test_the_first_screen_tells_it(page: Any) -> None:
    assert text(page, "#verdict").startswith("int4 ended at perplexity 50.50; int4_int8 ended at perplexity 40.50")
    labels = [one.text for one in page.find_elements(By.CSS_SELECTOR, "#figures .what")]
    assert labels == ["cost of low precision", "share got back", "spend"]
    assert "5.6 %" in text(page, "#figures .figure:last-child"), "ten of 180 unit-steps"
    assert "seeds\n0, 1" in text(page, "#card")
    assert page.execute_script("return document.getElementById('map').getBoundingClientRect().top") < 800


def test_the_legend_hides_and_shows_arms(page: Any) -> None:
    def seen() -> list[str]:
        return page.execute_script(
            "const drawn = document.getElementById('loss-plot').data.filter(trace => trace.visible !== false);"
            "return [...new Set(drawn.map(trace => trace.name))]"
        )

    assert seen() == ["int4", "int4_int8"]
    first = page.find_element(By.CSS_SELECTOR, "#loss-legend button")
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", first)
    first.click()
    until(page, lambda: seen() == ["int4_int8"])
    first.click()
    until(page, lambda: seen() == ["int4", "int4_int8"])


@pytest.fixture
def phone(browser: Any) -> Iterator[Any]:
    """The browser 400 pixels wide and dark."""
    size = {"width": 400, "height": 860, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": dark})
    yield browser
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_a_phone_in_the_dark(phone: Any, report: Path) -> None:
    opened(phone, report)
    assert phone.execute_script("return document.documentElement.scrollWidth") <= 400
    assert phone.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(21, 24, 28)"
    plot = "document.getElementById('loss-plot').layout"
    assert phone.execute_script(f"return [{plot}.yaxis.domain[0] > {plot}.yaxis2.domain[1], {plot}.paper_bgcolor]") == [
        True,
        "#15181c",
    ], "stacked"
    told = f"return [{plot}.paper_bgcolor, {plot}.width ?? 0]"
    phone.execute_script("dispatchEvent(new Event('beforeprint'))")
    until(phone, lambda: phone.execute_script(told) == ["#fff", 700])
    phone.execute_script("dispatchEvent(new Event('afterprint'))")
    until(phone, lambda: phone.execute_script(told)[0] == "#15181c")
    phone.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    until(phone, lambda: phone.execute_script(told)[0] == "#fff")
    phone.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    style = "getComputedStyle(document.querySelector('{}'))"
    told = f"return [{style.format('th')}.position, {style.format('h3')}.breakAfter]"
    assert phone.execute_script(told) == ["static", "avoid"], "a sticky head is empty on the next sheet"
    phone.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert phone.get_log("browser") == []


def test_many_arms_are_small_panels_and_the_regime_map_opens_filled(browser: Any, tmp_path: Path) -> None:
    made = ratios(STEPS, UNITS)
    runs = [fake_run(tmp_path / "16", "bf16", 0, ppl=38.0, made=made)]
    for number in range(1, 10):
        one = fake_run(tmp_path / str(number), "int4", 0, ppl=40.0 + number, made=made)
        one.settings["controller.max_o"], one.hash = number, str(number)
        runs.append(one)
    told = {"verdict": "hurt", "vs_low": "worse", "vs_random": None, "difference": 1.0, "p": 0.01, "p_random": None}
    told |= {"gap_closed": None, "promoted": 0.01, "diverged": 0, "seeds": 3}
    places = [(1, 1, 1), (2, 2, 5), (3, 2, 5)]  # gain, lr, layers: the second slice has most
    cells = [
        {
            "cell": {"gain": g, "lr": r, "layers": n},
            "low": "hurt",
            "low_difference": 4.2,
            "seeds": 3,
            "arms": {"a": told},
        }
        for g, r, n in places
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(html, "regime_maps", lambda _: {"stress": cells})
        write_html(compare(runs), runs, tmp_path / "report.html")
    opened(browser, tmp_path / "report.html")
    panels = [one.text for one in browser.find_elements(By.CSS_SELECTOR, "#loss-multiples figcaption")]
    assert panels == [f"max_o={n}\n+{np.log((40 + n) / 38):.4g}" for n in range(1, 10)]
    assert "Difference to bf16" in text(browser, "#loss-lead")
    filled = "return document.getElementById('regime-plot').data[0].z.flat().filter(z => z !== null).length"
    assert browser.execute_script(filled) == 2
    labels = browser.execute_script("return document.getElementById('regime-plot').data[0].text.flat()")
    assert labels.count("hurt") == 2 and set(labels) == {"hurt", ""}, "an empty cell says nothing"
    assert browser.get_log("browser") == []


def test_every_figure_says_where_it_comes_from(page: Any) -> None:
    plots = [f"{name}-origin" for name in ("loss", "tokens", "promotion", "gnmr", "map")]
    for figure in ("arm-tables", *plots, "fault-tables", "more-tables"):
        assert "commit 0123456789 · cpu, Test CPU" in text(page, f"#{figure}"), figure
    assert text(page, "#map-origin code") == f"gnmr train {HOSTILE}"


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
    page.find_element(By.XPATH, "//*[@id='map-order']//button[2]").click()  # by place
    second = "return document.getElementById('map').layout.yaxis.ticktext[1]"
    until(page, lambda: page.execute_script(second) == UNITS[1])
    at_cell(page, 2, 31).perform()
    until(page, lambda: UNITS[2] in text(page, "#tip"))


def test_what_is_to_blame_is_told(page: Any) -> None:
    """A spike is a line in the map, a row below it, and a word in its cells; it ends no promotion."""
    rows = [row.text for row in page.find_elements(By.CSS_SELECTOR, "#verdicts tbody tr")]
    assert rows == [f"36 precision {UNITS[0]}", "52 not reproducible -"]
    shapes = "return document.getElementById('map').layout.shapes.filter(one => one.type === 'line').map(one => one.x0)"
    assert page.execute_script(shapes) == [36, 52] and page.find_element(By.ID, "verdict-key").is_displayed()
    at_cell(page, 0, 36).perform()
    until(page, lambda: "precision: this unit" in text(page, "#tip"))
    at_cell(page, 2, 50).click().perform()  # ordered by mean risk
    until(page, lambda: text(page, "#unit h3") == UNITS[1])
    assert page.find_element(By.CSS_SELECTOR, "#unit tbody tr").text == "50 50–the end retry – -"


def test_a_click_opens_the_unit(page: Any) -> None:
    panel = page.find_element(By.ID, "unit")
    assert not panel.is_displayed()
    at_cell(page, 0, 31).click().perform()
    until(page, panel.is_displayed)
    assert text(page, "#unit h3") == UNITS[0]
    assert "10 of" not in panel.text and "1 promotion; highest risk 2.5 at step 31" in panel.text
    promotion = page.find_element(By.CSS_SELECTOR, "#unit tbody tr").text
    assert promotion == "31 32–41 delta_gnmr 2.5 lock"
    assert len(page.find_elements(By.CSS_SELECTOR, "#unit-plot .scatterlayer .trace")) == 4, "norm, two ratios, risk"
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


def test_gnmr_of_one_operator(page: Any) -> None:
    heading = "#operator-title"
    assert text(page, heading) == f"GNMR of {UNITS[0]}, int4, seed 0; grey: all units"
    Select(page.find_element(By.ID, "operator-run")).select_by_visible_text("int4_int8, seed 1")
    until(page, lambda: text(page, heading).startswith(f"GNMR of {UNITS[0]}, int4_int8, seed 1"))
    Select(page.find_element(By.ID, "operator-unit")).select_by_visible_text(UNITS[1])
    until(page, lambda: text(page, heading).startswith(f"GNMR of {UNITS[1]}, int4_int8, seed 1"))
    assert page.get_log("browser") == []


def test_a_drag_zooms_into_the_loss_curves(page: Any) -> None:
    def shown() -> list[float]:
        return page.execute_script("return document.getElementById('loss-plot').layout.xaxis.range.slice()")

    drag = page.find_element(By.CSS_SELECTOR, "#loss-plot .nsewdrag")
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", drag)
    first, last = shown()
    across, down = round(drag.rect["width"] / 4), round(drag.rect["height"] / 4)
    corner = ActionChains(page, duration=50).move_to_element_with_offset(drag, -across, -down)
    corner.click_and_hold().move_by_offset(2 * across, 2 * down).release().perform()
    middle = [first + (last - first) / 4, last - (last - first) / 4]
    until(page, lambda: shown() == pytest.approx(middle, abs=(last - first) / 50))
    ActionChains(page, duration=50).move_to_element(drag).double_click().perform()
    until(page, lambda: shown() == pytest.approx([first, last], abs=(last - first) / 50))
    assert page.get_log("browser") == []


def test_another_run(page: Any) -> None:
    select = Select(page.find_element(By.ID, "run"))
    assert select.first_selected_option.text == "int4_int8, seed 0", "the first routed one"
    select.select_by_visible_text("int4, seed 1")
    until(page, lambda: text(page, "#map-origin code") == "gnmr train")
    at_cell(page, 1, 20).perform()
    until(page, lambda: "2.019" in text(page, "#tip"))


def test_the_table_sorts(page: Any) -> None:
    def arms() -> list[str]:
        return [
            cell.text for cell in page.find_elements(By.CSS_SELECTOR, "#arm-tables div:first-child td:first-child")
        ][:2]

    head = next(one for one in page.find_elements(By.CSS_SELECTOR, "th button") if one.text == "val perplexity")
    assert arms() == ["int4", "int4_int8"]
    head.click()
    assert arms() == ["int4_int8", "int4"], "40 before 50"
    head.click()
    assert arms() == ["int4", "int4_int8"]


@pytest.mark.parametrize(
    "texts, expected",
    [
        (["1.5 GiB", "-", "900 MiB", "2.0 KiB"], ["2.0 KiB", "900 MiB", "1.5 GiB", "-"]),
        (["2.0 h", "61.0 s", "1.0 min"], ["1.0 min", "61.0 s", "2.0 h"]),
        (["+1.20 ± 0.10 %", "-3.00 ± 0.20 %", "reference"], ["-3.00 ± 0.20 %", "+1.20 ± 0.10 %", "reference"]),
        (["inf ± -", "9.10 ± 1.00", "10.20 ± 0.10"], ["9.10 ± 1.00", "10.20 ± 0.10", "inf ± -"]),
        (["missed", "after 12", "after 3"], ["after 3", "after 12", "missed"]),
        (["1.1B", "2.0M", "3,000"], ["3,000", "2.0M", "1.1B"]),
        (["layers.10.q", "layers.9.q"], ["layers.9.q", "layers.10.q"]),
    ],
)
def test_cells_sort_by_what_they_mean(page: Any, texts: list[str], expected: list[str]) -> None:
    script = "return arguments[0].sort((a, b) => compareKeys(sortKey(a), sortKey(b), 1))"
    assert page.execute_script(script, texts) == expected


def test_axes_of_the_regime_map(page: Any) -> None:
    across, up, *_ = (Select(one) for one in page.find_elements(By.CSS_SELECTOR, "#regime-controls select"))
    assert (across.first_selected_option.text, up.first_selected_option.text) == ("gain", "lr")
    assert "hurt (2)" in text(page, "#regime-key")
    assert text(page, "#regime-summary").startswith("In 2 of 2 cells the static low path is hurt.")
    up.select_by_visible_text("arm")
    until(page, lambda: "part of the gap (2)" in text(page, "#regime-key"))


def test_a_large_run_opens(browser: Any, tmp_path: Path) -> None:
    """200 units by 20,000 steps; how large its page may be stands in test_html.py."""
    risk_SU = np.exp(0.3 * np.random.default_rng(0).standard_normal((20_000, 200), dtype=np.float32))
    made = ratios(20_000, [f"layers.{place}" for place in range(200)], risk_SU)
    made.active_SU[::50] = True
    run = fake_run(tmp_path / "run", made=made)
    write_html(compare([run]), [run], tmp_path / "report.html")
    opened(browser, tmp_path / "report.html")
    assert browser.find_elements(By.CSS_SELECTOR, "#map .nsewdrag")
    assert browser.get_log("browser") == []

"""The comparison's report as a person opens it: in Chromium, from disk, without a network."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from fed_dp.comparison.compare import compare
from fed_dp.experiment.comparing import plan
from tests.comparison.test_comparing import FILE

pytestmark = pytest.mark.e2e
Page = tuple[webdriver.Chrome, dict[str, Any], Path]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("chromium and chromedriver are not there: install Debian's chromium and chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        f"--user-data-dir={tmp_path_factory.mktemp('chromium')}",
    ):  # fmt: skip
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield found
    found.quit()


@pytest.fixture(scope="module")
def page(browser: webdriver.Chrome, tmp_path_factory: pytest.TempPathFactory) -> Page:
    root = tmp_path_factory.mktemp("page")
    (root / "mine.toml").write_text(FILE)
    folder, found = compare(plan(root / "mine.toml"), root=root / "runs", command="fed-dp compare mine.toml")
    browser.get_log("performance")
    browser.get((folder / "report.html").as_uri())
    return browser, found, folder


def test_no_console_error_and_no_request(page: Page) -> None:
    browser, _, folder = page
    assert browser.get_log("browser") == []
    asked = [
        message["params"]["request"]["url"]
        for entry in browser.get_log("performance")
        if (message := json.loads(entry["message"])["message"])["method"] == "Network.requestWillBeSent"
    ]
    own = (folder / "report.html").as_uri()
    assert [url for url in asked if not url.startswith("data:")] == [own]


def test_every_number_is_that_of_the_json(page: Page) -> None:
    browser, found, folder = page
    assert json.loads((folder / "comparison.json").read_text()) == found
    inside = browser.find_element(By.ID, "data").get_attribute("textContent")
    assert json.loads(inside or "") == found
    rows = {
        (row["variant"], "none" if row["epsilon"] is None else f"{row['epsilon']:g}"): row
        for row in found["rows"]
    }
    shown = browser.find_elements(By.CSS_SELECTOR, "#scores tbody tr")
    assert len(shown) == len(rows)
    for line in shown:
        row = rows[line.get_attribute("data-variant"), line.get_attribute("data-epsilon")]
        cells = [
            float(c.get_attribute("data-value")) for c in line.find_elements(By.CSS_SELECTOR, "[data-value]")
        ]
        told, against = row["accuracy"], row.get("against_baseline")
        expected = [told["mean"], *told["interval"]]
        if row["privacy"] is not None:
            expected.insert(0, row["privacy"]["epsilon_total"])
            assert row["privacy"]["guarantee"] in line.text
            assert row["privacy"]["neighbours"] in line.text
        if against is not None:
            expected += [against["difference"], against["p_adjusted"]]
        assert cells == expected
    drawn = {
        (point.get_attribute("data-name"), float(point.get_attribute("data-x"))): float(
            point.get_attribute("data-y")
        )
        for point in browser.find_elements(By.CSS_SELECTOR, "#accuracy-by-epsilon .point")
    }
    assert drawn == {
        (row["variant"], row["privacy"]["epsilon_total"] if row["privacy"] else 0.0): row["accuracy"]["mean"]
        for row in found["rows"]
    }
    for line in browser.find_elements(By.CSS_SELECTOR, "#costs tbody tr"):
        row = rows[line.get_attribute("data-variant"), line.get_attribute("data-epsilon")]
        values = [
            float(c.get_attribute("data-value")) for c in line.find_elements(By.CSS_SELECTOR, "[data-value]")
        ]
        assert values[-3:] == [
            row["bytes"]["uploaded"] / 1e6,
            row["bytes"]["downloaded"] / 1e6,
            row["seconds"],
        ]


def test_series_can_be_hidden_with_the_keyboard_and_points_are_read(page: Page) -> None:
    browser, _, _ = page
    button = browser.find_element(By.CSS_SELECTOR, "#accuracy-by-epsilon .legend button")
    place = button.get_attribute("data-series")
    group = browser.find_element(By.CSS_SELECTOR, f"#accuracy-by-epsilon .drawing g[data-series='{place}']")
    assert group.is_displayed()
    button.send_keys(Keys.ENTER)
    assert button.get_attribute("aria-pressed") == "false"
    assert not group.is_displayed()
    button.send_keys(Keys.ENTER)
    assert group.is_displayed()
    drawing = browser.find_element(By.CSS_SELECTOR, "#accuracy-by-epsilon .drawing svg")
    assert "Arrow keys" in (drawing.get_attribute("aria-label") or "")
    drawing.send_keys(Keys.ARROW_RIGHT)
    tip = browser.find_element(By.ID, "tip")
    first = tip.text
    assert "ε of the whole run" in first
    drawing.send_keys(Keys.ARROW_RIGHT)
    assert tip.text != first
    drawing.send_keys(Keys.ESCAPE)
    assert not tip.is_displayed()
    point = browser.find_element(By.CSS_SELECTOR, "#epsilon-by-round .point")
    webdriver.ActionChains(browser).scroll_to_element(point).move_to_element(point).perform()
    assert tip.text == point.get_attribute("data-tip")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_and_has_contrast_in_light_and_dark(page: Page, scheme: str) -> None:
    browser, _, _ = page
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    phone = {"width": 375, "height": 800, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    try:
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 375
        paper = _colour(browser, "body", "background-color")
        assert (sum(paper) > 600) == (scheme == "light")
        for element, least in (
            ("body", 7.0),
            (".soft, small", 4.5),
            (".drawing text", 4.5),
            ("summary", 4.5),
        ):
            key = "fill" if element == ".drawing text" else "color"
            assert _contrast(_colour(browser, element, key), paper) >= least, element
        for place in range(10):
            assert _contrast(_variable(browser, f"--c{place}"), paper) >= 4.5, place
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def _colour(browser: webdriver.Chrome, selector: str, key: str) -> tuple[float, ...]:
    script = "return getComputedStyle(document.querySelector(arguments[0])).getPropertyValue(arguments[1])"
    text = browser.execute_script(script, selector, key)
    return tuple(float(part) for part in text[text.index("(") + 1 : -1].split(",")[:3])


def _variable(browser: webdriver.Chrome, name: str) -> tuple[float, ...]:
    script = "return getComputedStyle(document.documentElement).getPropertyValue(arguments[0]).trim()"
    text = browser.execute_script(script, name)
    return tuple(float(int(text[i : i + 2], 16)) for i in (1, 3, 5))


def _contrast(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """The ratio of the Web Content Accessibility Guidelines."""

    def luminance(colour: tuple[float, ...]) -> float:
        parts = [c / 255 for c in colour]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)

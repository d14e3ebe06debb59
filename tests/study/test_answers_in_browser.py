"""Answers in headless Chromium: filters, search, side by side, hostile text, a phone."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_sections import say

from made_up_runs import make_run
from stepjepa.study.page.logged_run import read_runs
from stepjepa.study.page.page import make_page

pytestmark = pytest.mark.slow

HOSTILE = (
    "<script>alert(1)</script>",
    "</script><script>alert(2)</script><!-- <script>",
    '<img src=x onerror="alert(3)">',
    "\u202eright to left\u2066 \x1b[31mred\x07",
)
GENERATED = [*HOSTILE, "three", "five five", "seven"]


def wait(browser: Any, script: str) -> Any:
    """What a script comes to as soon as it is true."""
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, 30, poll_frequency=0.05).until(lambda driver: driver.execute_script(script))


def put(browser: Any, name: str, value: str) -> None:
    """Choose or type a value in the form of the answers."""
    browser.execute_script(
        "const field = document.querySelector('.answers-controls').elements[arguments[0]];"
        "field.value = arguments[1]; field.dispatchEvent(new Event('change', {bubbles: true}));"
        "if (field.type === 'search') field.form.requestSubmit();",
        name,
        value,
    )


def examples(browser: Any) -> list[int]:
    titles = browser.execute_script("return [...document.querySelectorAll('.answers-card h3')].map(e => e.textContent)")
    return [int(title.removeprefix("Example ")) for title in titles]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("page")


@pytest.fixture(scope="module")
def address(folder: Path) -> str:
    """A page of two runs with seven answers each, five of them the same."""
    shared = [f"begin\nquestion {place}<end>" for place in range(7)]
    runs = [make_run(folder / right, right, stopped="1110111") for right in ("1001000", "0110100")]
    for run, generated in zip(runs, (GENERATED, [*GENERATED[:5], "six", "eleven"]), strict=True):
        say(run, prompt=shared, truth="<b>truth</b>", generated=generated)
    (folder / "page.html").write_text(make_page(read_runs(runs)), encoding="utf-8", errors="replace")
    return f"file://{folder / 'page.html'}"


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """The browser with the page just opened; in the end nothing may stand in its console."""
    browser.get_log("browser")
    browser.get(address)
    wait(browser, "return document.readyState === 'complete'")
    yield browser
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert browser.get_log("browser") == []


def test_what_all_prompts_share_is_shown_once(page):
    texts = "return [...document.querySelectorAll('.answers-begin pre')].map(e => e.hidden ? null : e.textContent)"
    assert page.execute_script(texts) == ["begin\n", "<end>"]
    prompts = "return [...document.querySelectorAll('.answers-card [data-part=prompt]')].map(e => e.textContent)"
    assert page.execute_script(prompts) == [f"question {place}" for place in range(7)]


def test_filters(page):
    assert examples(page) == list(range(7))
    options = page.execute_script("return [...document.querySelector('[name=verdict]').options].map(o => o.text)")
    assert options == ["any (7)", "right (2)", "wrong (5)", "ran on (1)"]
    for value, expected in {"right": [0, 3], "wrong": [1, 2, 4, 5, 6], "ran on": [3], "": list(range(7))}.items():
        put(page, "verdict", value)
        assert examples(page) == expected


def test_search_finds_in_all_texts_and_marks_what_it_found(page):
    for text, expected in {"FIVE": [5], "question 4": [4], "truth": list(range(7)), "nowhere": [], "<img": [2]}.items():
        put(page, "search", text)
        assert examples(page) == expected
        marks = page.execute_script("return [...document.querySelectorAll('.answers mark')].map(e => e.textContent)")
        assert {mark.lower() for mark in marks} == ({text.lower()} if expected else set())


def test_side_by_side_only_where_they_differ(page):
    put(page, "second", "1")
    assert len(page.find_elements("css selector", ".answers-answer")) == 14
    put(page, "differ", "text")
    assert examples(page) == [5, 6]
    output = page.execute_script(
        "return [...document.querySelectorAll('.answers-card:first-child .answers-answer pre')].map(e => e.textContent)"
    )
    assert output == ["five five", "six"]
    put(page, "differ", "verdict")
    assert examples(page) == [0, 1, 2, 3, 4]
    put(page, "verdict", "right")
    assert examples(page) == [0, 3]
    put(page, "second", "")
    assert page.execute_script("return getComputedStyle(document.querySelector('.answers-two')).display") == "none"


def test_what_a_model_wrote_stays_text(page):
    shown = page.execute_script("return [...document.querySelectorAll('.answers-answer pre')].map(e => e.textContent)")
    assert shown[:3] == list(HOSTILE[:3])
    assert shown[3] == "\\u202eright to left\\u2066 \\x1b[31mred\\x07"
    # The page has pictures of its own, whose data is in it.
    markup = "pre *, main img:not([src^='data:']), .answers b"
    assert page.execute_script("return document.querySelectorAll(arguments[0]).length", markup) == 0
    from selenium.common.exceptions import NoAlertPresentException

    with pytest.raises(NoAlertPresentException):
        page.switch_to.alert  # noqa: B018  # asking is enough


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_phone_scrolls_in_one_direction_in_either_theme(page, theme):
    # Another page of the same browser may have been switched by hand, which is kept.
    page.execute_script("localStorage.clear(); delete document.documentElement.dataset.theme")
    media = [{"name": "prefers-color-scheme", "value": theme}]
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    metrics = {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    put(page, "second", "1")
    assert page.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    colour = page.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", colour)[:3])) > 3 * 128) is (theme == "light")


def test_pages_of_answers_are_turned_by_keys(browser, tmp_path):
    run = say(make_run(tmp_path / "run", "1" * 21), prompt="a", truth="b", generated="c")
    (tmp_path / "page.html").write_text(make_page(read_runs([run])), encoding="utf-8")
    browser.get(f"file://{tmp_path / 'page.html'}")
    wait(browser, "return document.readyState === 'complete'")
    page = browser.find_element("css selector", ".answers-pager [role=status]")
    back, on = browser.find_elements("css selector", ".answers-pager button")
    on.send_keys("\n")
    # The last page: its button is disabled, and must not take the focus with it.
    assert (page.text, browser.switch_to.active_element) == ("page 2 of 2", back)
    back.send_keys("\n")
    assert (page.text, browser.switch_to.active_element) == ("page 1 of 2", on)

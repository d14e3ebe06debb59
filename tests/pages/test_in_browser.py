"""Answers and records in headless Chromium: filters, search, side by side, highlights, keys, hostile text, a phone."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_answers import say
from test_page_embeddings import make_analysis
from test_page_inspector import trained, write_records

from made_up_runs import make_run
from stepjepa.files import write_jsonl
from stepjepa.inspection.analysis import save
from stepjepa.pages import page as page_module
from stepjepa.pages.embeddings import embedding_section
from stepjepa.pages.page import write_page
from stepjepa.pages.runs import read_runs

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
def address(folder: Path, plain_tokenizer: Any) -> str:
    """A page of two runs with seven answers each, five of them the same; the first with three records."""
    file = write_records(folder / "train.jsonl", "3+4=7\n\n7+5=12\n\n12", "<b onclick=alert(4)>\n\n<i>", "One")
    first = trained(folder / "first", file, plain_tokenizer).folder
    second = make_run(folder / "second", "0110100", stopped="1111111")
    shared = [f"begin\nquestion {place}" for place in range(7)]
    for run, generated in ((first, GENERATED), (second, [*GENERATED[:5], "six", "eleven"])):
        lines = [
            {**line, "index": place, "scores": {"exact": place in right, "prefix": True}, "stopped": place != 3}
            for right in [(0, 3) if run is first else (1, 2, 4)]
            for place, line in enumerate([json.loads((run / "test.jsonl").read_text().splitlines()[0])] * 7)
        ]
        write_jsonl(run / "test.jsonl", lines)
        say(run, prompt=shared, truth="<b>truth</b>", generated=generated)
    write_page(read_runs([first, second]), folder / "page.html")
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
    page.find_element("name", "search").clear()
    page.find_element("name", "search").send_keys("seven")
    wait(page, "return document.querySelector('.answers-card h3').textContent === 'Example 6'")
    assert examples(page) == [6]


def test_side_by_side_only_where_they_differ(page):
    put(page, "second", "1")
    assert len(page.find_elements("css selector", ".answers-answer")) == 14
    put(page, "differ", "text")
    assert examples(page) == [5, 6]
    said = page.execute_script(
        "return [...document.querySelectorAll('.answers-card:first-child .answers-answer pre')].map(e => e.textContent)"
    )
    assert said == ["five five", "six"]
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
    assert (
        page.execute_script("return document.querySelectorAll('pre *, main img, .answers b, .inspector b').length") == 0
    )
    assert (
        page.execute_script("return document.querySelectorAll('main script:not([type=\"application/json\"])').length")
        == 0
    )
    from selenium.common.exceptions import NoAlertPresentException

    with pytest.raises(NoAlertPresentException):
        page.switch_to.alert  # noqa: B018  # asking is enough


def test_a_token_lights_up_what_it_sees_and_what_sees_it(page):
    data = page.execute_script("return JSON.parse(document.getElementById('inspector-data').textContent)")
    tokens = data["records"][0]["trees"]["2"]["tokens"]
    source = next(place for place, token in enumerate(tokens) if token[5].startswith("source"))

    def lit(name: str) -> set[int]:
        script = (
            f"return [...document.querySelectorAll('.inspector-token')].flatMap((e, i) => "
            f"e.classList.contains('inspector-{name}') ? [i] : [])"
        )
        return set(page.execute_script(script))

    def keys(place: int) -> set[int]:
        return {key for key in range(tokens[place][6], place + 1) if place < tokens[key][7]}

    assert lit("current") == {source}, "what stands there first is the source of the first pair"
    for place in (source, 3, len(tokens) - 1):
        page.execute_script(
            "document.querySelectorAll('.inspector-token')[arguments[0]]"
            ".dispatchEvent(new MouseEvent('mouseover', {bubbles: true}))",
            place,
        )
        assert lit("current") == {place}
        assert lit("seen") == keys(place) - {place}
        assert lit("seeing") == {other for other in range(len(tokens)) if place in keys(other)} - {place}
        assert lit("faded") == set(range(len(tokens))) - lit("current") - lit("seen") - lit("seeing")
    assert lit("readout") == {place for place, token in enumerate(tokens) if token[5]}
    told = page.find_element("css selector", ".inspector-detail").get_attribute("textContent")
    assert f"place{len(tokens) - 1}position" in told and "must predict" in told


def test_keys_and_other_k_and_other_records(page):
    from selenium.webdriver.common.keys import Keys

    def focused() -> int:
        script = "return [...document.querySelectorAll('.inspector-token')].indexOf(document.activeElement)"
        return int(page.execute_script(script))

    page.execute_script("document.querySelector('.inspector-token[tabindex=\"0\"]').focus()")
    begin = focused()
    tree = page.execute_script("return JSON.parse(document.getElementById('inspector-data').textContent).records[0]")
    starts = [0, *(branch["end"] for branch in tree["trees"]["2"]["branches"])]
    own = max(start for start in starts if start <= begin)
    for key, expected in (
        (Keys.ARROW_LEFT, begin - 1),
        (Keys.ARROW_RIGHT, begin),
        (Keys.HOME, own),
        (Keys.ARROW_UP, starts[starts.index(own) - 1]),
        (Keys.ARROW_DOWN, own),
    ):
        page.switch_to.active_element.send_keys(key)
        assert focused() == expected
    rows = {}
    for count in (1, 2, 3):
        page.execute_script("document.querySelector(`[name=count][value='${arguments[0]}']`).click()", count)
        rows[count] = len(page.find_elements("css selector", ".inspector-token"))
        assert rows[count] == rows[1] + count - 1
    page.execute_script(
        "const field = document.querySelector('.inspector [name=record]'); field.value = '2';"
        "field.dispatchEvent(new Event('change', {bubbles: true}))"
    )
    assert len(page.find_elements("css selector", ".inspector-branch")) == 1, "one step makes no pair"


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
    red, green, blue = (
        int(part)
        for part in re.findall(r"\d+", page.execute_script("return getComputedStyle(document.body).backgroundColor"))[
            :3
        ]
    )
    assert (red + green + blue > 3 * 128) is (theme == "light")


def test_points_change_colour_and_keep_hostile_labels_as_text(browser, tmp_path, monkeypatch):
    run = read_runs([make_run(tmp_path / "run", "1011010")])[0]
    save(make_analysis("steps", 1000, path=str(run.folder)), tmp_path)
    section = embedding_section(run, tmp_path)
    monkeypatch.setattr(page_module, "_sections", lambda *_: iter([section]))
    write_page([run], tmp_path / "page.html")
    browser.get_log("browser")
    browser.get(f"file://{tmp_path / 'page.html'}")
    points = "return document.querySelectorAll('#scatter-0-pca .point').length"
    assert wait(browser, points) == 26
    names = "return document.getElementById('scatter-0-pca').data.map(trace => trace.name)"
    assert browser.execute_script(names) == ["next step", "step"]
    for choice, expected in {"step": ["step 1", "step 2", "step 3"], "right or wrong": ["right", "wrong"]}.items():
        browser.execute_script(
            "const field = document.querySelector('.scatter select'); field.value = arguments[0];"
            "field.dispatchEvent(new Event('change'))",
            choice,
        )
        assert browser.execute_script(names) == expected and browser.execute_script(points) == 26
    assert browser.execute_script("return document.querySelector('figcaption').textContent") == "<b>model, PCA"
    assert browser.get_log("browser") == []


def test_twenty_thousand_answers_open_at_once(browser, tmp_path):
    count = 20_000
    run = make_run(tmp_path / "run", "10" * (count // 2))
    say(
        run,
        prompt=[f"system: answer the question\nWhat is the sum of {i} and {7 * i}? " * 3 for i in range(count)],
        truth=[str(8 * place) for place in range(count)],
        generated=[f"it says {place} " * 11 for place in range(count)],
    )
    file = tmp_path / "page.html"
    write_page(read_runs([run]), file)
    browser.get_log("browser")
    browser.get(f"file://{file}")
    loaded = wait(browser, "return performance.getEntriesByType('navigation')[0].loadEventEnd")
    print(f"\n{count:,} answers, {file.stat().st_size / 1e6:.1f} MB: loaded after {loaded:.0f} ms")
    # The aim is 2 s on a machine at rest, where it takes a seventh of that; tests share theirs.
    assert loaded < 5_000
    assert len(examples(browser)) == 20, "one page of cards, however many there are"
    assert "20,000 of 20,000" in browser.find_element("css selector", ".answers-status").text
    put(browser, "search", "says 19999 ")
    assert examples(browser) == [19_999]
    assert browser.get_log("browser") == []

"""The whole page: one file, nothing from elsewhere, no script but its own, whatever runs are called and models say."""

import base64
import hashlib
import json
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from test_sections import say

from bad_runs import DAMAGED, damage
from made_up_runs import STEP_JEPA, change, evaluate, log, make_run
from stepjepa.base.errors import UserError
from stepjepa.base.terminal import PALETTE
from stepjepa.cli.main import main
from stepjepa.study.page.answers import LONGEST, shown_text
from stepjepa.study.page.logged_run import read_runs
from stepjepa.study.page.page import make_page

HOSTILE = (
    "<img src=x onerror=\"document.title='caught'\"><script>document.title='caught'</script>{{ 7 * 7 }}&amp;\u202e"
)


@pytest.fixture
def hostile(tmp_path):
    """Two arms in whose every text somebody has put markup."""
    folders = []
    for place, jepa in enumerate((None, STEP_JEPA)):
        folder = make_run(
            tmp_path / f"{place}<img src=x onerror=document.title='caught'>\x1b[31m",
            "110",
            jepa=jepa,
            command=["train", HOSTILE],
            versions={HOSTILE: HOSTILE},
            order=None,
        )
        log(folder, views=True, **{f"eval_answer_{HOSTILE}": 0.5})
        change(folder / "run.json", "training", "lr_scheduler_type", to=HOSTILE if place else "linear")
        for name, value in {"errors": {HOSTILE: 1}, "test_file": HOSTILE, "task": HOSTILE}.items():
            change(folder / "test.summary.json", name, to=value)
        say(folder, prompt=HOSTILE, truth=HOSTILE, generated=HOSTILE, extracted=HOSTILE)
        evaluate(folder, "1", name=HOSTILE.replace("/", "|"))
        folders.append(folder)
    return folders


def scripts(page: str) -> list[str]:
    return re.findall(r"<script>(.*?)</script>", page, re.DOTALL)


def test_no_control_character_reaches_the_page(hostile):
    page = make_page(read_runs(hostile))
    assert "\\x1b[31m" in page
    assert not {"\x1b", "\u202e"} & set(page)


def test_the_policy_allows_the_scripts_of_the_page_and_nothing_else(arms):
    page = make_page(read_runs(arms))
    assert "<title>regular, step-jepa: 6 runs</title>" in page
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)[1].replace("&#39;", "'")
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    allowed = set(re.findall(r"'sha256-([^']+)'", policy))
    digests = [hashlib.sha256(script.encode()).digest() for script in scripts(page)]
    assert allowed == {base64.b64encode(digest).decode() for digest in digests}
    assert "unsafe-eval" not in policy and "script-src 'unsafe-inline'" not in policy and "http" not in policy
    # Browsers normalise line ends before they hash scripts.
    assert "\r" not in page


def test_the_page_of_three_runs_is_small(arms):
    assert len(make_page(read_runs(arms[::2])).encode()) < 200_000


def test_nothing_is_loaded_from_elsewhere(arms):
    page = make_page(read_runs(arms))
    own = re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)
    assert all(
        place.startswith(("#", "data:"))
        for place in re.findall(r"(?:src|href|data|poster|action)\s*=\s*[\"']?([^\"'>\s]*)", own)
    )
    assert re.search(r"<style>.*?</style>", page, re.DOTALL) and "@import" not in page.partition("</head>")[0]


def test_sections_are_linked_in_order_and_have_names_of_their_own(arms):
    page = re.sub(r"<(script|style).*?</\1>", "", make_page(read_runs(arms)), flags=re.DOTALL)
    anchors = re.findall(r'<li><a href="#([^"]+)">', page)
    assert anchors == ["arms", "steps", "accuracy", "overview"]
    assert re.findall(r'<section id="([^"]+)"', page) == anchors
    names = re.findall(r'\bid="([^"]+)"', page)
    assert len(names) == len(set(names))


def test_the_outcome_comes_first_also_where_nothing_is_compared(arms):
    page = make_page(read_runs(arms[:1]))
    assert re.findall(r'<li><a href="#([^"]+)">', page) == ["accuracy", "steps", "overview"]


def test_a_trial_of_a_sweep_is_named_with_its_arm(arms):
    (arms[0].parents[1] / "sweep.json").write_text("{}", encoding="utf-8")
    assert [run.name for run in read_runs(arms[:1])] == ["regular/seed2"]
    assert [run.name for run in read_runs(arms[:2])] == ["regular/seed2", "regular/seed3"]


def test_markup_in_runs_stays_text(hostile):
    page = make_page(read_runs(hostile))
    own = re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)
    assert "<img src=x" not in own and "{{ 7" in own and "&lt;img src=x" in own
    assert all("caught" not in script for script in scripts(page))


def test_a_text_that_is_too_long_is_cut_and_says_so():
    assert shown_text("é" * LONGEST) == "é" * LONGEST
    assert shown_text("é" * LONGEST + "the end") == "é" * LONGEST + "\n[... 7 more characters]"


def test_a_damaged_file_of_answers_is_a_note(arms):
    (arms[0] / "test.jsonl").write_text("{", encoding="utf-8")
    page = make_page(read_runs(arms))
    assert "The section on answers is missing: " in page
    assert "The runs are not compared: " in page
    assert 'id="steps"' in page


@pytest.mark.parametrize("seed", range(3))
def test_damaged_runs_make_a_page_or_an_error_of_one_line(seed, arms):
    chance = random.Random(seed)
    damage(chance, chance.choice(arms) / chance.choice([*DAMAGED, "metrics.jsonl"]))
    try:
        page = make_page(read_runs(arms))
    except UserError:
        return
    assert page.startswith("<!doctype html>")


def test_the_command_writes_a_page_and_overwrites_only_when_told(arms, tmp_path, capsys):
    target = tmp_path / "out" / "report.html"
    # Half of a character, which UTF-8 can't encode.
    text = (arms[0] / "run.json").read_text(encoding="utf-8")
    (arms[0] / "run.json").write_text(text.replace("preset:tiny", "\\ud800"), encoding="utf-8")
    given = ["report", *map(str, arms), "--output_file", str(target)]
    assert main(given) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"written: {target} (") and printed.out.count("\n") == 1
    assert "<title>6 runs</title>" in target.read_text(encoding="utf-8")
    before = target.read_bytes()
    assert main(given) == 2
    assert "already exists; name another file or pass --overwrite" in capsys.readouterr().err
    assert main([*given, "--overwrite"]) == 0
    assert target.read_bytes() == before
    assert [path.name for path in target.parent.iterdir()] == ["report.html"]
    for flags, message in [(["--analysis", "nowhere"], "holds no analysis"), (["--baseline", "none"], "'none'")]:
        assert main([*given, "--overwrite", *flags]) == 2
        assert message in capsys.readouterr().err
    assert main([*given[:2], *given[-2:], "--overwrite", "--baseline", "none"]) == 2
    assert "--baseline: no evaluation that two finished runs have" in capsys.readouterr().err


def open_page(browser, path: Path) -> None:
    """Open a page, whose charts are drawn as soon as it is loaded."""
    browser.get_log("browser")
    browser.get(path.as_uri())


def test_the_page_in_a_browser(browser, hostile, tmp_path):
    target = tmp_path / "page.html"
    target.write_text(make_page(read_runs(hostile)), encoding="utf-8")
    open_page(browser, target)
    drawn, charts = (f"return document.querySelectorAll('.chart{more}').length" for more in (" > svg g.line path", ""))
    assert browser.execute_script(drawn) >= browser.execute_script(charts) > 6
    assert browser.execute_script("return document.querySelectorAll('img:not([alt]), [onerror]').length") == 0
    assert browser.title.startswith("regular ") and browser.title.endswith(": 2 runs")
    message = [line for line in browser.get_log("browser") if line["level"] in ("SEVERE", "WARNING")]
    assert message == []
    # Markup that got into a page would do nothing there.
    browser.execute_script(
        "document.body.insertAdjacentHTML('beforeend', `<img src=x onerror=\"document.title = 'caught'\">`);"
        "const script = document.createElement('script'); script.textContent = \"document.title = 'caught'\";"
        "document.body.append(script)"
    )
    assert browser.title.startswith("regular ") and browser.title.endswith(": 2 runs")
    assert "Content Security Policy" in " ".join(line["message"] for line in browser.get_log("browser"))


def test_theme_legend_and_width_in_a_browser(browser, arms, tmp_path):
    target = tmp_path / "page.html"
    target.write_text(make_page(read_runs(arms)), encoding="utf-8")
    open_page(browser, target)
    ink = "return getComputedStyle(document.body).color"
    before = browser.execute_script(ink)
    browser.execute_script("document.getElementById('theme').click()")
    after = browser.execute_script(ink)
    assert before != after
    assert browser.find_element("id", "theme").get_attribute("aria-pressed") in ("true", "false")
    colour = "return getComputedStyle(document.querySelector('#steps-0 text.tick')).fill"
    assert browser.execute_script(colour) == after
    # A box hides its run in all charts of all sections, the button of an arm all its runs, and shows them again.
    lines = "return document.querySelectorAll('#steps-0 g.line').length"
    assert browser.execute_script(lines) == 6
    browser.execute_script("document.querySelector('[data-legend] input').click()")
    assert browser.execute_script(lines) == 5
    arm = "document.querySelector('[data-legend] button').click()"
    browser.execute_script(f"{arm}; {arm}")
    assert browser.execute_script(lines) == 3
    browser.execute_script(f"{arm}; document.querySelector('[data-legend] input').click()")
    assert browser.execute_script(lines) == 5
    boxes = "return [...document.querySelectorAll('[data-legend] input')].filter((each) => !each.checked).length"
    assert browser.execute_script(boxes) == browser.execute_script(
        "return document.querySelectorAll('[data-legend]').length"
    )


@pytest.mark.slow
def test_a_dark_page_is_printed_and_a_chart_saved_in_colours_that_can_be_read(browser, arms, tmp_path):
    target = tmp_path / "page.html"
    target.write_text(make_page(read_runs(arms)), encoding="utf-8")
    open_page(browser, target)
    pressed = browser.find_element("id", "theme").get_attribute("aria-pressed")
    if pressed == "false":
        browser.execute_script("document.getElementById('theme').click()")
    colours = "return [getComputedStyle(document.body).color, getComputedStyle(document.querySelector('.tick')).fill]"
    dark = browser.execute_script(colours)
    saved = browser.execute_async_script(
        "HTMLAnchorElement.prototype.click = () => {};"
        "URL.createObjectURL = (blob) => { blob.text().then(arguments[0]); return ''; };"
        "document.querySelector('.save').click()"
    )
    assert dark[0] == dark[1] and f'color="{dark[0]}"' in saved
    # With its title and the names of its lines.
    assert all(f">{text}</text>" in saved for text in ("loss", *(run.name for run in read_runs(arms))))
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        paper = browser.execute_script(colours)
        assert paper[0] == paper[1] != dark[0]
        assert browser.execute_script("return getComputedStyle(document.querySelector('figure img')).filter") == "none"
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
        browser.execute_script("localStorage.clear()")


@pytest.mark.slow
def test_curves_are_in_the_first_screenshot(browser, arms, tmp_path):
    """As of a program that takes a picture of the page as soon as it is loaded."""
    from matplotlib import image

    target, picture = tmp_path / "page.html", tmp_path / "page.png"
    target.write_text(make_page(read_runs(arms)), encoding="utf-8")
    program = browser.capabilities["goog:chromeOptions"].get("binary") or shutil.which("chromium")
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1280,2400", f"--screenshot={picture}"]
    subprocess.run([program, *flags, target.as_uri()], check=True, capture_output=True, timeout=120)
    pixels = (255 * image.imread(picture)[1000:, :, :3]).round().astype(int)
    colour = [int(PALETTE[1][place : place + 2], 16) for place in (1, 3, 5)]
    # The legend alone has some 200.
    assert (abs(pixels - colour).sum(2) < 20).sum() > 2000


def phone(browser, width: int = 390) -> None:
    about = {"width": width, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", about)


@pytest.mark.slow
def test_on_a_phone_neither_the_page_nor_a_table_scrolls_sideways(browser, arms, tmp_path):
    target = tmp_path / "page.html"
    target.write_text(make_page(read_runs(arms)), encoding="utf-8")
    phone(browser)
    try:
        open_page(browser, target)
        browser.execute_script("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
        wide = "return [...document.querySelectorAll('div.scroll')].filter((e) => e.scrollWidth > e.clientWidth).length"
        assert browser.execute_script(wide) == 0
        assert browser.execute_script("return document.querySelectorAll('div.scroll').length") > 3
        # The captions of pictures are wrapped, and stay where they are when a picture is scrolled.
        script = "return [...document.querySelectorAll('figure.scroll figcaption')].map((e) => { "
        script += (
            "e.parentElement.scrollLeft = 99; const box = e.getBoundingClientRect(); return [box.left, box.right]; })"
        )
        places = browser.execute_script(script)
        assert places and all(left >= 0 and right <= 390 for left, right in places)
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.slow
def test_a_point_has_a_tooltip_a_drag_zooms_and_a_double_click_shows_all(browser, arms, tmp_path):
    from selenium.webdriver.common.action_chains import ActionChains

    target = tmp_path / "page.html"
    target.write_text(make_page(read_runs(arms)), encoding="utf-8")
    open_page(browser, target)
    svg = browser.find_element("css selector", "#steps-0 > svg")
    ActionChains(browser).move_to_element(svg).perform()
    tooltip = browser.find_element("css selector", "#steps-0 .tooltip")
    name, numbers = tooltip.text.splitlines()
    assert name in {run.name for run in read_runs(arms)} and re.fullmatch(r"step \d+: [\d.]+", numbers)
    steps = "return [...document.querySelectorAll('#steps-0 text:not(.tick)')].map((e) => e.textContent).slice(0, -1)"
    everything = browser.execute_script(steps)
    assert everything[0] == "0"
    ActionChains(browser).move_to_element(svg).click_and_hold().move_by_offset(120, 0).release().perform()
    assert browser.execute_script(steps)[0] != "0"
    ActionChains(browser).double_click(svg).perform()
    assert browser.execute_script(steps) == everything
    # A drag that ends outside of the chart ends there.
    title = browser.find_element("css selector", "#steps h2")
    ActionChains(browser).move_to_element(svg).click_and_hold().move_to_element(title).release().perform()
    assert browser.execute_script(steps) != everything
    ActionChains(browser).move_to_element(svg).perform()
    assert (
        browser.execute_script("return document.querySelector('#steps-0 svg > rect').getAttribute('visibility')")
        == "hidden"
    )


def test_an_axis_of_one_value_shows_no_rounding(browser, arms, tmp_path):
    for run in arms:
        log(run, 7, lbd=0.1, grad_norm=1.0, learning_rate=0.0, eval_answer_exact=0.0, eval_answer_prefix=0.99)
        text = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        lines = [json.loads(line) | {"grad_norm": 1 + 1e-16 * place} for place, line in enumerate(text)]
        lines = [line | {"learning_rate": 1e-17 * place} for place, line in enumerate(lines)]
        (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    target = tmp_path / "page.html"
    target.write_text(make_page(read_runs(arms)), encoding="utf-8")
    open_page(browser, target)
    result = browser.execute_script(
        "return Object.fromEntries([...document.querySelectorAll('.chart')].map((chart) =>"
        "[chart.dataset.title, [...chart.querySelectorAll('text.tick')].map((e) => e.textContent)]))"
    )
    assert result["lbd"] == ["0.09", "0.095", "0.1", "0.105", "0.11"]
    assert result["grad norm"] == ["0.9", "0.95", "1", "1.05", "1.1"]
    assert result["learning rate"] == ["0", "0.2", "0.4", "0.6", "0.8", "1"]
    # Shares: no axis is below 0 % or above 100 %.
    assert result["answers: exact match"] == ["0%", "20%", "40%", "60%", "80%", "100%"]
    assert result["answers: prefix"] == ["90%", "95%", "100%"]


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_contrast_pictures_follow_the_theme_and_keys_reach_everything(theme, browser, arms, tmp_path):
    from selenium.webdriver.support.wait import WebDriverWait

    target = tmp_path / "page.html"
    target.write_text(make_page(read_runs(arms)), encoding="utf-8")
    media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    try:
        open_page(browser, target)
        # Another test may have chosen a theme by hand, which another process of the browser may still remember.
        browser.execute_script("localStorage.clear()")

        def follows_the_system(_: object) -> bool:
            open_page(browser, target)
            return browser.execute_script("return document.documentElement.dataset.theme === undefined")

        WebDriverWait(browser, 20).until(follows_the_system)
        # Contrast as WCAG 2 defines it, of every element with text of its own against the nearest background.
        least = browser.execute_script("""
            const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
            const light = (colour) => { const [r, g, b] = numbers(colour).map((each) => each / 255)
              .map((each) => each <= .04045 ? each / 12.92 : ((each + .055) / 1.055) ** 2.4);
              return .2126 * r + .7152 * g + .0722 * b; };
            const behind = (element) => { for (let at = element; at; at = at.parentElement) {
              const colour = getComputedStyle(at).backgroundColor;
              if ((numbers(colour)[3] ?? 1) > 0) return colour; } return "rgb(255, 255, 255)"; };
            const own = [...document.querySelectorAll("body *")].filter((element) => element.checkVisibility() &&
              [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim()));
            return Math.min(...own.map((element) => { const style = getComputedStyle(element);
              const [one, two] = [light(element.closest("svg") ? style.fill : style.color), light(behind(element))];
              return (Math.max(one, two) + .05) / (Math.min(one, two) + .05); }));
        """)
        assert least >= 4.5
        picture = "return getComputedStyle(document.querySelector('figure img')).filter"
        assert browser.execute_script(picture).startswith("none" if theme == "light" else "invert")
        reached = browser.execute_script(
            "return [...document.querySelectorAll('a[href], button, input, summary, [tabindex=\"0\"]')]"
            ".every((each) => { each.focus(); return document.activeElement === each || !each.checkVisibility(); })"
        )
        assert reached
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})

"""The whole page: one file, nothing from elsewhere, no script but its own, whatever runs are called and models say."""

import base64
import hashlib
import random
import re
from pathlib import Path

import pytest
from test_sections import say

from bad_runs import DAMAGED, damage
from made_up_runs import STEP_JEPA, change, evaluate, log, make_run
from stepjepa.base.errors import UserError
from stepjepa.cli.main import main
from stepjepa.study.page.logged_run import read_runs
from stepjepa.study.page.page import LONGEST, make_page, shown_text

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
    # But for Plotly's own script.
    library = r'<script type="text/plain" id="plotly">.*?</script>'
    page = re.sub(library, "", make_page(read_runs(hostile)), flags=re.DOTALL)
    assert "\\x1b[31m" in page
    assert not {"\x1b", "\u202e"} & set(page)


def test_the_policy_allows_the_scripts_of_the_page_and_nothing_else(arms):
    page = make_page(read_runs(arms))
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)[1].replace("&#39;", "'")
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    allowed = set(re.findall(r"'sha256-([^']+)'", policy))
    library = re.search(r'<script type="text/plain" id="plotly">(.*?)</script>', page, re.DOTALL)[1]
    digests = [hashlib.sha256(script.encode()).digest() for script in (*scripts(page), library)]
    assert allowed == {base64.b64encode(digest).decode() for digest in digests}
    assert "unsafe-eval" not in policy and "script-src 'unsafe-inline'" not in policy and "http" not in policy
    # As a browser reads them.
    assert "\r" not in library and "</script" not in library.lower()


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
    assert anchors == ["arms", "accuracy", "steps", "overview"]
    assert re.findall(r'<section id="([^"]+)"', page) == anchors
    names = re.findall(r'\bid="([^"]+)"', page)
    assert len(names) == len(set(names))


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
    assert "is there already; name another file or pass --overwrite" in capsys.readouterr().err
    assert main([*given, "--overwrite"]) == 0
    assert target.read_bytes() == before
    assert [path.name for path in target.parent.iterdir()] == ["report.html"]
    for flags, told in [(["--analysis", "nowhere"], "holds no analysis"), (["--baseline", "none"], "'none'")]:
        assert main([*given, "--overwrite", *flags]) == 2
        assert told in capsys.readouterr().err
    assert main([*given[:2], *given[-2:], "--overwrite", "--baseline", "none"]) == 2
    assert "--baseline: no evaluation that two finished runs have" in capsys.readouterr().err


def open_page(browser, path: Path) -> None:
    """Open a page and wait until its first chart is drawn."""
    browser.get_log("browser")
    browser.get(path.as_uri())
    browser.execute_async_script(
        "const done = arguments[0]; document.querySelector('.chart').scrollIntoView();"
        "const look = () => document.querySelector('.chart[data-drawn]') ? done() : setTimeout(look, 20); look();"
    )


def test_the_page_in_a_browser(browser, hostile, tmp_path):
    target = tmp_path / "page.html"
    target.write_text(make_page(read_runs(hostile)), encoding="utf-8")
    open_page(browser, target)
    # All of them, as for printing.
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert browser.execute_script("return document.querySelectorAll('.chart:not([data-drawn])').length") == 0
    assert browser.execute_script("return document.querySelectorAll('.chart svg.main-svg').length") > 8
    assert browser.execute_script("return document.querySelectorAll('img:not([alt]), [onerror]').length") == 0
    assert browser.title == "2 runs"
    told = [line for line in browser.get_log("browser") if line["level"] in ("SEVERE", "WARNING")]
    assert told == []
    # Markup that got into a page would do nothing there.
    browser.execute_script(
        "document.body.insertAdjacentHTML('beforeend', `<img src=x onerror=\"document.title = 'caught'\">`);"
        "const script = document.createElement('script'); script.textContent = \"document.title = 'caught'\";"
        "document.body.append(script)"
    )
    assert browser.title == "2 runs"
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
    colour = "return getComputedStyle(document.querySelector('#steps-0 .ytick text')).fill"
    assert browser.execute_script(colour) == after
    # A box hides its run in all charts of all sections.
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    lines = "return document.querySelectorAll('#steps-0 .scatterlayer .trace').length"
    assert browser.execute_script(lines) == 6
    browser.execute_script("document.querySelector('[data-legend] input').click()")
    assert browser.execute_script(lines) == 5
    boxes = "return [...document.querySelectorAll('[data-legend] input')].filter((each) => !each.checked).length"
    assert browser.execute_script(boxes) == browser.execute_script(
        "return document.querySelectorAll('[data-legend]').length"
    )

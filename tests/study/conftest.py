"""Runs that several modules compare and show, and a browser to show them in."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from made_up_runs import STEP_JEPA, log, make_run

LLM = {"mode": "llm-jepa", "lbd": 0.5}
# Of eight examples, right by the headline, for each seed.
REGULAR = {23: "11000000", 37: "11100000", 82: "10000000"}
JEPA = {23: "11110000", 37: "11100100", 82: "11110000"}


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Three seeds of two arms, the method's in another order."""
    made = [make_run(tmp_path / f"regular-{seed}", right, seed=seed) for seed, right in REGULAR.items()]
    for seed in (82, 23, 37):
        made.append(make_run(tmp_path / f"jepa-{seed}", JEPA[seed], seed=seed, jepa=LLM, tokens=1500.0))
    return made


CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Debian's Chromium without a window, whose console is kept: ``browser.get_log("browser")``."""
    webdriver = pytest.importorskip("selenium.webdriver")
    if CHROMIUM is None or DRIVER is None:
        (pytest.fail if os.environ.get("STEPJEPA_BROWSER") else pytest.skip)("needs chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "window-size=1280,3000"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    # A machine that is busy with other things takes its time.
    driver.command_executor.client_config.timeout = 240
    driver.set_page_load_timeout(120)
    driver.set_script_timeout(120)
    yield driver
    driver.quit()


@pytest.fixture
def arms(tmp_path: Path) -> list[Path]:
    """Regular training and Step-JEPA with three seeds each: 1, 2 and 1 against 2, 2 and 3 of four examples right."""
    folders = []
    rights = {"regular": ("1000", "1100", "0100"), "step": ("1100", "1100", "1110")}
    for name, right in rights.items():
        jepa = None if name == "regular" else STEP_JEPA
        for seed, each in zip((2, 3, 5), right, strict=True):
            folder = make_run(tmp_path / name / f"seed{seed}", each, seed=seed, jepa=jepa, lenient="1110")
            log(folder, views=jepa is not None)
            folders.append(folder)
    return folders

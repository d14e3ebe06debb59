"""What a release says of itself is the same everywhere; ``make release-check`` builds and checks the archives, too."""

from __future__ import annotations

import re

import yaml

import release


def test_the_version_is_the_same_everywhere() -> None:
    named = release.versions()
    assert len({*named.values()}) == 1, named


def test_ci_tests_the_versions_of_python_that_the_metadata_name() -> None:
    named, tested = release.pythons()
    assert named == tested and len(named) > 2
    oldest = str(release.project()["requires-python"]).removeprefix(">=")
    assert named[0] == oldest


def test_links_of_all_pages_lead_somewhere() -> None:
    assert release.broken_links() == []


def test_ci_runs_targets_that_the_makefile_has() -> None:
    steps = [
        step.get("run", "")
        for job in yaml.safe_load(release.read(".github/workflows/ci.yml"))["jobs"].values()
        for step in job["steps"]
    ]
    named = [target for step in steps for target in re.findall(r"^make ([\w-]+)", step, re.MULTILINE)]
    assert {"setup", "check", "test"} <= {*named}
    targets = re.findall(r"^([a-z-]+):", release.read("Makefile"), re.MULTILINE)
    assert {*named} <= {*targets}


def test_forms_for_issues_are_valid() -> None:
    for name in ("bug", "idea"):
        form = yaml.safe_load(release.read(f".github/ISSUE_TEMPLATE/{name}.yml"))
        assert form["name"] and form["description"]
        assert all(part["type"] in ("textarea", "input") and part["attributes"]["label"] for part in form["body"])

"""Check what a release consists of: ``python tests/release.py dist`` after a build; ``make release-check`` does both.

Prints one line for each check and ends with exit code 1 if one has failed.
"""

from __future__ import annotations

import email
import re
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)(?:#[^)\s]*)?\)")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def project() -> dict[str, object]:
    """The table ``[project]`` of ``pyproject.toml``."""
    table: dict[str, object] = tomllib.loads(read("pyproject.toml"))["project"]
    return table


def versions() -> dict[str, str | None]:
    """The version that each file of the checkout names; None where it names none."""
    released = re.search(r"^## (\d+\.\d+\.\d+)", read("CHANGELOG.md"), re.MULTILINE)
    imported = re.search(r'^__version__ = "([^"]+)"', read("src/stepjepa/__init__.py"), re.MULTILINE)
    return {
        "pyproject.toml": str(project()["version"]),
        "src/stepjepa/__init__.py": imported and imported[1],
        "CITATION.cff": str(yaml.safe_load(read("CITATION.cff"))["version"]),
        "CHANGELOG.md": released and released[1],
    }


def unreleased() -> str:
    """What the change log has under "Unreleased"."""
    section = re.search(r"^## Unreleased$(.*?)(?=^## |\Z)", read("CHANGELOG.md"), re.MULTILINE | re.DOTALL)
    return section[1].strip() if section else ""


def pythons() -> tuple[list[str], list[str]]:
    """The versions of Python in the metadata, and those that CI tests."""
    marks = (str(each) for each in project()["classifiers"])  # type: ignore[attr-defined]  # a list of texts
    named = [each.rpartition(" ")[2] for each in marks if re.search(r":: 3\.\d+$", each)]
    jobs = yaml.safe_load(read(".github/workflows/ci.yml"))["jobs"]
    return named, jobs["test"]["strategy"]["matrix"]["python"]


def broken_links() -> list[str]:
    """Relative links of all Markdown files that lead nowhere."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    return [
        f"{page.relative_to(ROOT)}: {link}"
        for page in pages
        for link in _LINK.findall(re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL))
        if not (page.parent / link).exists() and not link.startswith(("reference/", "../reference/"))
    ]


def _wheel(path: Path) -> tuple[list[str], Message]:
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        about = next(name for name in names if name.endswith(".dist-info/METADATA"))
        return names, email.message_from_bytes(archive.read(about))


def _sdist(path: Path) -> tuple[list[str], Message]:
    with tarfile.open(path) as archive:
        names = archive.getnames()
        stream = archive.extractfile(f"{names[0].partition('/')[0]}/PKG-INFO")
        assert stream is not None
        return names, email.message_from_bytes(stream.read())


def checks(dist: Path) -> Iterator[tuple[str, object]]:
    """Yield the name of each check and what is wrong; nothing (an empty value) where all is well."""
    result, table = versions(), project()
    yield "the same version everywhere", result if len({*result.values()}) > 1 else ""
    yield "nothing under Unreleased in CHANGELOG.md", unreleased()[:60]
    named, tested = pythons()
    yield "CI tests the versions of Python that the metadata name", "" if named == tested else (named, tested)
    yield "links of Markdown files", broken_links()
    wheels, sources = [*dist.glob("*.whl")], [*dist.glob("*.tar.gz")]
    yield "one wheel, one sdist", "" if len(wheels) == len(sources) == 1 else f"{len(wheels)} and {len(sources)}"
    if len(wheels) != 1 or len(sources) != 1:
        return
    for path, (names, about) in ((wheels[0], _wheel(wheels[0])), (sources[0], _sdist(sources[0]))):
        expected = (table["name"], table["version"], table["requires-python"], table["license"])
        read_back = tuple(about[name] for name in ("Name", "Version", "Requires-Python", "License-Expression"))
        yield f"{path.name}: metadata", "" if read_back == expected else (read_back, expected)
        templates = [path.name for path in (ROOT / "src/stepjepa/study/page/templates").iterdir()]
        wanted = [*templates, "py.typed", "nl_rx_grammar.yaml", "LICENSE"]
        yield f"{path.name}: files", [each for each in wanted if not any(name.endswith(f"/{each}") for name in names)]
        strays = [name for name in names if re.search(r"__pycache__|\.pyc$|/runs/|/site/|\.safetensors$", name)]
        yield f"{path.name}: nothing else", strays


def main(dist: Path) -> int:
    """Print every check; 1 if one failed."""
    failed = 0
    for name, fault in checks(dist):
        failed += bool(fault)
        print(f"FAIL  {name}: {fault}" if fault else f"PASS  {name}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

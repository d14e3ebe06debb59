"""The audit of dependencies: what was not looked up never looks audited."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]

CLEAN = {"name": "numpy", "version": "2.4.6", "vulns": []}
BAD = {
    "name": "jinja2",
    "version": "2.0",
    "vulns": [{"id": "PYSEC-1", "fix_versions": ["2.1", "3.0"]}, {"id": "PYSEC-2", "fix_versions": []}],
}
SKIPPED = {"name": "torch", "skip_reason": "Dependency not found"}


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", ROOT / ".ci" / "audit.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def program(path: Path, answers: dict[str, str]) -> str:
    """A stand-in for pip-audit that answers by service."""
    path.write_text(
        f"#!{sys.executable}\nimport sys\n"
        f"print({answers!r}[sys.argv[sys.argv.index('--vulnerability-service') + 1]])\n",
        encoding="utf-8",
    )
    path.chmod(0o755)
    return str(path)


def test_what_is_vulnerable_and_what_was_not_looked_up(audit: ModuleType) -> None:
    lines, code = audit.report([CLEAN, BAD, SKIPPED])
    assert code == 1
    assert lines == [
        "VULNERABLE  jinja2 2.0: PYSEC-1, fixed in 2.1, 3.0",
        "VULNERABLE  jinja2 2.0: PYSEC-2, fixed in no version",
        "NOT AUDITED: 1 of 3 packages could not be looked up: torch",
        "audited: 2 of 3 packages, 1 with known vulnerabilities",
    ]
    assert audit.report([CLEAN]) == (["audited: 1 of 1 packages, 0 with known vulnerabilities"], 0)


@pytest.mark.parametrize(
    ("answers", "code", "words"),
    [
        ({"pypi": [CLEAN], "osv": None}, 0, "audited: 1 of 1 packages, 0 with"),
        ({"pypi": [SKIPPED], "osv": [BAD]}, 1, "VULNERABLE  jinja2 2.0"),
        ({"pypi": [SKIPPED], "osv": None}, 0, "NOT AUDITED: 1 of 1 packages could not be looked up: torch"),
        ({"pypi": None, "osv": None}, 0, "NOT AUDITED: no advisory database could be reached"),
    ],
)
def test_the_second_service_is_asked_where_the_first_knows_nothing(
    answers: dict[str, list[dict[str, object]] | None],
    code: int,
    words: str,
    audit: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = {name: "" if found is None else json.dumps({"dependencies": found}) for name, found in answers.items()}
    assert audit.main(program(tmp_path / "pip-audit", said), "constraints.txt") == code
    assert words in capsys.readouterr().out

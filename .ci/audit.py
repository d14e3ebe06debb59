"""Known vulnerabilities of the pinned dependencies, by pip-audit: ``audit.py PIP_AUDIT REQUIREMENTS``.

pip-audit says "no known vulnerabilities" also of packages that it could not look up. Here they are counted apart, so
that a machine without network never looks audited.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

# The databases of the Python Package Index and of OSV; the second is asked where the first knows nothing.
SERVICES = ("pypi", "osv")


def report(dependencies: list[dict[str, Any]]) -> tuple[list[str], int]:
    """What an audit came to.

    Args:
        dependencies: of pip-audit's JSON: ``name`` with ``version`` and ``vulns``, or with ``skip_reason``.

    Returns:
        Lines to be printed; and 1 where something is vulnerable, else 0.
    """
    looked_up = [each for each in dependencies if "skip_reason" not in each]
    bad = [each for each in looked_up if each["vulns"]]
    lines = []
    for each in bad:
        for found in each["vulns"]:
            fixed = ", ".join(found.get("fix_versions", [])) or "no version"
            lines.append(f"VULNERABLE  {each['name']} {each['version']}: {found['id']}, fixed in {fixed}")
    missing = len(dependencies) - len(looked_up)
    if missing:
        some = ", ".join(each["name"] for each in dependencies if "skip_reason" in each)
        lines.append(f"NOT AUDITED: {missing} of {len(dependencies)} packages could not be looked up: {some}")
    lines.append(f"audited: {len(looked_up)} of {len(dependencies)} packages, {len(bad)} with known vulnerabilities")
    return lines, int(bool(bad))


def audit(program: str, requirements: str, service: str) -> list[dict[str, Any]] | None:
    """One run of pip-audit; None where it came to nothing."""
    command = [program, "-r", requirements, "--no-deps", "--disable-pip", "--progress-spinner", "off"]
    command += ["--format", "json", "--timeout", "20", "--vulnerability-service", service]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        found: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError, TypeError):
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        print(f"{service}: pip-audit came to nothing: {last[:200]}", file=sys.stderr)
        return None
    return found


def main(program: str, requirements: str) -> int:
    """Ask one service after the other until a package has been looked up."""
    found = None
    for service in SERVICES:
        answer = audit(program, requirements, service)
        found = answer if answer is not None else found
        if found is not None and any("skip_reason" not in each for each in found):
            break
    if found is None:
        print("NOT AUDITED: no advisory database could be reached; run 'make audit' on a machine with network")
        return 0
    lines, code = report(found)
    print("\n".join(lines))
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Findings by part, as lines for people or as JSON. A finding that is ``bad`` would really fail; a ``note`` costs something."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from subnet.chain.fit import Finding, Findings

MARKS = {"ok": "ok  ", "note": "note", "bad": "BAD "}


@dataclass
class Report:
    """What was found of each part, in the order in which the parts were looked at."""

    parts: dict[str, Findings] = field(default_factory=dict[str, Findings])

    def part(self, name: str) -> Findings:
        return self.parts.setdefault(name, Findings())

    @property
    def fits(self) -> bool:
        return all(findings.fits for findings in self.parts.values())

    @property
    def bad(self) -> tuple[Finding, ...]:
        return tuple(f for findings in self.parts.values() for f in findings.found if f.level == "bad")


def lines(report: Report) -> list[str]:
    found: list[str] = []
    for name, findings in report.parts.items():
        found += [f"{MARKS[finding.level]}  {name}: {finding}" for finding in findings.found]
    return found


def as_json(report: Report) -> str:
    def of(found: Sequence[Finding]) -> list[dict[str, str]]:
        return [{"level": f.level, "what": f.what, "hint": f.hint} for f in found]

    parts = {name: of(findings.found) for name, findings in report.parts.items()}
    return msgspec.json.encode({"fits": report.fits, "parts": parts}).decode()

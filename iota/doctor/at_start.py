"""What a miner looks at before it starts: quick, and it refuses only what would really fail; the rest is a line in the log."""

from __future__ import annotations

from pathlib import Path

from loguru import logger

from iota.doctor import machine
from iota.doctor.report import Report
from iota.doctor.spec import load_spec
from subnet.errors import ConfigError


def look_before_start(directory: Path) -> None:
    """:class:`ConfigError` with everything that can't work; notes go to the log."""
    report, spec = Report(), load_spec().of("miner")
    machine.software(report.part("software"))
    machine.processor(report.part("processor"), spec)
    machine.memory(report.part("memory"), spec)
    machine.disk(report.part("disk"), directory.expanduser(), spec, measure=False)
    for name, findings in report.parts.items():
        for finding in findings.found:
            if finding.level == "note":
                logger.info("{}: {}", name, finding)
    if not report.fits:
        raise ConfigError("; ".join(map(str, report.bad)), hint="iota doctor miner says more")

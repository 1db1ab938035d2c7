"""A miner that starts with this user's session, by systemd's user units (Linux, WSL with systemd) or launchd (macOS, untested)."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal

import msgspec

from subnet.errors import ConfigError
from subnet.store.disk import atomic_write

CALL_S = 30.0
STOP_S = 90.0
UNIT = """\
[Unit]
Description=IOTA miner %i
Wants=network-online.target
After=network-online.target

[Service]
ExecStart={python} -m neurons.miner --config %E/iota/miners/%i.toml
Restart=always
RestartSec=5
# 2: a flag or a file must be mended; 4: this hotkey is convicted. Starting again is of no use before that.
RestartPreventExitStatus=2 4
# SIGTERM hands its leases back.
TimeoutStopSec=60
LimitNOFILE=65536
Nice=5
NoNewPrivileges=true

[Install]
WantedBy=default.target
"""
AGENT = """\
<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE plist PUBLIC "-//Apple//DTD PLIST 1.0//EN" "http://www.apple.com/DTDs/PropertyList-1.0.dtd">
<plist version="1.0"><dict>
<key>Label</key><string>iota.miner.{name}</string>
<key>ProgramArguments</key><array><string>{python}</string><string>-m</string><string>neurons.miner</string>
<string>--config</string><string>{settings}</string></array>
<key>RunAtLoad</key><true/>
<key>KeepAlive</key><dict><key>SuccessfulExit</key><false/></dict>
<key>ExitTimeOut</key><integer>60</integer>
<key>StandardErrorPath</key><string>{log}</string>
</dict></plist>
"""


class Unit(msgspec.Struct, frozen=True):
    """``kind`` none: neither is at hand, so a miner is started by hand."""

    kind: Literal["systemd", "launchd", "none"]

    @classmethod
    def of_this_system(cls) -> Unit:
        if platform.system() == "Darwin":
            return cls("launchd")
        if shutil.which("systemctl") is None or _run(["systemctl", "--user", "show-environment"])[0] != 0:
            return cls("none")
        return cls("systemd")

    def path(self, name: str) -> Path:
        home = Path.home()
        if self.kind == "launchd":
            return home / "Library" / "LaunchAgents" / f"iota.miner.{name}.plist"
        return home / ".config" / "systemd" / "user" / "iota-miner@.service"

    def installed(self, name: str) -> bool:
        """Whether this miner starts by itself."""
        if self.kind == "systemd":
            return _run(["systemctl", "--user", "is-enabled", f"iota-miner@{name}"])[0] == 0
        return self.kind == "launchd" and self.path(name).exists()

    def install(self, name: str) -> str:
        """Write, enable and start; what was done, in words."""
        if self.kind == "none":
            raise ConfigError(
                "this system has no user units (no systemd for this user, no launchd)",
                hint=f"leave --service out and start it by hand: iota miner start {name}",
            )
        path = self.path(name)
        if self.kind == "launchd":
            from iota.home.places import data_folder, settings_folder

            text = AGENT.format(
                name=name,
                python=sys.executable,
                settings=settings_folder() / f"{name}.toml",
                log=data_folder(name) / "miner.log",
            )
            atomic_write(path, text.encode())
            _must(["launchctl", "load", "-w", str(path)])
            return f"{path}: starts with your session (untested on macOS)"
        atomic_write(path, UNIT.format(python=sys.executable).encode())
        _must(["systemctl", "--user", "daemon-reload"])
        _must(["systemctl", "--user", "enable", "--now", f"iota-miner@{name}"])
        return (
            f"{path}: iota-miner@{name} runs, and starts with your session; also without one: loginctl enable-linger; "
            f"its log: journalctl --user -u iota-miner@{name} -f"
        )

    def stop(self, name: str) -> None:
        """Where it is installed; its leases go back."""
        if self.installed(name):
            _must(
                ["systemctl", "--user", "stop", f"iota-miner@{name}"]
                if self.kind == "systemd"
                else ["launchctl", "stop", f"iota.miner.{name}"]
            )

    def remove(self, name: str, *, last: bool) -> list[Path]:
        """Stop it and take it out; ``last``: the template goes too. Returns what was deleted."""
        if not self.installed(name):
            return []
        if self.kind == "launchd":
            _run(["launchctl", "unload", "-w", str(self.path(name))])
            self.path(name).unlink(missing_ok=True)
            return [self.path(name)]
        _must(["systemctl", "--user", "disable", "--now", f"iota-miner@{name}"])
        if not last:
            return []
        self.path(name).unlink(missing_ok=True)
        _run(["systemctl", "--user", "daemon-reload"])
        return [self.path(name)]


def _must(command: list[str]) -> None:
    status, said = _run(command)
    if status:
        raise ConfigError(f"{' '.join(command)} failed: {said[:300]}", hint="leave --service out and start it by hand")


def _run(command: list[str]) -> tuple[int, str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=STOP_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, " ".join((done.stderr or done.stdout).split())

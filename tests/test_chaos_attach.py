"""Faults on a swarm that another command started: by process id, never a stranger's; it starts again what died."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from test_swarm import ROOT, RUN

from iota.chaos.attach import AttachedGround
from iota.chaos.faults import NoEffect
from iota.chaos.journal import ChaosJournal, read_journal
from iota.chaos.keeper import MAX_YOUNG_ENDS, Keeper
from iota.chaos.plan import PROCESS, Disruption, Kind
from iota.chaos.roster import FILE, Roster, RosterEntry, read_roster, write_roster
from iota.chaos.runner import Chaos
from iota.chaos.swarm import free_low_port
from iota.chaos.verdict import Verdict
from iota.cli.main import main
from iota.processes import Child, ProcessFailed, started_at
from iota.swarm import LocalSwarm, SwarmOptions
from subnet.errors import ConfigError, IotaError
from subnet.timing import Deadline, ManualClock

WAIT_S = 120.0
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def roster_of(*entries: RosterEntry, restart_s: float | None = 1.0, pid: int | None = None) -> Roster:
    pid = pid or os.getpid()
    return Roster(
        pid=pid,
        started=started_at(pid) or 0,
        validator_url="http://127.0.0.1:1",
        chain_url="",
        store_url="",
        restart_s=restart_s,
        processes=entries,
    )


def entry_of(process: subprocess.Popen[bytes], name: str = "miner-0") -> RosterEntry:
    started = started_at(process.pid)
    assert started is not None
    return RosterEntry(name, process.pid, started, "its.log", "5Hotkey")


def test_a_process_is_its_id_and_its_start(sleeper: subprocess.Popen[bytes]) -> None:
    started = started_at(sleeper.pid)
    assert started == started_at(sleeper.pid)
    assert started is not None
    assert started >= (started_at(os.getpid()) or 0)
    sleeper.kill()
    deadline = Deadline.after(WAIT_S)
    while started_at(sleeper.pid) is not None:  # a zombie counts as ended
        deadline.check("the end")
        time.sleep(0.01)
    assert started_at(2**22 + 1) is None


def test_only_the_very_process_of_the_roster_is_signalled(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    entry = entry_of(sleeper)
    write_roster(tmp_path, roster_of(entry))
    ground = AttachedGround(tmp_path)
    assert ground.miners() == ("miner-0",)
    assert ground.signal("miner-0", signal.SIGSTOP, group=True) == sleeper.pid
    assert ground.signal("miner-0", signal.SIGCONT, group=True) == sleeper.pid
    stranger = msgspec.structs.replace(entry, started=entry.started - 1)  # the same id, given away again
    write_roster(tmp_path, roster_of(stranger))
    assert ground.poll() == ["miner-0 ended (see its.log)"]
    assert ground.poll() == []  # once
    assert ground.miners() == ()
    with pytest.raises(NoEffect):
        ground.signal("miner-0", signal.SIGKILL)
    with pytest.raises(NoEffect):
        ground.signal("miner-9", signal.SIGKILL)
    assert sleeper.poll() is None


def test_an_end_that_was_brought_about_is_no_failure(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    write_roster(tmp_path, roster_of(entry_of(sleeper)))
    ground = AttachedGround(tmp_path)
    ground.signal("miner-0", signal.SIGKILL)
    ground.expect_end("miner-0")
    sleeper.wait()
    assert ground.poll() == []
    assert not ground.running("miner-0")


def test_rosters_that_are_of_no_use(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    with pytest.raises(ConfigError, match="doesn't exist"):
        read_roster(tmp_path)
    (tmp_path / FILE).write_text("{")
    with pytest.raises(ConfigError, match="can't be read"):
        read_roster(tmp_path)
    write_roster(tmp_path, msgspec.structs.replace(roster_of(), version=9))
    with pytest.raises(ConfigError, match="version 9"):
        read_roster(tmp_path)
    write_roster(tmp_path, roster_of(pid=sleeper.pid))
    ground = AttachedGround(tmp_path)
    sleeper.kill()
    sleeper.wait()
    with pytest.raises(ConfigError, match="has ended"):
        read_roster(tmp_path)
    with pytest.raises(ProcessFailed, match="ended meanwhile"):
        ground.poll()
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_faults_that_cant_be_done_from_outside(tmp_path: Path) -> None:
    write_roster(tmp_path, roster_of(restart_s=None))
    ground = AttachedGround(tmp_path)
    ground.check_kinds((Kind.PAUSE, Kind.SLOW, Kind.STORE_OUTAGE))
    for kind, said in ((Kind.PARTITION, "behind proxies"), (Kind.JOIN, "of its own"), (Kind.KILL, "--restart")):
        with pytest.raises(ConfigError, match=said):
            ground.check_kinds((Kind.PAUSE, kind))


# ---- the command line


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--mtbf", "soon"], "--mtbf soon is no time"),
        (["--faults", "kill,nap"], "'nap' is unknown"),
        (["--expect", "abc"], "no run root"),
        (["--run", "nowhere.toml"], "nowhere.toml"),
        (["--attach", "."], "swarm.json doesn't exist"),
        (["--attach", ".", "--reference"], "--reference is for a swarm of its own"),
        (["--miners", "0", "--plain"], "0 miners"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["chaos", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert len(error.strip().splitlines()) == 1
    assert said in error


def test_a_directory_with_something_in_it_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    assert main(["chaos", "--dir", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["up", "--dir", str(tmp_path / "up"), "--restart", "-1"]) == 2
    assert "--restart -1" in capsys.readouterr().err


# ---- with real processes


class Small(LocalSwarm):
    """Chain, store and validator only."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, None, 1, SwarmOptions(device="cpu", start_s=WAIT_S))
        self._first_miners = 0


def test_a_keeper_starts_again_what_chaos_ends(tmp_path: Path) -> None:
    plan = (
        Disruption(number=0, at_s=0.0, kind=Kind.VALIDATOR_KILL, choice=0.0),
        Disruption(number=1, at_s=0.1, kind=Kind.VALIDATOR_KILL, choice=0.0),
        Disruption(number=2, at_s=0.0, kind=Kind.STORE_OUTAGE, choice=0.0, link=PROCESS, for_s=0.3),
    )
    with Small(tmp_path) as swarm, ChaosJournal(tmp_path / "chaos") as journal:
        keeper = Keeper(swarm, restart_s=0.1)
        keeper.tick()
        ground = AttachedGround(tmp_path)
        assert ground.roster.validator_url == swarm.validator_url
        first = ground.pid("validator")
        restarted: list[str] = []
        deadline = Deadline.after(WAIT_S)
        with Chaos(ground, plan, journal) as chaos:
            chaos.start()
            while not chaos.over:
                deadline.check("the disruptions")
                restarted += keeper.tick()
                assert ground.poll() == []
                chaos.tick(None)
                time.sleep(0.01)
        assert restarted == ["validator", "validator"]
        assert all(done.happened for done in chaos.done), chaos.done
        assert ground.pid("validator") != first
        while True:  # it serves
            try:
                assert swarm.runs() == ()
                break
            except IotaError:
                deadline.check("the validator")
                keeper.tick()
        os.kill(ground.pid("validator") or 0, signal.SIGKILL)  # somebody else
        while not (died := ground.poll()):
            deadline.check("the end")
        assert died[0].startswith("validator ended")
        keeper.close()
        assert not (tmp_path / FILE).exists()
    ended = [entry for entry in read_journal(tmp_path / "chaos") if entry.what == "ended"]
    assert {entry.kind for entry in ended} == {"validator-kill", "store-outage"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_chaos_on_the_swarm_of_iota_up(tmp_path: Path) -> None:
    """Two commands in two terminals; a paused process goes on when chaos is ended by SIGTERM."""
    (tmp_path / "book.txt").write_text((ROOT / "iota" / "assets" / "moby_dick.txt").read_text()[:60_000])
    (tmp_path / "run.toml").write_text(RUN.replace("steps = 5", "steps = 40"))
    command = [sys.executable, "-m", "iota.cli.main"]
    flags = ["--miners", "3", "--restart", "0.5", "--stay", "--plain", "--device", "cpu"]
    up = [*command, "up", str(tmp_path / "run.toml"), *flags, "--dir", str(tmp_path / "swarm")]
    attach = [*command, "chaos", "--attach", str(tmp_path / "swarm"), "--plain", "--seed", "1", "--limit", "10m"]
    with (tmp_path / "up.log").open("wb") as log:
        swarm = subprocess.Popen(up, cwd=ROOT, stdout=log, stderr=log)
    try:
        deadline = Deadline.after(WAIT_S)
        while not (tmp_path / "swarm" / FILE).exists() or "miner-2" not in (tmp_path / "swarm" / FILE).read_text():
            deadline.check("the swarm")
            assert swarm.poll() is None, (tmp_path / "up.log").read_text()
            time.sleep(0.1)
        roster = read_roster(tmp_path / "swarm")
        flags = ["--faults", "pause", "--mtbf", "1s", "--duration", "10m", "--until-finished"]
        chaos = subprocess.Popen([*attach, *flags], cwd=ROOT, stdout=subprocess.PIPE)
        assert chaos.stdout is not None
        for line in chaos.stdout:
            if line.startswith(b"pause miner"):
                break
        chaos.terminate()
        chaos.stdout.close()
        assert chaos.wait(WAIT_S) == 130
        assert not [entry.name for entry in roster.processes if state_of(entry.pid) == "T"]
        faults = ["--faults", "kill,validator-kill,preempt,rejoin", "--mtbf", "3s", "--duration", "20s"]
        done = subprocess.run(
            [*attach, *faults, "--json", "--until-finished"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        verdict = msgspec.json.decode(done.stdout, type=Verdict)
        assert verdict.ok
        assert verdict.num_disruptions >= 3
        again = subprocess.run([*attach, *flags], cwd=ROOT, capture_output=True, text=True, check=False)
        assert again.returncode == 0, again.stdout + again.stderr  # of a finished run there is nothing to lose
    finally:
        swarm.send_signal(signal.SIGINT)
        assert swarm.wait(WAIT_S) == 0
    assert not (tmp_path / "swarm" / FILE).exists()


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_who_ends_again_and_again_is_an_error_and_no_loop(tmp_path: Path) -> None:
    class Doomed:
        """A swarm whose validator ends with status 1 whenever it is started."""

        leader, directory = "validator", tmp_path
        validator_url = chain_url = store_url = ""

        def __init__(self) -> None:
            self.parent = self
            self.children = {"validator": Child("validator", tmp_path / "log", 1, 1)}
            self.starts = 0

        def check(self, *, validator: bool) -> None:
            assert not validator

        def start_validator(self, name: str) -> None:
            self.starts += 1
            self.children[name] = Child(name, tmp_path / "log", 1, 1)

    clock, swarm = ManualClock(), Doomed()
    keeper = Keeper(swarm, 1.0, clock)  # pyright: ignore

    def keep() -> None:
        for _ in range(1000):
            keeper.tick()
            clock.advance(0.5)

    with pytest.raises(ProcessFailed, match="validator ended with status 1"):
        keep()
    assert swarm.starts == MAX_YOUNG_ENDS


def test_low_ports_are_free_and_differ() -> None:
    ports: set[int] = set()
    for _ in range(5):
        ports.add(free_low_port(ports))
    assert len(ports) == 5
    assert max(ports) < 32_768

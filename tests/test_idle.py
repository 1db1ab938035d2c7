"""``--idle.only``: the rule with its hysteresis, what is looked at on a real machine, and a miner that leaves and comes back."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from miner.flop_meter import FlopMeter
from miner.idle import Idle, Looker, Sight, own_processes, told, watch_idle
from miner.idle_rule import IdleRule
from miner.log_tail import LogTail
from miner.nvml import card_of, others_on_gpu
from miner.sensors import Sensors
from subnet.errors import ConfigError

QUIET, BUSY = Sight(0.02, "", 900.0), Sight(0.6, "", 900.0)


def walked(idle: Idle, looks: list[tuple[float, Sight]]) -> list[str]:
    return [idle.step(now_s, sight) for now_s, sight in looks]


def test_it_begins_after_quiet_and_leaves_after_a_while_of_load():
    idle = Idle(IdleRule(only=True, after_s=300.0, load=0.25), 0.0)
    assert "stay idle for 200 s more" in idle.step(100.0, QUIET)
    assert walked(idle, [(299.0, QUIET), (300.0, QUIET)])[-1] == ""
    assert walked(idle, [(302.0, BUSY), (308.0, BUSY)]) == ["", ""], "a burst is no reason"
    assert idle.step(309.0, QUIET) == ""
    assert walked(idle, [(310.0, BUSY), (319.0, BUSY)]) == ["", ""]
    assert "other programs use 60% of the processors" in idle.step(320.0, BUSY)
    some = Sight(0.2, "", 900.0)
    assert "20%" in idle.step(500.0, some), "what doesn't stop it may still keep it from beginning"
    assert idle.step(799.0, QUIET) != ""
    assert idle.step(800.0, QUIET) == ""
    assert idle.step(802.0, some) == ""


@pytest.mark.parametrize(
    ("sight", "why"), [(Sight(0, "", 3), "somebody is at the keyboard"), (Sight(0, "process 7", None), "process 7 uses the GPU")]
)  # fmt: skip
def test_a_person_or_another_program_on_the_card_stops_it_at_once(sight: Sight, why: str):
    idle = Idle(IdleRule(only=True, after_s=10.0), 0.0)
    assert idle.step(10.0, QUIET) == ""
    assert why in idle.step(12.0, sight)
    assert idle.step(21.0, QUIET) != ""
    assert idle.step(23.0, QUIET) == ""


def test_what_a_system_does_not_tell_counts_as_quiet():
    idle = Idle(IdleRule(only=True, after_s=0.0), 0.0)
    assert idle.step(1.0, Sight(None)) == ""
    assert "can't be told here: user input, others on the GPU" in told(Sight(None))
    assert Idle(IdleRule(), 0.0).step(1.0, BUSY) == "", "without the flag it never rests"


def test_bounds():
    for bad in ({"after_s": -1.0}, {"load": 0.0}, {"load": 1.5}):
        with pytest.raises(ConfigError, match="--idle"):
            IdleRule(only=True, **bad)


def test_own_processes_and_their_children_are_no_others():
    code = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(30)']); time.sleep(30)"
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as process:
        try:
            found: dict[int, float] = {}
            until = time.monotonic() + 20
            while time.monotonic() < until and (len(found) < 3 or process.pid not in found):
                found = own_processes()
            assert {os.getpid(), process.pid} <= set(found)
            assert len(found) >= 3, "the child's child too"
            assert 1 not in found
        finally:
            os.killpg(process.pid, 9)


def test_load_is_looked_at_between_two_looks(tmp_path: Path):
    looker = Looker(None, tmp_path)
    assert looker.look().load is None
    time.sleep(0.2)
    sight = looker.look()
    assert sight.load is not None
    assert 0.0 <= sight.load <= 1.0
    assert (sight.gpu, sight.input_s is None or sight.input_s >= 0) == ("", True)


def test_a_terminal_that_was_read_from_is_somebody(tmp_path: Path):
    (tmp_path / "pts").mkdir()
    for name, age_s in (("pts/0", 500.0), ("pts/1", 40.0), ("tty3", 700.0), ("ttyS0", 0.0), ("pts/ptmx", 0.0)):
        (tmp_path / name).touch()
        then = time.time() - age_s
        os.utime(tmp_path / name, (then, then))
    looker = Looker(None, tmp_path)
    looker._desktop = False
    assert looker.look().input_s == pytest.approx(40.0, abs=5.0)


async def test_the_watch_tells_with_each_look_and_why():
    sights = iter([QUIET, QUIET, Sight(0.0, "", 1.0)])
    heard: list[str] = []
    done = asyncio.Event()

    def look() -> Sight:
        return next(sights, Sight(0.0, "", 1.0))

    async def rests(why: str) -> None:
        heard.append(why)
        if len(heard) == 3:
            done.set()

    task = asyncio.create_task(watch_idle(IdleRule(only=True, after_s=0.0), look, rests, 0.001))
    async with asyncio.timeout(10):
        await done.wait()
    task.cancel()
    assert heard[:2] == ["", ""]
    assert "keyboard" in heard[2]


class Library(SimpleNamespace):
    """Answers as NVIDIA's library does, for a machine without its driver."""

    class NVMLError(Exception):
        pass

    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM = 0, 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index:
            raise self.NVMLError("no such device")
        return 7

    def __getattr__(self, name: str) -> Any:
        if name not in self.__dict__.get("said", {}):

            def refuse(*_: object) -> None:
                raise self.NVMLError(name)

            return refuse
        return lambda *_: self.said[name]


def test_a_card_says_what_it_says_and_nothing_is_made_up():
    library = Library(said={
        "nvmlDeviceGetName": "H200", "nvmlDeviceGetTemperature": 61, "nvmlDeviceGetPowerUsage": 350_500,
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=3, total=8), "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=40),
    })  # fmt: skip
    card = card_of(0, library)
    assert card is not None
    assert (card.name, card.temperature_c, card.power_w, card.power_limit_w) == ("H200", 61, 350.5, None)
    assert (card.used_bytes, card.total_bytes, card.use, card.clock_mhz) == (3, 8, 0.4, None)
    assert card_of(1, library) is None


def test_others_on_a_card_are_those_that_compute_and_live():
    me = os.getpid()

    def process(pid: int, use: int = 0) -> SimpleNamespace:
        return SimpleNamespace(pid=pid, smUtil=use)

    library = Library(
        said={"nvmlDeviceGetComputeRunningProcesses": [process(me)], "nvmlDeviceGetProcessUtilization": [process(1, 3)]}
    )
    assert others_on_gpu(0, {me}, library) == ""
    library.said["nvmlDeviceGetProcessUtilization"] = [process(1, 80)]
    assert others_on_gpu(0, {me}, library) == "process 1"
    library.said["nvmlDeviceGetComputeRunningProcesses"] = [process(2**22 + 5)]
    del library.said["nvmlDeviceGetProcessUtilization"]
    assert others_on_gpu(0, {me}, library) == "", "a process of a host that isn't seen here"
    assert others_on_gpu(0, {me}, Library(said={})) is None


def test_a_processor_says_what_can_be_read_and_names_the_rest(tmp_path: Path):
    rapl = tmp_path / "energy"
    sensors = Sensors("cpu", rapl)
    view = sensors.read(1.0)
    assert view.memory_total_bytes
    assert "power" in view.unreadable
    rapl.write_text("1000000\n")
    sensors.read(2.0)
    rapl.write_text("46000000\n")
    view = sensors.read(5.0)
    assert view.power_w == pytest.approx(15.0)
    assert "power" not in view.unreadable
    assert Sensors("cuda:0").read(1.0).unreadable[0] == "temperature"


def test_mfu_counts_each_item_once_and_a_new_run_anew():
    meter = FlopMeter()
    meter.peak_flops_per_s = 1000.0
    meter.note(0.0, {}, 300.0, last_stage=False)
    meter.note(10.0, {"forward": 3, "backward": 2, "replay": 9}, 300.0, last_stage=False)
    assert meter.speed().flops_per_s == pytest.approx((3 * 100 + 2 * 200) / 10)
    assert meter.speed().mfu == pytest.approx(0.07)
    meter.note(20.0, {"forward": 1, "backward": 1}, 300.0, last_stage=False)
    assert meter.speed().flops_per_s == pytest.approx((700 + 300) / 20)
    last = FlopMeter()
    last.note(0.0, {"backward": 5}, 300.0, last_stage=True)
    last.note(1.0, {"backward": 6}, 300.0, last_stage=True)
    assert last.speed().flops_per_s == 300.0
    assert last.speed().mfu is None


def test_the_log_tail_is_cleaned_bounded_and_begins_anew_for_another_process():
    from loguru import logger

    tail = LogTail(most=3)
    end = tail.start()
    try:
        for number in range(4):
            logger.info("line {} token=abcdefghijkl", number)
        logger.debug("not this one")
        logger.warning("last")
    finally:
        end()
    logger.info("after the end")
    lines = tail.after(-1)
    assert [line.number for line in lines] == [2, 3, 4]
    assert (lines[-1].level, lines[-1].text) == ("WARNING", "last")
    assert "abcdefghijkl" not in lines[0].text
    assert tail.after(3) == lines[-1:]
    assert tail.after(4) == ()
    assert tail.after(900) == lines

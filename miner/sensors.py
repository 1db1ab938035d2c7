"""What the machine says of itself while it works: temperature, power, memory, clock, use; and what it doesn't say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import psutil

from miner.nvml import card_of

RAPL = Path("/sys/class/powercap/intel-rapl:0/energy_uj")
_PACKAGE_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "acpitz")


class MachineView(msgspec.Struct, frozen=True, kw_only=True):
    """None: not readable; ``unreadable`` says what, in words."""

    name: str
    temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    use: float | None = None
    """Share of the device in use, by whomever."""
    clock_mhz: float | None = None
    unreadable: tuple[str, ...] = ()


class Sensors:
    """Of one device: ``cpu`` or ``cuda[:N]``. :meth:`read` blocks for some milliseconds."""

    def __init__(self, device: str, rapl: Path = RAPL) -> None:
        self._device, self._rapl = device, rapl
        self._energy: tuple[float, int] | None = None

    def read(self, now_s: float) -> MachineView:
        """``now_s``: monotonic, for the power of a processor, which only counts energy."""
        if self._device.startswith("cuda"):
            return self._card(int(self._device.partition(":")[2] or 0))
        memory = psutil.virtual_memory()
        clock: Any = psutil.cpu_freq()  # None where the system doesn't say
        return _complete(
            MachineView(
                name=f"CPU, {psutil.cpu_count()} cores",
                temperature_c=_temperature(),
                power_w=self._power(now_s),
                memory_used_bytes=memory.total - memory.available,
                memory_total_bytes=memory.total,
                use=psutil.cpu_percent() / 100,
                clock_mhz=clock.current if clock is not None and clock.current > 0 else None,
            )
        )

    def _card(self, number: int) -> MachineView:
        card = card_of(number)
        if card is None:
            return _complete(MachineView(name=self._device))
        return _complete(
            MachineView(
                name=card.name,
                temperature_c=card.temperature_c,
                power_w=card.power_w,
                power_limit_w=card.power_limit_w,
                memory_used_bytes=card.used_bytes,
                memory_total_bytes=card.total_bytes,
                use=card.use,
                clock_mhz=card.clock_mhz,
            )
        )

    def _power(self, now_s: float) -> float | None:
        """Of the first package, from its counter of microjoules; most systems let only root read it."""
        try:
            energy_uj = int(self._rapl.read_text(encoding="ascii"))
        except (OSError, ValueError):
            return None
        last, self._energy = self._energy, (now_s, energy_uj)
        if last is None or now_s <= last[0] or energy_uj < last[1]:
            return None
        return (energy_uj - last[1]) / 1e6 / (now_s - last[0])


def _temperature() -> float | None:
    sensors = getattr(psutil, "sensors_temperatures", dict)()
    for name in _PACKAGE_SENSORS:
        if sensors.get(name):
            return float(sensors[name][0].current)
    return None


def _complete(view: MachineView) -> MachineView:
    names = {
        "temperature": view.temperature_c,
        "power": view.power_w,
        "memory": view.memory_total_bytes,
        "use": view.use,
        "clock": view.clock_mhz,
    }
    return msgspec.structs.replace(view, unreadable=tuple(name for name, value in names.items() if value is None))

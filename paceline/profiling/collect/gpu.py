"""Level 5: what the driver says of the GPUs. Nothing is asked of the process."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.profiling.evidence import LEVEL_NAMES, Disturbance, Figure, Gpu, Level
from paceline.profiling.statistics import mean_interval

POLL_S = 0.25
"""The driver renews its own averages four to six times a second."""

_PCIE_GB_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""A lane and direction by generation, after coding."""

_REASONS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clocks",
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons."""


@dataclass
class _Readings:
    index: int
    handle: Any
    name: str
    values: dict[str, list[float]] = field(default_factory=dict)
    reasons: list[int] = field(default_factory=list)
    is_ours: bool | None = None

    def add(self, key: str, read: Callable[[], float]) -> None:
        with contextlib.suppress(Exception):  # each card and driver lacks some of them; NVMLError is a class of theirs
            self.values.setdefault(key, []).append(float(read()))


class GpuWatch:
    """Watches all GPUs for a window.

    Args:
        pids: Processes whose GPUs are meant.
        library: ``pynvml``; tests pass their own.
    """

    def __init__(self, pids: Sequence[int], library: Any = None) -> None:
        self._pids, self._nvml, self._problem, self._fix = set(pids), library, "", ""
        self._gpus: list[_Readings] = []
        self._driver = ""
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="level-5", daemon=True)
        self._cpu_s, self._seconds = 0.0, 0.0

    def start(self) -> None:
        """Begin; where there is no driver this does nothing."""
        if self._nvml is None:
            try:
                import pynvml
            except ImportError:
                self._problem, self._fix = "nvidia-ml-py is not installed", "pip install nvidia-ml-py"
                return
            self._nvml = pynvml
        try:
            self._nvml.nvmlInit()
            self._driver = _text(self._nvml.nvmlSystemGetDriverVersion())
            for index in range(self._nvml.nvmlDeviceGetCount()):
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                self._gpus.append(_Readings(index, handle, _text(self._nvml.nvmlDeviceGetName(handle))))
        except Exception as error:
            self._problem = f"no NVIDIA driver answers ({str(error) or type(error).__name__})"
            return
        self._thread.start()

    def stop(self) -> tuple[list[Gpu], Level]:
        """End, and say what was seen."""
        self._done.set()
        if self._thread.ident is not None:
            self._thread.join()
        gpus = [self._record(gpu) for gpu in self._gpus]
        if self._thread.ident is not None:
            with contextlib.suppress(Exception):
                self._nvml.nvmlShutdown()
        level = Level(
            id="5",
            name=LEVEL_NAMES["5"],
            ok=bool(gpus),
            reason=self._problem or ("" if gpus else "the driver knows no GPU"),
            fix=self._fix,
            costs="" if gpus else "no utilisation, clocks, power and bus of a GPU",
            seconds=self._seconds,
            samples=max((len(each) for gpu in self._gpus for each in gpu.values.values()), default=0),
            disturbance=Disturbance(tool_cpu_s=self._cpu_s),
        )
        return gpus, level

    def _run(self) -> None:
        cpu, began = time.thread_time(), time.monotonic()
        for gpu in self._gpus:
            gpu.is_ours = self._is_ours(gpu)
        while not self._done.is_set():
            for gpu in self._gpus:
                self._read(gpu)
            self._done.wait(POLL_S)
        self._cpu_s, self._seconds = time.thread_time() - cpu, time.monotonic() - began

    def _read(self, gpu: _Readings) -> None:
        nvml, handle = self._nvml, gpu.handle
        gpu.add("utilisation", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
        gpu.add("memory", lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used)
        gpu.add("power", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000)
        gpu.add("clock", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        gpu.add("rx", lambda: nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_RX_BYTES) / 1e6)
        gpu.add("tx", lambda: nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_TX_BYTES) / 1e6)
        for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
            if hasattr(nvml, name):
                with contextlib.suppress(Exception):
                    gpu.reasons.append(int(getattr(nvml, name)(handle)))
                break

    def _is_ours(self, gpu: _Readings) -> bool | None:
        """Whether the driver lists one of the processes; in another pid namespace its numbers mean nothing here."""
        try:
            listed = {int(each.pid) for each in self._nvml.nvmlDeviceGetComputeRunningProcesses(gpu.handle)}
        except Exception:  # NVMLError is made at run time, and drivers lack some questions
            return None
        if listed & self._pids:
            return True
        return None if not listed or any(not _runs_here(pid) for pid in listed) else False

    def _record(self, gpu: _Readings) -> Gpu:
        nvml, handle = self._nvml, gpu.handle

        def fact(read: Callable[[], float]) -> float | None:
            try:
                return float(read())
            except Exception:
                return None

        lanes = fact(lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle))
        generation = fact(lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle))
        lane = _PCIE_GB_S.get(int(generation or 0))
        memory = gpu.values.get("memory")
        return Gpu(
            index=gpu.index,
            name=gpu.name,
            driver=self._driver,
            is_ours=gpu.is_ours,
            utilisation=_figure(gpu.values.get("utilisation"), "frac"),
            memory_used=memory[-1] if memory else None,
            memory_total=fact(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total),
            power_w=_figure(gpu.values.get("power"), "W"),
            power_limit_w=fact(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000),
            sm_clock_mhz=_figure(gpu.values.get("clock"), "MHz"),
            max_sm_clock_mhz=fact(lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)),
            pcie_rx_gb_s=_figure(gpu.values.get("rx"), "GB/s"),
            pcie_tx_gb_s=_figure(gpu.values.get("tx"), "GB/s"),
            pcie_limit_gb_s=lanes * lane if lanes and lane else None,
            limits={
                name: sum(bool(reasons & bit) for reasons in gpu.reasons) / len(gpu.reasons)
                for bit, name in _REASONS.items()
                if any(reasons & bit for reasons in gpu.reasons)
            },
        )


def _figure(values: Sequence[float] | None, unit: str) -> Figure | None:
    if not values:
        return None
    mean, low, high = mean_interval(values)
    if unit == "frac":
        low, high = max(0.0, low), min(1.0, high)
    return Figure(value=mean, interval=(max(0.0, low), high), unit=unit, level="5", samples=len(values))


def _runs_here(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb"):
            return True
    except OSError:
        return False


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)

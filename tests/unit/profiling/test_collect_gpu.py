"""The driver's figures, from a library that stands in for it."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.profiling.collect.gpu import GpuWatch


class Driver:
    """One GPU at work; like the real one it answers nothing once it is shut down, and does not know everything."""

    NVML_CLOCK_SM, NVML_PCIE_UTIL_RX_BYTES, NVML_PCIE_UTIL_TX_BYTES = 1, 2, 3

    def __init__(self, pids: list[int], name: str | bytes = "NVIDIA H200") -> None:
        self.pids, self.name, self.is_open = pids, name, False

    def nvmlInit(self) -> None:
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Any] = {
            "nvmlSystemGetDriverVersion": "580.1",
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetHandleByIndex": "handle",
            "nvmlDeviceGetName": self.name,
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=40, memory=10),
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=2 * 2**30, total=140 * 2**30),
            "nvmlDeviceGetPowerUsage": 350_000,
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetClockInfo": 1500,
            "nvmlDeviceGetMaxClockInfo": 1980,
            "nvmlDeviceGetPcieThroughput": 2_000_000,
            "nvmlDeviceGetMaxPcieLinkGeneration": 5,
            "nvmlDeviceGetMaxPcieLinkWidth": 16,
            "nvmlDeviceGetCurrentClocksEventReasons": 0x4 | 0x1,
            "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=pid) for pid in self.pids],
        }
        if name not in answers:
            raise AttributeError(name)

        def answer(*_args: Any) -> Any:
            if not self.is_open:
                raise RuntimeError("uninitialized")
            return answers[name]

        return answer


def look(driver: Any, pids: list[int]) -> tuple[Any, Any]:
    watch = GpuWatch(pids, driver)
    watch.start()
    time.sleep(0.05)
    return watch.stop()


def test_a_gpu_is_read() -> None:
    """Shares, watts, clocks and the bus, in their units."""
    gpus, level = look(Driver([os.getpid()]), [os.getpid()])
    (gpu,) = gpus
    assert level.ok and level.samples >= 1
    assert (gpu.name, gpu.driver, gpu.is_ours) == ("NVIDIA H200", "580.1", True)
    assert gpu.utilisation.value == pytest.approx(0.4)
    assert gpu.power_w.value == 350 and gpu.power_limit_w == 700
    assert gpu.sm_clock_mhz.value == 1500 and gpu.max_sm_clock_mhz == 1980
    assert gpu.pcie_rx_gb_s.value == pytest.approx(2.0) and gpu.pcie_limit_gb_s == pytest.approx(63.0, rel=0.01)
    assert gpu.memory_total == 140 * 2**30
    assert gpu.limits == {"sw_power_cap": 1.0, "gpu_idle": 1.0}


@pytest.mark.parametrize(("listed", "is_ours"), [([os.getpid()], False), ([2**22 + 7], None), ([], None)])
def test_whose_gpu_it_is(listed: list[int], is_ours: bool | None) -> None:
    """Numbers of another namespace mean nothing here: it stays open."""
    gpus, _ = look(Driver(listed), [1])
    assert gpus[0].is_ours is is_ours


def test_without_a_driver_the_level_says_so() -> None:
    """No GPU is no error."""

    class Absent:
        def nvmlInit(self) -> None:
            raise RuntimeError("NVML Shared Library Not Found")

    gpus, level = look(Absent(), [1])
    assert gpus == [] and not level.ok
    assert "NVML Shared Library Not Found" in level.reason and level.costs


def test_what_a_card_does_not_know_is_left_out() -> None:
    """Older cards lack counters: the others are there all the same."""

    class Old(Driver):
        def __getattr__(self, name: str) -> Any:
            if "Pcie" in name or "Power" in name:
                raise RuntimeError("Not Supported")
            return super().__getattr__(name)

    gpus, level = look(Old([], b"Tesla"), [1])
    assert level.ok and gpus[0].name == "Tesla"
    assert gpus[0].pcie_rx_gb_s is None and gpus[0].power_w is None and gpus[0].utilisation is not None

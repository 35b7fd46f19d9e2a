"""Presets: their figures against data sheets and papers, worked out another way where there is one."""

import pytest

from pase.machine import Machine, load_machine, preset_names

KNL_INTERCONNECTS = {"cori-knl": (2e-6, 1 / 6e9), "knl-fdr": (0.7e-6, 0.2e-9), "knl-qdr": (1.2e-6, 0.3e-9)} | {
    "knl-10gbe": (7.2e-6, 0.9e-9)
}
"""α and β, a byte: Gholami et al. 2018, Table 1; You et al. 2017, Table 2."""


def test_these_machines_are_there() -> None:
    wanted = {"1080ti", "2080ti", "v100", "a100", "h100", "h200", "tpu-v4", *KNL_INTERCONNECTS}
    assert wanted <= set(preset_names())


@pytest.mark.parametrize("name", KNL_INTERCONNECTS)
def test_knights_landing(name: str) -> None:
    machine = load_machine(name)
    (level,) = machine.levels
    latency_s, s_per_byte = KNL_INTERCONNECTS[name]
    assert level.latency_s == latency_s
    assert 1 / level.bandwidth_bytes_per_s == pytest.approx(s_per_byte, rel=1e-9)
    # 68 cores, 1.4 GHz, two units of 16 lanes, a multiplication and an addition; You et al.: 6 TFLOP/s.
    assert machine.peak_flop_per_s() == pytest.approx(68 * 1.4e9 * 2 * 16 * 2)
    assert machine.peak_flop_per_s("float64") == machine.peak_flop_per_s() / 2
    assert machine.device.memory_bandwidth_bytes_per_s == 475e9


@pytest.mark.parametrize(
    ("name", "cores", "boost_hz", "memory_bits", "bits_per_s"),
    [
        ("1080ti", 3584, 1.582e9, 352, 11e9),
        ("2080ti", 4352, 1.545e9, 352, 14e9),
        ("v100", 5120, 1.53e9, 4096, 1.754e9),
        ("a100", 6912, 1.41e9, 5120, 3.186e9),
        ("h100", 16896, 1.98e9, 5120, 5.234e9),
        ("h200", 16896, 1.98e9, 6144, 6.25e9),
    ],
)
def test_peaks_are_cores_by_clock_and_bandwidths_pins_by_rate(
    name: str, cores: int, boost_hz: float, memory_bits: int, bits_per_s: float
) -> None:
    device = load_machine(name).device
    assert device.peak_flop_per_s["float32"] == pytest.approx(cores * 2 * boost_hz, rel=0.005)
    assert device.memory_bandwidth_bytes_per_s == pytest.approx(memory_bits * bits_per_s / 8, rel=0.005)


@pytest.mark.parametrize(
    ("name", "links", "link_bytes_per_s", "adapters", "adapter_bits_per_s"),
    [
        ("v100", 6, 25e9, 4, 100e9),
        ("a100", 12, 25e9, 8, 200e9),
        ("h100", 18, 25e9, 8, 400e9),
        ("h200", 18, 25e9, 8, 400e9),
    ],
)
def test_links_of_a_device_and_of_a_node(
    name: str, links: int, link_bytes_per_s: float, adapters: int, adapter_bits_per_s: float
) -> None:
    """One way; a node's link is that of all its adapters."""
    node, cluster = load_machine(name).levels
    assert node.num_devices == 8
    assert node.bandwidth_bytes_per_s == links * link_bytes_per_s
    assert cluster.bandwidth_bytes_per_s == adapters * adapter_bits_per_s / 8


def test_a_pod_of_tpus() -> None:
    machine = load_machine("tpu-v4")
    (pod,) = machine.levels
    assert pod.num_devices == 4096
    assert pod.bandwidth_bytes_per_s == 6 * 50e9
    # Google Cloud: 1.1 EFLOP/s a pod.
    assert pod.num_devices * machine.peak_flop_per_s("bfloat16") == pytest.approx(1.1e18, rel=0.03)


@pytest.mark.parametrize("name", preset_names())
def test_figures_are_plausible_and_have_their_source(name: str) -> None:
    machine = load_machine(name)
    bandwidth = machine.device.memory_bandwidth_bytes_per_s
    assert bandwidth is not None
    # A device reads its memory faster than its links are, and computes faster than it reads.
    assert all(bandwidth > level.bandwidth_bytes_per_s for level in machine.levels)
    assert machine.peak_flop_per_s() > bandwidth
    assert all(1e-7 < level.latency_s < 1e-4 for level in machine.levels)
    assert all(len(part.source) > 20 for part in (machine.device, *machine.levels))
    assert _in_order(machine)


def _in_order(machine: Machine) -> bool:
    """Narrower types are no slower, but for float16 on the devices that keep it for compatibility."""
    order = ("float64", "float32", "tf32", "bfloat16", "float8")
    peaks = [machine.device.peak_flop_per_s[dtype] for dtype in order if dtype in machine.device.peak_flop_per_s]
    return peaks == sorted(peaks)

"""docs/machines.md: its table has the presets' figures, and its example is a machine file."""

import re
import textwrap
from pathlib import Path

import pytest

from pase.errors import MachineError
from pase.machine import load_machine, parse_machine, preset_names

TEXT = (Path(__file__).parents[2] / "docs" / "machines.md").read_text(encoding="utf-8")
ROWS = {row[0]: row[1:] for row in re.findall(r"^\| `(\S+)` \| (.+) \| (.+) \| (.+) \| (.+) \|$", TEXT, re.MULTILINE)}
UNITS = {"TFLOP/s": 1e12, "GiB": 2**30, "TB/s": 1e12, "GB/s": 1e9, "µs": 1e-6}


def _figures(text: str, unit: str) -> list[float]:
    return [float(number) * UNITS[unit] for number in re.findall(rf"([\d.]+) {unit}", text)]


def test_every_preset_has_a_row() -> None:
    assert sorted(ROWS) == list(preset_names())


@pytest.mark.parametrize("name", preset_names())
def test_the_row_has_the_figures(name: str) -> None:
    device, peak, memory, levels = ROWS[name]
    machine = load_machine(name)
    assert device == machine.device.name
    assert _figures(peak, "TFLOP/s") == [pytest.approx(machine.peak_flop_per_s(), rel=0.005)]
    assert _figures(memory, "GiB") == [pytest.approx(machine.device.memory_bytes, rel=0.005)]
    bandwidth = _figures(memory, "TB/s") or _figures(memory, "GB/s")
    assert bandwidth == [pytest.approx(machine.device.memory_bandwidth_bytes_per_s, rel=0.005)]
    assert _figures(levels, "GB/s") == pytest.approx([lv.bandwidth_bytes_per_s for lv in machine.levels], rel=0.005)
    assert _figures(levels, "µs") == pytest.approx([lv.latency_s for lv in machine.levels], rel=0.005)
    assert [part.split()[0].rstrip(":,") for part in levels.split("; ")] == [lv.name for lv in machine.levels]


def test_the_example_is_a_machine_and_its_mistake_is_told_as_shown() -> None:
    (block,) = re.findall(r"^    # lab\.toml\n    schema_version = 1\n(?:(?: {4}.*)?\n)+", TEXT, re.MULTILINE)
    text = textwrap.dedent(block)
    machine = parse_machine(text, source="lab.toml")
    assert [level.num_devices for level in machine.levels] == [4, 8]
    assert len(machine.levels_for(8)) == 2
    (shown,) = re.findall(r"^    pase: (machine file wrong\.toml.+\n    .+)$", TEXT, re.MULTILINE)
    with pytest.raises(MachineError, match=f"^{re.escape(' '.join(shown.split()))}$"):
        parse_machine(text.replace("bandwidth_bytes_per_s = 25e9", "bandwidth_gb_per_s = 25"), source="wrong.toml")

// What a device holds in a step, by kind, and how much of its memory that is.

const MEMORY_KINDS = [
  ["weights", "weights_bytes"], ["gradients", "gradients_bytes"], ["optimiser's state", "optimiser_bytes"],
  ["activations", "activations_bytes"], ["buffers", "buffers_bytes"],
];

function memorySection() {
  const of = plan();
  const { memory, machine } = of;
  const kinds = memoryKinds(of);
  const capacity = memory.limit_bytes || machine.memory_bytes;
  const limit = memory.limit_bytes ? `the limit of ${bytes(memory.limit_bytes)}` : `its ${bytes(machine.memory_bytes)}`;
  const used = `Each of the ${counted(of.num_devices, "device")} needs ${bytes(memory.total_bytes)} at most, ` +
    `${capacity ? `${percent(memory.total_bytes / capacity)} of ${limit}` : "its capacity is not known"}; optimiser: ${shown(memory.optimiser, 40)}. ` +
    (memory.peak_bytes && !of.stages ? `At once, as PyTorch runs a step, at most ${bytes(memory.peak_bytes)}: ${memory.peak_phase}${memory.peak_layer ? ` of ${shown(memory.peak_layer, 60)}` : ""}.` : "");
  const tooMuch = capacity && memory.total_bytes > capacity ? el("p", { class: "bad" }, "It does not fit: search with --memory-per-device, on more devices, or for a smaller batch.") : null;
  return section("memory", "Memory of a device",
    el("p", null, used), tooMuch,
    capacity ? gauge(kinds, memory.total_bytes, capacity) : null,
    chart({
      label: `Memory of a device by kind: ${kinds.map(([name, value]) => `${name} ${bytes(value)}`).join(", ")}`,
      height: kinds.length * 30 + 50, option: () => memoryOption(kinds),
    }),
    asTable(() => table(`Memory of a device under ${shown(of.name, 80)}`,
      [{ title: "kind" }, { title: "memory", isNumber: true }, { title: "share", isNumber: true }],
      kinds.map(([name, value]) => [name, bytes(value), percent(value / memory.total_bytes)]))));
}

// A bar of what there is, with a line where it ends if more is needed.
function gauge(kinds, used, capacity) {
  const whole = Math.max(capacity, used);
  const end = used > capacity ? el("span", { class: "end", style: { left: `${(100 * capacity) / used}%` }, title: bytes(capacity) }) : null;
  return el("div", { class: "gauge" }, el("div", { class: "gauge-bar" }, stackedBar(kinds, whole, bytes, "low"), end),
    el("span", null, used > capacity ? `${bytes(used)}; a device has ${bytes(capacity)}` : bytes(capacity)));
}

function memoryKinds(of) {
  return MEMORY_KINDS.map(([name, key]) => [name, of.memory[key] || 0]);
}

function memoryOption(kinds) {
  const most = Math.max(...kinds.map(([, value]) => value));
  return {
    grid: { left: 120, right: 76, top: 8, bottom: 28 },
    xAxis: amountAxis(bytes, { splitNumber: 4, max: most > 0 ? undefined : 1 }),
    yAxis: nameAxis(kinds.map(([name]) => name), { inverse: true }),
    series: [{
      type: "bar", barMaxWidth: 18,
      data: kinds.map(([, value], index) => ({ value, itemStyle: { color: partPaint(index) } })),
      label: { show: true, position: "right", color: colour("ink"), formatter: ({ value }) => bytes(value) },
    }],
    tooltip: { trigger: "item", formatter: ({ dataIndex }) => tipNodes(kinds[dataIndex][0], [bytes(kinds[dataIndex][1])]) },
  };
}

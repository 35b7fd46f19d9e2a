// Which devices send how much to which: a map, dark where much moves.

const LISTED_CELLS = 16;

function trafficSection() {
  const of = plan();
  const { traffic } = of;
  if (!traffic) return null;
  const noun = shown(traffic.label || "device", 30);
  const sums = traffic.bytes.reduce((sum, [, , size]) => sum + size, 0);
  const groups = traffic.group_size > 1 ? ` A ${noun} stands for ${count(traffic.group_size)} devices; what they send each other is on the diagonal.` : "";
  if (!traffic.bytes.length || sums === 0) {
    return section("traffic", "Traffic between devices", el("p", null, "Nothing moves between devices in a step."));
  }
  const [from, to, most] = traffic.bytes.reduce((largest, one) => (one[2] > largest[2] ? one : largest));
  const largest = `${bytes(sums)} move in a step${of.moved_are ? `, ${shown(of.moved_are, 80)}` : ""}; the most, ${bytes(most)}, ${from === to ? `within ${noun} ${from}` : `from ${noun} ${from} to ${noun} ${to}`}.`;
  return section("traffic", `Traffic between ${noun}s`,
    el("p", null, largest + groups),
    el("div", { class: "square" }, chart({ label: `Map of what ${noun}s send each other. ${largest}`, height: 460, paperWidth: 500, option: () => trafficOption(traffic, noun) })),
    asTable(() => trafficTable(traffic, noun)));
}

function trafficOption({ groups, bytes: cells }, noun) {
  const names = Array.from({ length: groups }, (_, index) => String(index));
  const sizes = cells.filter(([, , size]) => size > 0);
  const logs = sizes.map(([, , size]) => Math.log10(size));
  const [least, most] = [-Math.max(...chunked(logs.map((one) => -one))), Math.max(...chunked(logs))];
  const step = Math.ceil(groups / LISTED_CELLS);
  const axis = (title, more) => nameAxis(names, {
    name: title, nameLocation: "middle", nameGap: 26, nameTextStyle: { color: colour("soft") },
    axisLabel: { color: colour("soft"), interval: step - 1 }, splitArea: { show: false }, ...more,
  });
  return {
    grid: { left: 48, right: 12, top: 8, bottom: 96 },
    xAxis: axis(`to ${noun}`),
    yAxis: axis(`from ${noun}`, { inverse: true, nameGap: 30 }),
    visualMap: {
      type: "continuous", min: least, max: most > least ? most : least + 1, dimension: 2, calculable: false, orient: "horizontal",
      left: "center", bottom: 4, itemHeight: 150, itemWidth: 12, text: [bytes(10 ** most), bytes(10 ** least)],
      textStyle: { color: colour("ink") }, inRange: { color: [colour("heat-0"), colour("heat-1"), colour("heat-2")] },
    },
    series: [{
      type: "heatmap", data: sizes.map(([from, to, size], index) => [to, from, logs[index], size]),
      itemStyle: { borderColor: colour("page"), borderWidth: groups > 40 ? 0 : 1 }, emphasis: { itemStyle: { borderColor: colour("ink") } },
    }],
    tooltip: { trigger: "item", formatter: ({ value }) => tipNodes(`${noun} ${value[1]} → ${noun} ${value[0]}`, [bytes(value[3])]) },
  };
}

function trafficTable({ bytes: cells }, noun) {
  const rows = cells.filter(([, , size]) => size > 0).sort((a, b) => b[2] - a[2] || a[0] - b[0] || a[1] - b[1]);
  return table(`What ${noun}s send each other in a step`,
    [{ title: `from ${noun}` }, { title: `to ${noun}`, isNumber: true }, { title: "bytes", isNumber: true }],
    rows.map(([from, to, size]) => [from, to, bytes(size)]), 64);
}

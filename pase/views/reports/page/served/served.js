"use strict";
(() => {
  const data = JSON.parse(document.getElementById("pase-data").textContent);
  const by = (id) => document.getElementById(id);
  const element = (name, text = "") => Object.assign(document.createElement(name), { textContent: text });
  const configurations = (answer) => answer.of.map((number) => answer.configurations[number]);

  let shown = data.answer;          // the answer that the page shows
  let drawn = "";                   // the configurations in the table, those before, and its rows
  let before = configurations(shown); // what it is compared with, by layer
  let asked = null;                 // what is asked for when the answer that is waited for has come
  let isWaiting = false;

  function show(answer) {
    shown = answer;
    const now = configurations(answer);
    by("title").textContent = `${data.model} on ${answer.devices} × ${data.device}`;
    by("cost").textContent = answer.cost;
    by("certificate").textContent = answer.certificate;
    by("speedup").textContent = `${answer.speedup.toPrecision(3)} × cheaper`;
    by("time").textContent = answer.time;
    const table = JSON.stringify([now, before, answer.rows]);
    if (table === drawn) return;
    drawn = table;
    const rows = document.createDocumentFragment();
    let count = 0;
    for (const [layers, times] of answer.rows) {
      const changed = layers.filter((layer) => now[layer] !== before[layer]);
      count += changed.length;
      const row = element("tr");
      row.classList.toggle("changed", changed.length > 0);
      row.classList.toggle("repeated", times > 1);
      const was = [...new Set(changed.map((layer) => before[layer]))].join(", ");
      row.append(element("td", data.layers[layers[0]]), element("td", times > 1 ? `× ${times}` : ""), element("td", now[layers[0]]), element("td", was));
      rows.append(row);
    }
    by("layers").replaceChildren(rows);
    by("changed").textContent = count ? `${count} of ${now.length} layers are split otherwise than before.` : "No layer is split otherwise than before.";
  }

  function fail(text) {
    by("error").hidden = !text;
    by("error").textContent = text;
  }

  async function ask(changes, started) {
    if (isWaiting) {
      asked = { changes: { ...(asked ? asked.changes : {}), ...changes }, started };
      return;
    }
    isWaiting = true;
    try {
      const response = await fetch(`/replan${location.search}`, { method: "POST", body: JSON.stringify(changes) });
      const answer = await response.json();
      fail(answer.error || "");
      if (!answer.error) show(answer);
      void document.body.offsetHeight; // laid out, too
      performance.measure("pase-replan", { start: started, end: performance.now() });
    } catch {
      fail("pase serve does not answer any more.");
    }
    isWaiting = false;
    if (asked) {
      const next = asked;
      asked = null;
      ask(next.changes, next.started);
    }
  }

  for (const slider of data.sliders) {
    const label = element("label", slider.label);
    const output = element("output", slider.texts[slider.at]);
    const input = Object.assign(document.createElement("input"), { type: "range", min: 0, max: slider.values.length - 1, step: 1, value: slider.at, name: slider.name });
    input.addEventListener("input", () => {
      const started = performance.now();
      const at = Number(input.value);
      output.textContent = slider.texts[at];
      input.setAttribute("aria-valuetext", slider.texts[at]);
      ask({ [slider.name]: slider.values[at] }, started);
    });
    input.setAttribute("aria-valuetext", slider.texts[slider.at]);
    label.append(output, input);
    by("sliders").append(label);
  }
  by("sliders").addEventListener("submit", (event) => event.preventDefault());
  by("keep").addEventListener("click", () => {
    before = configurations(shown);
    show(shown);
  });
  show(shown);
  performance.mark("pase-ready");
})();

"use strict";
(() => {
  const data = JSON.parse(document.getElementById("pase-data").textContent);
  const by = (id) => document.getElementById(id);
  const element = (name, text = "") => Object.assign(document.createElement(name), { textContent: text });
  const configurations = (answer) => answer.of.map((number) => answer.configurations[number]);

  let shown = data.state;           // the state that the page shows
  let drawn = "";                   // the configurations in the table, those before, and its rows
  let before = configurations(shown.answer); // what it is compared with, by layer
  let asked = null;                 // positions that are asked for when the answer that is waited for has come
  let isWaiting = false;
  const sliders = new Map();        // by name: {input, output, texts}

  // Positions and answer are of one state: they come together.
  function show(state) {
    shown = state;
    for (const [name, { input, output, texts }] of sliders) {
      input.value = state.at[name];
      output.textContent = texts[state.at[name]];
      input.setAttribute("aria-valuetext", output.textContent);
    }
    by("error").hidden = !state.error;
    by("error").textContent = state.error;
    by("answer").classList.toggle("stale", Boolean(state.error));
    by("stale").hidden = !state.error;
    showAnswer(state.answer);
  }

  function showAnswer(answer) {
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
    by("error").hidden = false;
    by("error").textContent = text;
  }

  async function ask(positions, started) {
    if (isWaiting) {
      asked = { positions, started };
      return;
    }
    isWaiting = true;
    by("answer").setAttribute("aria-busy", "true"); // what it shows is of other positions, until the answer comes
    try {
      const response = await fetch(`/replan${location.search}`, { method: "POST", body: JSON.stringify(positions) });
      const state = await response.json();
      if (!response.ok) fail(state.error);
      else if (asked) showAnswer(state.answer); // the sliders have moved on
      else show(state);
      void document.body.offsetHeight; // laid out, too
      performance.measure("pase-replan", { start: started, end: performance.now() });
    } catch {
      fail("pase serve does not answer any more.");
    }
    isWaiting = false;
    by("answer").setAttribute("aria-busy", String(asked !== null));
    if (asked) {
      const next = asked;
      asked = null;
      ask(next.positions, next.started);
    }
  }

  function positions() {
    return Object.fromEntries([...sliders].map(([name, { input }]) => [name, Number(input.value)]));
  }

  for (const { name, label: title, texts } of data.sliders) {
    const label = element("label", title);
    const output = element("output");
    const input = Object.assign(document.createElement("input"), { type: "range", min: 0, max: texts.length - 1, step: 1, name });
    sliders.set(name, { input, output, texts });
    input.addEventListener("input", () => {
      output.textContent = texts[Number(input.value)];
      input.setAttribute("aria-valuetext", output.textContent);
      ask(positions(), performance.now());
    });
    label.append(output, input);
    by("sliders").append(label);
  }
  by("sliders").addEventListener("submit", (event) => event.preventDefault());
  by("keep").addEventListener("click", () => {
    before = configurations(shown.answer);
    show(shown);
  });
  show(shown);
  performance.mark("pase-ready");
})();

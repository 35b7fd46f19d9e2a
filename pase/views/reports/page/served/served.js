"use strict";
(() => {
  const data = JSON.parse(document.getElementById("pase-data").textContent);
  const by = (id) => document.getElementById(id);
  const element = (name, text = "") => Object.assign(document.createElement(name), { textContent: text });
  // What is said of each layer, by its name: stage, configuration, state of weights, and what becomes of activations.
  const choices = (answer) => new Map(answer.layers.map((name, at) => [name, answer.choices[answer.of[at]]]));
  const wording = ([stage, configuration, state, saved]) => [stage && `stage ${stage}`, configuration, state, saved].filter(Boolean).join(", ");

  let shown = data.state;           // the state that the page shows
  let drawn = "";                   // the choices in the table, those before, and its rows
  let before = choices(shown.answer); // what it is compared with
  let asked = null;                 // positions that are asked for when the answer that is waited for has come
  let isWaiting = false;
  const controls = new Map();       // by name: {input, output, texts}; a list has no output

  // Positions and answer are of one state: they come together.
  function show(state) {
    shown = state;
    for (const [name, { input, output, texts }] of controls) {
      input.value = state.at[name];
      word(input, output, texts);
    }
    by("error").hidden = !state.error;
    by("error").textContent = state.error;
    by("answer").classList.toggle("stale", Boolean(state.error));
    by("stale").hidden = !state.error;
    showAnswer(state.answer);
  }

  function showAnswer(answer) {
    const now = choices(answer);
    by("title").textContent = `${data.model} on ${answer.devices} × ${data.device}`;
    by("cost").textContent = answer.cost;
    by("step").textContent = answer.step;
    by("certificate").textContent = answer.certificate;
    const [factor, word] = answer.speedup < 1 ? [1 / answer.speedup, "dearer"] : [answer.speedup, "cheaper"];
    by("speedup").textContent = `${factor.toPrecision(3)} × ${word}`;
    by("time").textContent = answer.time;
    const table = JSON.stringify([[...now], [...before], answer.rows]);
    if (table === drawn) return;
    drawn = table;
    const rows = document.createDocumentFragment();
    let count = 0;
    for (const [numbers, times] of answer.rows) {
      const layers = numbers.map((number) => answer.layers[number]);
      const worded = (name) => before.has(name) ? wording(before.get(name)) : "not there";
      const changed = layers.filter((name) => wording(now.get(name)) !== worded(name));
      count += changed.length;
      const row = element("tr");
      row.classList.toggle("changed", changed.length > 0);
      row.classList.toggle("repeated", times > 1);
      const was = [...new Set(changed.map(worded))].join("; ");
      row.append(...[layers[0], times > 1 ? `× ${times}` : "", ...now.get(layers[0]), was].map((text) => element("td", text)));
      rows.append(row);
    }
    by("layers").replaceChildren(rows);
    by("changed").textContent = count ? `${count} of ${now.size} layers are otherwise than before.` : "No layer is otherwise than before.";
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
      else if (asked) showAnswer(state.answer); // the controls have moved on
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
    return Object.fromEntries([...controls].map(([name, { input }]) => [name, Number(input.value)]));
  }

  function word(input, output, texts) {
    if (!output) return;
    output.textContent = texts[Number(input.value)];
    input.setAttribute("aria-valuetext", output.textContent);
  }

  function slider(name, texts) {
    return Object.assign(document.createElement("input"), { type: "range", min: 0, max: texts.length - 1, step: 1, name });
  }

  function list(name, texts) {
    const found = Object.assign(document.createElement("select"), { name });
    found.append(...texts.map((text, value) => Object.assign(element("option", text), { value })));
    return found;
  }

  for (const { name, label: title, texts, is_list: isList } of data.controls) {
    const label = element("label", title);
    const output = isList ? null : element("output");
    const input = isList ? list(name, texts) : slider(name, texts);
    controls.set(name, { input, output, texts });
    input.addEventListener("input", () => {
      word(input, output, texts);
      ask(positions(), performance.now());
    });
    if (output) label.append(output);
    label.append(input);
    by("controls").append(label);
  }
  by("note").hidden = !data.note;
  by("note").textContent = data.note;
  by("controls").addEventListener("submit", (event) => event.preventDefault());
  by("keep").addEventListener("click", () => {
    before = choices(shown.answer);
    show(shown);
  });
  show(shown);
  performance.mark("pase-ready");
})();

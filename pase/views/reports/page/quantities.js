// Numbers for people, as the command line writes them: three digits, a prefix, a unit.

const PREFIXES = ["p", "n", "µ", "m", "", "k", "M", "G", "T", "P", "E", "Z"];
const ONE = 4;

/** Return a number with three digits and a decimal prefix: 1.23 GFLOP. */
function quantity(value, unit) {
  if (value === 0) return `0 ${unit}`;
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  let prefix = ONE;
  while (Math.abs(value) >= 999.5 && prefix < PREFIXES.length - 1) [value, prefix] = [value / 1000, prefix + 1];
  while (Math.abs(value) < 0.9995 && prefix > 0) [value, prefix] = [value * 1000, prefix - 1];
  const size = Math.abs(value);
  return `${value.toFixed(size < 9.995 ? 2 : size < 99.95 ? 1 : 0)} ${PREFIXES[prefix]}${unit}`;
}

/** Return a number of bytes. */
function bytes(value) {
  return value !== 0 && Math.abs(value) < 999.5 ? `${Math.round(value)} B` : quantity(value, "B");
}

/** Return a time of searching: 12 ms, 3.4 s, 2 min 5 s. */
function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${(seconds * 1000).toFixed(0)} ms`;
  if (seconds < 100) return `${seconds.toFixed(1)} s`;
  return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
}

/** Return a part of a whole: 8.2%. */
function percent(part, digits = 1) {
  if (!Number.isFinite(part)) return "–";
  const text = (100 * part).toFixed(digits);
  return part > 0 && Number(text) === 0 ? `<${(10 ** -digits).toFixed(digits)}%` : `${text}%`;
}

/** Return how many times as large something is: 13.1 ×. */
function times(ratio) {
  if (!Number.isFinite(ratio)) return "–";
  return `${ratio < 9.995 ? ratio.toFixed(2) : ratio < 99.95 ? ratio.toFixed(1) : ratio.toFixed(0)} ×`;
}

/** Return a count with its digits in groups of three: 16,384. */
function count(number) {
  return String(Math.round(number)).replace(/\B(?=(\d{3})+$)/g, ",");
}

/** Return a count and its noun: 1 layer, 12 layers. */
function counted(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

/** Return "3", "0, 8" or "0–7": numbers, with runs of them drawn together. */
function ranges(numbers, most = 6) {
  const sorted = [...numbers].sort((a, b) => a - b);
  const runs = [];
  for (const number of sorted) {
    const last = runs[runs.length - 1];
    if (last && number === last[1] + 1) last[1] = number;
    else runs.push([number, number]);
  }
  const texts = runs.map(([from, to]) => (from === to ? `${from}` : to === from + 1 ? `${from}, ${to}` : `${from}–${to}`));
  return texts.length > most ? `${texts.slice(0, most).join(", ")}, …` : texts.join(", ");
}

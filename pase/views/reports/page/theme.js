// Light and dark: what the system wants, until the button is pressed; paper is always light.

const DARK = matchMedia("(prefers-color-scheme: dark)");
const PAPER = matchMedia("print");
const STORED = "pase-theme";

// A page opened from a file may have no storage at all.
function stored() {
  try {
    return localStorage.getItem(STORED);
  } catch {
    return null;
  }
}

function store(theme) {
  try {
    localStorage.setItem(STORED, theme);
  } catch {
    // It holds until the page is closed, then.
  }
}

/** Return whether the page is dark just now. */
function isDark() {
  return document.documentElement.dataset.theme === "dark";
}

function applyTheme(printing = PAPER.matches) {
  const chosen = now.theme || stored();
  const dark = !printing && (chosen === "dark" || (chosen !== "light" && DARK.matches));
  const root = document.documentElement;
  root.dataset.theme = dark ? "dark" : "light";
  byId("theme").setAttribute("aria-pressed", String(dark));
  colourClasses();
  tell("theme");
}

/** Give the page the colours of what is split, under which the graph and its legend use them. */
function colourClasses() {
  const side = isDark() ? "dark" : "light";
  plan().split_classes.forEach((one, index) => {
    if (/^#[0-9a-f]{3,8}$/i.test(one[side])) document.documentElement.style.setProperty(`--class-${index}`, one[side]);
  });
}

/** Return the value of one of the page's colours. */
function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function startTheme() {
  byId("theme").addEventListener("click", () => {
    now.theme = isDark() ? "light" : "dark";
    store(now.theme);
    applyTheme();
  });
  DARK.addEventListener("change", () => applyTheme());
  when("plan", colourClasses);
  applyTheme();
}

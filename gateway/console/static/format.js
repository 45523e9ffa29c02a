// Numbers and times as people read them, and the one way in which elements are made.

export const ms = (value) =>
  value >= 10_000 ? `${(value / 1000).toFixed(1)} s` : `${value > 0 && value < 10 ? value.toFixed(1) : Math.round(value)} ms`;
export const seconds = (value) => (value === null || value === undefined ? "–" : ms(1000 * value));
export const percent = (share, digits = 0) =>
  share === null || share === undefined ? "–" : `${(100 * share).toFixed(digits)} %`;
export const count = (value) => Math.round(value).toLocaleString("en");
export const clock = (wallMs) => new Date(wallMs).toLocaleTimeString("en-GB");

/** Return a length of time in its largest unit, such as "4 min". */
export function duration(inSeconds) {
  const units = [[86_400, "d"], [3_600, "h"], [60, "min"]];
  const [size, unit] = units.find(([size]) => inSeconds >= 1.5 * size) ?? [1, "s"];
  return `${Math.max(0, Math.round(inSeconds / size))} ${unit}`;
}

/** Return the median of numbers; null if there is none. */
export function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted.length ? sorted[Math.floor(sorted.length / 2)] : null;
}

/** Return a new element with properties and children. `class` and `aria-*` are set as attributes. */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties))
    if (name === "class" || name === "role" || name === "for" || name.includes("-")) made.setAttribute(name, value);
    else made[name] = value;
  made.append(...children);
  return made;
}

/** Set the text of an element, if it has changed: screen readers and layout are left alone otherwise. */
export function say(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

export const byId = (id) => document.getElementById(id);

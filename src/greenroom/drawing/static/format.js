// Text for numbers, and elements for text.

export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (n >= 1024 && unit < units.length - 1) { n /= 1024; unit += 1; }
  return `${unit === 0 || n >= 100 ? Math.round(n) : n.toPrecision(3)} ${units[unit]}`;
}

export function seconds(s) {
  if (s < 0.0995) return `${(1000 * s).toPrecision(2)} ms`;
  if (s < 0.9995) return `${Math.round(1000 * s)} ms`;
  if (s < 60) return `${s.toPrecision(3)} s`;
  return s < 6000 ? `${Math.round(s / 60)} min` : `${Math.round(s / 3600)} h`;
}

export const count = (n) => Math.round(n).toLocaleString("en");
export const percent = (x, digits = 1) => `${(100 * x).toFixed(digits)} %`;
export const rate = (x) => (x >= 100 ? x.toFixed(0) : x.toFixed(1));

export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export const $ = (id) => document.getElementById(id);

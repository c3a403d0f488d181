// Small line charts in SVG, stretched to their box; labels are HTML.
import { make, seconds } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDE = 400, HIGH = 100;

function draw(name, attributes, parent) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  parent.append(element);
  return element;
}

// The least round number that is at least `value`.
function roundUp(value) {
  const size = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].find((step) => step * size >= value * 0.999) * size;
}

export class Chart {
  // `show` makes the text of a value; `top` is the highest value, where it does not follow the data.
  constructor(box, { show, top = null, dots = false, label }) {
    this.show = show;
    this.top = top;
    this.dots = dots;
    this.svg = draw("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, preserveAspectRatio: "none", role: "img", "aria-label": label }, box);
    for (const y of [0, HIGH / 2]) draw("path", { class: "grid", d: `M0 ${y}H${WIDE}` }, this.svg);
    this.area = draw("path", { class: "area" }, this.svg);
    this.line = draw("path", { class: dots ? "dots" : "line" }, this.svg);
    this.high = box.appendChild(make("span", { class: "high", "aria-hidden": "true" }));
    this.span = box.appendChild(make("span", { class: "span", "aria-hidden": "true" }));
  }

  // Draws [time, value] pairs of the last `span` before `now`; a null interrupts the line.
  update(points, now, span, unit) {
    const shown = points.filter(([t]) => t > now - span);
    const most = Math.max(0, ...shown.map(([, value]) => value ?? 0));
    const top = this.top ?? (most > 0 ? roundUp(most) : 1);
    const at = ([t, value]) => `${(WIDE * (1 - (now - t) / span)).toFixed(1)} ${(HIGH * (1 - value / top)).toFixed(1)}`;
    if (this.dots) {
      this.line.setAttribute("d", shown.map((point) => `M${at(point)}h0`).join(""));
    } else {
      const runs = [[]];
      for (const point of shown) {
        if (point[1] === null) runs.push([]); else runs.at(-1).push(point);
      }
      const drawn = runs.filter((run) => run.length > 1);
      this.line.setAttribute("d", drawn.map((run) => `M${run.map(at).join("L")}`).join(""));
      this.area.setAttribute("d", drawn.map((run) =>
        `M${at([run[0][0], 0])}L${run.map(at).join("L")}L${at([run.at(-1)[0], 0])}Z`).join(""));
    }
    this.high.textContent = most > 0 || this.top ? this.show(top) : "";
    this.span.textContent = unit === "s" ? seconds(span) : `${span} ${unit}`;
  }
}

// The map of layers and experts on a canvas, with each layer's misses and stalls beside it.
import { $, count, make, percent, seconds, setText } from "./format.js";

const STATES = ["on disk", "being read", "read ahead", "in memory"];
const [ABSENT, IN_FLIGHT, AHEAD] = [0, 1, 2];
const FADE_MS = 1100;
const HINT = "Point at an expert, or move over the map with the arrow keys.";
const STEP_MS = 40; // between two pictures while something fades
const SIDE = 132, NARROWEST = 100; // pixels of the columns of misses and stalls
const GUTTER = 30; // of the layers' numbers
const LEFT = 8; // of a column beside the map

const KEYS = [
  ["resident", "in memory"], ["flight", "being read"], ["ahead", "read ahead"], ["absent", "on disk"], ["used", "just used"],
];
const NEVER_IN_A_TRACE = ["flight", "ahead"];

// Puts the map's elements into `box`.
function buildMap(box) {
  const canvas = make("canvas", {
    id: "map", tabindex: "0", role: "application", "aria-roledescription": "map of experts",
    "aria-label": "Layers and experts. Arrow keys move from expert to expert.", "aria-describedby": "pointed",
  });
  const shades = [1, 2, 3, 4, 5].map((number) => make("i", { class: `u${number}` }));
  box.append(
    make("ul", { class: "keys", "aria-label": "Colours" },
      ...KEYS.map(([kind, text]) => make("li", { id: `key-${kind}` }, make("i", { class: `s-${kind}` }), text)),
      make("li", { class: "ramp" }, make("span", {}, "seldom used"), ...shades, make("span", {}, "often"))),
    make("div", { class: "map-box" },
      make("div", { class: "map-head", "aria-hidden": "true" }, make("span", {}, "layer"), make("span", {}, "expert"),
        make("span", { class: "side-head" }, make("b", { id: "misses" }, "misses"), make("b", { id: "stalls" }, "stalls"))),
      make("div", { class: "map-body" }, canvas, make("canvas", { id: "side", "aria-hidden": "true" }))),
    make("p", { id: "pointed", class: "pointed" }),
    make("p", { id: "spoken", class: "hidden", "aria-live": "polite" }),
  );
}

function unpack(text, bits, size) {
  const packed = atob(text), values = new Uint8Array(size), mask = (1 << bits) - 1, each = 8 / bits;
  for (let i = 0; i < size; i += 1) {
    values[i] = (packed.charCodeAt(Math.floor(i / each)) >> (bits * (i % each))) & mask;
  }
  return values;
}

function colours() {
  const style = getComputedStyle(document.documentElement);
  const get = (name) => style.getPropertyValue(name).trim();
  const ramp = (name) => [0, 1, 2, 3, 4, 5].map((i) => get(`--${name}${i}`));
  return {
    absent: ramp("a"), resident: ramp("r"), flight: get("--flight"), ahead: get("--ahead"), used: get("--used"),
    ink: get("--ink"), soft: get("--soft"), misses: get("--c1"), stalls: get("--c3"), track: get("--track"),
  };
}

// Use levels 0 to 15 (8 is the layer's mean; two levels double it) as one of six shades.
const shade = (level) => (level === 0 ? 0 : Math.max(1, Math.min(5, Math.round(3 + (level - 8) / 2))));

export class ExpertMap {
  constructor(box) {
    buildMap(box);
    this.canvas = $("map");
    this.side = $("side");
    this.base = document.createElement("canvas");
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    this.sizes = null;
    this.cursor = null; // {layer, expert}
    new ResizeObserver(() => this.layout()).observe(this.canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.layout());
    this.canvas.addEventListener("pointermove", (event) => this.#point(this.#at(event)));
    this.canvas.addEventListener("pointerdown", (event) => this.#point(this.#at(event)));
    this.canvas.addEventListener("pointerleave", () => this.#point(null));
    this.canvas.addEventListener("focus", () => { if (this.canvas.matches(":focus-visible")) this.#point(this.cursor ?? { layer: 0, expert: 0 }); });
    this.canvas.addEventListener("blur", () => this.#point(null));
    this.canvas.addEventListener("keydown", (event) => this.#key(event));
  }

  begin(greeting) {
    this.sizes = greeting.layers;
    this.uses = greeting.uses ?? null; // of a trace: how many of its tokens chose each expert
    this.tokens = greeting.tokens;
    for (const kind of NEVER_IN_A_TRACE) $(`key-${kind}`).hidden = greeting.kind === "trace";
    this.first = [];
    this.experts = this.sizes.reduce((total, size) => { this.first.push(total); return total + size; }, 0);
    this.columns = Math.max(...this.sizes);
    this.states = new Uint8Array(this.experts);
    this.levels = unpack(greeting.levels, 4, this.experts);
    this.usedAt = new Float64Array(this.experts).fill(-Infinity);
    this.layer = null;
    this.cursor = null;
    this.layout();
  }

  // Takes a frame; `quiet` where more frames follow at once and nothing is drawn, `old` where its
  // experts were not just used.
  add(frame, quiet = false, old = false) {
    if (!frame.states) return;
    this.states = unpack(frame.states, 2, this.experts);
    if (!old) {
      const used = unpack(frame.used, 1, this.experts), now = performance.now();
      for (let i = 0; i < this.experts; i += 1) if (used[i]) this.usedAt[i] = now;
    }
    if (frame.levels) {
      const [first, levels] = frame.levels;
      const begin = this.first[first];
      this.levels.set(unpack(levels, 4, Math.min(this.experts - begin, 2 * atob(levels).length)), begin);
    }
    if (!quiet) this.redraw();
  }

  layout() {
    if (!this.sizes) return;
    const room = this.canvas.parentElement.clientWidth;
    const side = Math.round(Math.max(NARROWEST, Math.min(SIDE, room * 0.22)));
    this.ratio = devicePixelRatio || 1;
    this.across = Math.max(2, (room - side - GUTTER) / this.columns);
    this.down = Math.max(6, Math.min(22, 430 / this.sizes.length));
    const high = Math.ceil(this.down * this.sizes.length);
    this.#size(this.canvas, GUTTER + this.across * this.columns, high);
    this.#size(this.base, GUTTER + this.across * this.columns, high);
    this.#size(this.side, side, high);
    $("misses").parentElement.style.width = `${side}px`;
    this.colours = colours();
    this.redraw();
    this.drawLayers(this.layer);
  }

  #size(canvas, width, height) {
    canvas.width = Math.round(width * this.ratio);
    canvas.height = Math.round(height * this.ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }

  redraw() {
    this.#drawBase();
    this.#animate();
  }

  #colour(id) {
    const state = this.states[id];
    if (state === IN_FLIGHT) return this.colours.flight;
    if (state === AHEAD) return this.colours.ahead;
    return (state === ABSENT ? this.colours.absent : this.colours.resident)[shade(this.levels[id])];
  }

  // The states, without what fades: drawn once a frame.
  #drawBase() {
    const context = this.base.getContext("2d"), { across, down } = this;
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    context.clearRect(0, 0, this.base.width, this.base.height);
    const gap = across >= 5 ? 1 : across >= 3.5 ? 0.5 : 0;
    const cells = new Map();
    for (let id = 0; id < this.experts; id += 1) {
      const colour = this.#colour(id);
      if (!cells.has(colour)) cells.set(colour, []);
      cells.get(colour).push(id);
    }
    for (const [colour, ids] of cells) {
      context.fillStyle = colour;
      for (const id of ids) {
        const { layer, expert } = this.#place(id);
        context.fillRect(GUTTER + expert * across, layer * down, across - gap, down - 1);
      }
    }
    context.fillStyle = this.colours.soft;
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "right";
    context.textBaseline = "middle";
    const every = Math.ceil(14 / down);
    for (let layer = 0; layer < this.sizes.length; layer += every) {
      context.fillText(String(layer), GUTTER - 7, Math.max(6, layer * down + down / 2));
    }
  }

  #place(id) {
    if (this.columns * this.sizes.length === this.experts) {
      return { layer: Math.floor(id / this.columns), expert: id % this.columns };
    }
    const layer = this.first.findLastIndex((first) => first <= id);
    return { layer, expert: id - this.first[layer] };
  }

  #animate() {
    if (this.timer) return;
    const draw = () => {
      this.timer = null;
      if (this.#drawUsed() && !this.still.matches) {
        this.timer = setTimeout(() => requestAnimationFrame(draw), STEP_MS);
      }
    };
    this.timer = requestAnimationFrame(draw);
  }

  // Draws the states and a mark in each expert that was just used; returns whether a mark fades on.
  #drawUsed() {
    const context = this.canvas.getContext("2d"), { across, down } = this, now = performance.now();
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    context.drawImage(this.base, 0, 0);
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    context.fillStyle = this.colours.used;
    const wide = Math.max(1.5, Math.min(across * 0.4, 6)), high = Math.max(2, Math.min(down * 0.4, 6));
    let fades = false;
    for (let id = 0; id < this.experts; id += 1) {
      const age = (now - this.usedAt[id]) / FADE_MS;
      if (age >= 1) continue;
      fades = true;
      context.globalAlpha = this.still.matches ? 1 : 1 - age * age;
      const { layer, expert } = this.#place(id);
      context.fillRect(GUTTER + expert * across + (across - wide) / 2 - 0.5, layer * down + (down - high) / 2 - 0.5, wide, high);
    }
    context.globalAlpha = 1;
    if (this.cursor) {
      context.strokeStyle = this.colours.ink;
      context.lineWidth = 2;
      context.strokeRect(GUTTER + this.cursor.expert * across - 1.5, this.cursor.layer * down - 1.5, across + 2, down + 2);
    }
    this.#describe();
    return fades;
  }

  // The share of misses and the stalls of each layer, in rows of the map.
  drawLayers(values) {
    this.layer = values;
    if (!this.sizes || !this.colours) return;
    const context = this.side.getContext("2d"), { down } = this;
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    context.clearRect(0, 0, this.side.width, this.side.height);
    const shares = values?.hits?.map((hits, i) => values.misses[i] / Math.max(1, hits + values.misses[i]));
    const slowest = Math.max(1, ...(values?.stalls ?? []));
    const columns = [["misses", shares, 1], ["stalls", values?.stalls, slowest]].filter(([, numbers]) => numbers);
    const wide = this.side.width / this.ratio / Math.max(1, columns.length) - LEFT;
    const thick = Math.max(2, Math.min(8, down - 4));
    for (const name of ["misses", "stalls"]) $(name).hidden = !columns.some(([shown]) => shown === name);
    columns.forEach(([name, numbers, most], column) => {
      const x = LEFT + column * (wide + LEFT);
      numbers.forEach((number, layer) => {
        const y = layer * down + (down - 1 - thick) / 2;
        context.fillStyle = this.colours.track;
        context.fillRect(x, y, wide, thick);
        context.fillStyle = this.colours[name];
        context.fillRect(x, y, (wide * number) / most, thick);
      });
    });
    this.#describe();
  }

  #at(event) {
    if (!this.sizes) return null;
    const box = this.canvas.getBoundingClientRect();
    const layer = Math.floor((event.clientY - box.top) / this.down);
    const expert = Math.floor((event.clientX - box.left - GUTTER) / this.across);
    return expert >= 0 && expert < (this.sizes[layer] ?? 0) ? { layer, expert } : null;
  }

  #point(place) {
    this.cursor = place;
    this.#animate();
  }

  #key(event) {
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], PageUp: [-8, 0], PageDown: [8, 0] };
    const step = steps[event.key];
    if (!this.sizes || (!step && !["Home", "End", "Escape"].includes(event.key))) return;
    event.preventDefault();
    if (event.key === "Escape") { this.#point(null); return; }
    const { layer: row, expert: column } = this.cursor ?? { layer: 0, expert: 0 };
    const layer = Math.max(0, Math.min(this.sizes.length - 1, row + (step?.[0] ?? 0)));
    const wanted = event.key === "Home" ? 0 : event.key === "End" ? Infinity : column + (step?.[1] ?? 0);
    this.#point({ layer, expert: Math.max(0, Math.min(this.sizes[layer] - 1, wanted)) });
    setText($("spoken"), this.#text(this.cursor));
  }

  #describe() {
    setText($("pointed"), this.cursor ? this.#text(this.cursor) : HINT);
  }

  #chosen(layer, id) {
    const own = this.uses.slice(this.first[layer], this.first[layer] + this.sizes[layer]);
    const mean = own.reduce((a, b) => a + b, 0) / own.length;
    return `chosen by ${percent(this.uses[id] / this.tokens, 2)} of tokens, ${(this.uses[id] / Math.max(mean, 1e-9)).toFixed(2)} times the layer's mean`;
  }

  #text({ layer, expert }) {
    const id = this.first[layer] + expert, level = this.levels[id];
    const used = performance.now() - this.usedAt[id] < FADE_MS ? ", just used" : "";
    const times = this.uses ? this.#chosen(layer, id) : level === 0 ? "never used" : level === 1 ? "seldom used"
      : `used ${level === 15 ? "over " : "about "}${(2 ** ((level - 7.5) / 2)).toPrecision(2)} times the layer's mean`;
    const { hits, misses, stalls } = this.layer ?? {};
    const requests = hits ? hits[layer] + misses[layer] : 0;
    const row = requests ? ` Layer: ${count(hits[layer])} hits, ${count(misses[layer])} misses (${percent(misses[layer] / requests)})` + (stalls ? `, ${seconds(stalls[layer] / 1000)} of stalls in the last minute.` : ".") : "";
    return `Layer ${layer}, expert ${expert}: ${STATES[this.states[id]]}${used}, ${times}.${row}`;
  }
}

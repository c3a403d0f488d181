// Plays a recording: a clock over its frames, with a slider.
import { $, count, make, seconds } from "./format.js";

const SHORT_S = 5; // shorter timelines begin slowly
const BEFORE = 400; // frames that are taken again after a jump

const RATES = [["0.1", "1/10"], ["0.25", "¼"], ["0.5", "½"], ["1", "1"], ["2", "2"], ["4", "4"], ["8", "8"]];

// Puts the player's elements into `form`.
function buildPlayer(form) {
  form.classList.add("player");
  form.append(
    make("button", { id: "play", type: "button", class: "main" }),
    make("input", { id: "position", type: "range", min: "0", value: "0", "aria-label": "Position" }),
    make("output", { id: "at" }),
    make("label", {}, "Speed ", make("select", { id: "rate" }, ...RATES.map(([value, text]) => make("option", { value }, text)))),
  );
  $("rate").value = "1";
}

export class Playback {
  // `show(frame, quiet, old)` takes frames in order, `old` ones before a jump's end; `restart` forgets
  // those taken before. Playing begins at once, or waits at the last frame.
  constructor(form, { greeting, frames }, show, restart, atOnce = true) {
    Object.assign(this, { greeting, frames, show, restart });
    buildPlayer(form);
    this.index = -1;
    form.hidden = false;
    if (greeting.unit === "s" && greeting.span < SHORT_S) $("rate").value = "0.1";
    $("position").max = frames.length - 1;
    form.addEventListener("submit", (event) => event.preventDefault());
    $("play").addEventListener("click", () => this.#toggle(!this.playing));
    $("position").addEventListener("input", () => this.#jump(Number($("position").value)));
    document.addEventListener("keydown", (event) => {
      if (event.key === " " && event.target === document.body) { event.preventDefault(); this.#toggle(!this.playing); }
    });
    this.#setPlaying(atOnce);
    this.#jump(atOnce ? 0 : frames.length - 1);
    this.last = performance.now();
    this.due = 0;
    requestAnimationFrame((now) => this.#tick(now));
  }

  #toggle(playing) {
    if (playing && this.index === this.frames.length - 1) this.#jump(0);
    this.#setPlaying(playing);
  }

  #setPlaying(playing) {
    this.playing = playing;
    $("play").textContent = playing ? "Pause" : "Play";
    $("play").setAttribute("aria-label", playing ? "Pause" : "Play");
  }

  #tick(now) {
    const passed = Math.min(now - this.last, 200);
    this.last = now;
    if (this.playing) this.due += (passed / 1000) * Number($("rate").value) * this.greeting.frames_per_s;
    const steps = Math.floor(this.due);
    this.due -= steps;
    for (let i = 0; i < steps && this.index < this.frames.length - 1; i += 1) this.#take(this.index + 1, i < steps - 1);
    if (this.playing && this.index === this.frames.length - 1) this.#toggle(false);
    requestAnimationFrame((next) => this.#tick(next));
  }

  #take(index, quiet, old = false) {
    this.index = index;
    this.show(this.frames[index], quiet && index < this.frames.length - 1, old);
    if (!quiet) this.#say();
  }

  #jump(index) {
    if (index < this.index || index > this.index + BEFORE) {
      this.restart();
      this.index = Math.max(0, index - BEFORE) - 1;
    }
    while (this.index < index) this.#take(this.index + 1, this.index + 1 < index, this.index + 1 < index);
  }

  #say() {
    const { t } = this.frames[this.index], end = this.frames.at(-1).t;
    $("position").value = this.index;
    const unit = this.greeting.unit;
    $("at").textContent = unit === "s" ? `${seconds(t)} of ${seconds(end)}` : `${unit} ${count(t)} of ${count(end)}`;
    $("position").setAttribute("aria-valuetext", $("at").textContent);
  }
}

// Joins the source of frames with what shows them.
import { Chart } from "./chart.js";
import { Chat } from "./chat.js";
import { $, count, percent, rate, seconds, setText } from "./format.js";
import { History } from "./history.js";
import { ExpertMap } from "./map.js";
import { enableResize, showDevices, showLinks, showMemory, showPrefetching, showRequests } from "./panels.js";
import { Playback } from "./playback.js";
import { follow, setKey } from "./source.js";

const history = new History(), map = new ExpertMap($("drawing")), chat = new Chat();
const chart = (id, options) => new Chart($(id).querySelector(".chart"), options);
const charts = {
  speed: chart("speed", { show: (x) => `${rate(x)}/s`, label: "Tokens per second over time" }),
  ttft: chart("ttft", { show: seconds, dots: true, label: "Times to the first token over time" }),
  ratio: chart("ratio", { show: (x) => percent(x, 0), top: 1, label: "Hit ratio over time" }),
  waits: chart("waits", { show: (x) => percent(x, 0), top: 1, label: "Share of time waiting for experts" }),
};
let greeting = null, unit = "s";

function say(state, text) {
  setText($("state"), text);
  $("state").dataset.state = state;
}

function value(id, text, small = "") {
  const box = $(id).querySelector(".value");
  setText(box, text);
  if (small) box.append(" ", Object.assign(document.createElement("small"), { textContent: small }));
}

function begin(first) {
  greeting = first;
  unit = greeting.unit ?? "s";
  setText($("model"), greeting.title);
  document.title = `${greeting.title} · Greenroom`;
  const { layers, policy, predictor, version } = greeting;
  const sizes = [...new Set(layers)];
  setText($("facts"), [
    `${layers.length} layers × ${sizes.length === 1 ? sizes[0] : `${Math.min(...sizes)} to ${Math.max(...sizes)}`} experts`,
    ...(policy ? [`policy ${policy}`] : []), ...(predictor ? [`predictor ${predictor}`] : []),
    ...(version ? [`Greenroom ${version}`] : []), ...(greeting.about ?? []),
  ].join(" · "));
  map.begin(greeting);
  $("experts").hidden = false;
}

function show(frame, quiet = false, old = false) {
  history.add(frame);
  if (greeting) map.add(frame, quiet, old);
  if (quiet) return;
  $("page").hidden = false;
  $("gate").hidden = true;
  $("experts").hidden = greeting === null;
  if (frame.state) {
    const [name, progress] = frame.state;
    say(name, name === "loading" ? `loading ${percent(progress, 0)}` : name);
  }
  showTiles(frame);
  showRequests(frame, greeting);
  if (!greeting) return;
  if (frame.slots) {
    const [capacity, present] = frame.slots, all = greeting.layers.reduce((a, b) => a + b, 0);
    setText($("experts-note"), `${count(Math.min(present, all))} of ${count(all)} in memory, in ${count(capacity)} slots (${percent(capacity / all, 0)})`);
  }
  map.drawLayers(history.layers(60));
  showMemory(frame, greeting);
  showDevices(frame, greeting);
  showLinks(frame, greeting, history);
  showPrefetching(frame, greeting);
}

function showTiles(frame) {
  const { points, series, first } = history;
  const now = frame.t, age = now - points[0].t;
  const span = greeting?.span ?? (age > 115 ? 300 : age > 55 ? 120 : 60);
  const last = (name) => series[name].at(-1)?.[1];
  const parts = [
    ["speed", frame.tokens !== undefined, () => value("speed", rate(last("speed") ?? 0), "tokens/s")],
    ["ttft", frame.answered !== undefined, () => value("ttft", first.length ? seconds(first.at(-1)[1]) : "–", first.length ? "last request" : "")],
    ["ratio", frame.hits !== undefined, () => value("ratio", last("ratio") == null ? "–" : percent(last("ratio")))],
    ["waits", frame.stalls !== undefined, () => value("waits", last("waits") == null ? "–" : percent(Math.min(1, last("waits"))), "of the time")],
  ];
  for (const [id, exists, write] of parts) {
    $(id).hidden = !exists;
    if (!exists) continue;
    write();
    charts[id].update(id === "ttft" ? first : series[id], now, span, unit);
  }
}

const waitForKey = (error) => new Promise((done) => {
  $("page").hidden = true;
  $("gate").hidden = false;
  say("locked", "locked");
  setText($("gate-error"), error);
  $("key").focus();
  $("gate").addEventListener("submit", (event) => {
    event.preventDefault();
    setKey($("key").value);
    done();
  }, { once: true });
});

enableResize();
follow({
  greeting(first) {
    if (greeting && greeting.version !== first.version) location.reload(); // another version's page
    begin(first);
    chat.begin(first);
    history.addGreeting(first, history.points.at(-1)?.t ?? 0);
  },
  frame: show,
  recording(recording) {
    begin(recording.greeting);
    say("recording", recording.greeting.kind);
    new Playback($("player"), recording, show, () => { history.clear(); map.begin(greeting); });
  },
  away: (why) => say("away", why),
  locked: waitForKey,
});

// What the cards beside the map show: memory, links, prefetching, requests.
import { $, bytes, count, make, percent, seconds, setText } from "./format.js";
import { headers, problem } from "./source.js";

function showFacts(list, facts) {
  while (list.children.length > 2 * facts.length) list.lastElementChild.remove();
  while (list.children.length < 2 * facts.length) list.append(make("dt"), make("dd"));
  facts.forEach(([name, value], i) => {
    setText(list.children[2 * i], name);
    setText(list.children[2 * i + 1], value);
  });
}

// Memory by part, of the budget where there is one.
export function showMemory(frame, greeting) {
  $("memory").hidden = !frame.memory;
  if (!frame.memory) return;
  const [budget, process, dense, slots, keys, buffers] = frame.memory;
  const known = dense + slots + keys + (buffers ?? 0);
  const parts = [
    ["expert slots", slots, "slots"], ["dense parts", dense, "dense"], ["keys and values", keys, "keys"],
    ...(buffers === null ? [] : [["buffers", buffers, "buffers"]]),
    ...(process === null ? [] : [["Python, libraries, the rest", Math.max(0, process - known), "rest"]]),
  ];
  const used = process ?? known; // the process is unknown where the memory is a GPU's
  const total = Math.max(budget ?? 0, used, known);
  setText($("memory-note"), budget === null ? `${bytes(used)} in use` : `${bytes(used)} of ${bytes(budget)} in use`);
  const bar = $("memory-bar"), list = $("memory-parts");
  if (bar.children.length !== parts.length) {
    bar.replaceChildren(...parts.map(([, , kind]) => make("i", { class: `p-${kind}` })));
    list.replaceChildren(...parts.flatMap(([name, , kind]) => [
      make("dt", {}, make("i", { class: `p-${kind}` }), name), make("dd")]));
  }
  parts.forEach(([, nbytes], i) => {
    bar.children[i].style.flexBasis = `${(100 * nbytes) / total}%`;
    setText(list.children[2 * i + 1], bytes(nbytes));
  });
  bar.setAttribute("aria-label", parts.map(([name, nbytes]) => `${name} ${bytes(nbytes)}`).join(", "));
  $("resize").hidden = !greeting.controls;
}

// Which devices have experts. The first has the dense parts too, so it stays.
export function showDevices(frame, greeting) {
  const box = $("devices");
  box.hidden = !(greeting.controls && frame.devices && greeting.devices.length > 1);
  if (box.hidden) return;
  if (box.querySelectorAll("input").length !== greeting.devices.length) {
    box.querySelectorAll("label").forEach((label) => label.remove());
    box.append(...greeting.devices.map((name) => make("label", {}, make("input", { type: "checkbox", value: name }), name)));
    box.onchange = () => changeDevices(box);
  }
  if (box.disabled) return; // until the server has answered
  box.querySelectorAll("input").forEach((input, place) => {
    input.checked = frame.devices.includes(input.value);
    input.disabled = place === 0;
  });
}

async function changeDevices(box) {
  const chosen = [...box.querySelectorAll("input:checked")].map((input) => input.value.replace(/^fake:.*/, "fake"));
  box.disabled = true;
  const { error, value } = await post("v1/admin/devices", { devices: chosen.join(",") });
  box.disabled = false;
  $("devices-error").classList.toggle("error", Boolean(error));
  setText($("devices-error"), error ?? `${count(value.slots)} slots on ${value.devices.join(", ")}`);
}

export function showLinks(frame, greeting, history) {
  $("links").hidden = !frame.links;
  if (!frame.links) return;
  const rows = $("link-rows"), values = history.links(3);
  if (rows.children.length !== frame.links.length) {
    rows.replaceChildren(...greeting.links.map((name) => make("div", { class: "link" },
      make("b", {}, name.replace("->", "→")), make("span", { class: "much" }),
      make("div", { class: "meter" }, make("i")), make("span", { class: "note" }))));
  }
  frame.links.forEach(([, , demands, prefetches, moving], i) => {
    const [, much, meter, note] = rows.children[i].children;
    setText(much, values[i].rate === null ? "" : `${bytes(values[i].rate)}/s`);
    meter.firstElementChild.style.width = `${100 * values[i].busy}%`;
    const queue = demands === null ? "" : ` · queue: ${demands} needed now, ${prefetches} ahead`;
    setText(note, `${percent(values[i].busy, 0)} busy · ${moving} moving${queue}`);
  });
}

export function showPrefetching(frame, greeting) {
  const now = frame.prefetch;
  $("prefetch").hidden = !now;
  if (!now) return;
  setText($("prefetch-note"), greeting.predictor ? `${greeting.predictor}, ${now.on ? "on" : "off"}` : "off");
  const share = (n) => (now.prefetches ? `${count(n)} (${percent(n / now.prefetches, 0)})` : count(n));
  showFacts($("prefetch-facts"), [
    ["accuracy of the predictor", now.accuracy === null ? "–" : percent(now.accuracy)],
    ["begun", count(now.prefetches)], ["in time", share(now.useful)], ["late", share(now.late)],
    ["not used", share(now.wasted + now.dropped + now.displaced)],
  ]);
  const all = greeting.layers.reduce((a, b) => a + b, 0);
  const none = !greeting.predictor ? ""
    : frame.slots[0] >= all ? "Every expert has a slot, so nothing is predicted."
    : "The guard has not compared passes with and without prefetching yet.";
  setText($("verdict"), now.verdict ? `Guard: ${now.verdict}.` : none);
}

export function showRequests(frame, greeting) {
  $("requests").hidden = !frame.queue;
  if (!frame.queue) return;
  const [running, waiting, most] = frame.queue;
  setText($("queue"), `${running} of at most ${most} running, ${waiting} waiting`);
  const body = $("request-table").tBodies[0];
  $("request-table").hidden = frame.requests.length === 0;
  while (body.rows.length > frame.requests.length) body.lastElementChild.remove();
  frame.requests.forEach(([name, phase, prompt, computed, fresh, longest, age], i) => {
    let row = body.rows[i];
    if (!row) {
      row = make("tr", {}, make("th", { scope: "row" }), ...["phase", "", "", "", ""].map((kind) => make("td", { class: kind })));
      body.append(row);
      row.cells[5].append(make("button", { type: "button", class: "quiet" }, "Cancel"));
      row.cells[5].firstElementChild.addEventListener("click", () => cancel(row.dataset.name));
    }
    row.dataset.name = row.title = name;
    const texts = [name.replace("req_", "").slice(0, 8), phase, phase === "prompt" ? `${count(computed)} of ${count(prompt)}` : count(prompt), `${count(fresh)} of ${count(longest)}`, seconds(age)];
    texts.forEach((text, cell) => setText(row.cells[cell], text));
    row.cells[5].firstElementChild.hidden = !greeting?.controls;
    row.cells[5].firstElementChild.setAttribute("aria-label", `Cancel ${name}`);
  });
}

async function post(path, body) {
  try {
    const response = await fetch(path, {
      method: "POST", headers: headers({ "content-type": "application/json" }), body: JSON.stringify(body),
    });
    return response.ok ? { value: await response.json() } : { error: await problem(response) };
  } catch {
    return { error: "the server cannot be reached" };
  }
}

async function cancel(name) {
  const { error } = await post("v1/admin/cancel", { request: name });
  setText($("request-error"), error ?? "");
}

export function enableResize() {
  $("resize").addEventListener("submit", async (event) => {
    event.preventDefault();
    const button = $("resize").querySelector("button");
    button.disabled = true;
    const { error, value } = await post("v1/admin/cache", { cache: $("cache").value.trim() });
    button.disabled = false;
    $("resize-error").classList.toggle("error", Boolean(error));
    setText($("resize-error"), error ?? `${count(value.slots)} slots`);
  });
}

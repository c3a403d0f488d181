// The map of experts with its player, and what the pointer is at in the chart.
import { $, count, percent, setText } from "./format.js";
import { ExpertMap } from "./map.js";
import { Playback } from "./playback.js";

const data = JSON.parse($("data").textContent);

{
  const map = new ExpertMap($("drawing")), { recording } = data;
  const begin = () => map.begin(recording.greeting);
  const show = (frame, quiet, old) => {
    map.add(frame, quiet, old);
    if (quiet) return;
    map.drawLayers(frame);
    const [capacity, present] = frame.slots;
    setText($("slots"), `After ${count(frame.t)} of ${count(data.tokens)} tokens: ${count(present)} of ${count(data.experts)} experts in memory, in ${count(capacity)} slots.`);
  };
  begin();
  new Playback($("player"), recording, show, begin, false);
}

{
  const tip = document.querySelector(".tip");
  const show = (event, text) => {
    tip.textContent = text;
    tip.style.display = "block";
    const { width, height } = tip.getBoundingClientRect();
    const left = event.clientX + 16 + width > innerWidth ? event.clientX - 16 - width : event.clientX + 16;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - height - 4))}px`;
  };
  const hide = () => { tip.style.display = "none"; };

  const plot = document.querySelector(".plot"), cursor = document.querySelector(".cursor");
  const xs = [...new Set(data.curves.flatMap((curve) => curve.points.map((point) => point[0])))];
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * data.experts;
    const near = xs.reduce((a, b) => (Math.abs(b - at) < Math.abs(a - at) ? b : a));
    const lines = data.curves
      .map((curve) => [curve.name, curve.points.find((point) => point[0] === near)])
      .filter(([, point]) => point)
      .sort((a, b) => a[1][1] - b[1][1])
      .map(([name, point]) => `${percent(point[1], 2).padStart(8)}  ${name}`);
    show(event, `${near} experts (${((100 * near) / data.experts).toFixed(1)} %)\n${lines.join("\n")}`);
    cursor.style.display = "block";
    cursor.style.left = `${(100 * near) / data.experts}%`;
  });
  plot.addEventListener("pointerleave", () => { hide(); cursor.style.display = "none"; });
}

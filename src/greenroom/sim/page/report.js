// What the pointer is at, beside it. The page is complete without this.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
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
  const percent = (x) => `${(100 * x).toFixed(2)} %`;

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
      .map(([name, point]) => `${percent(point[1]).padStart(8)}  ${name}`);
    show(event, `${near} experts (${((100 * near) / data.experts).toFixed(1)} %)\n${lines.join("\n")}`);
    cursor.style.display = "block";
    cursor.style.left = `${(100 * near) / data.experts}%`;
  });
  plot.addEventListener("pointerleave", () => { hide(); cursor.style.display = "none"; });

  const heat = document.querySelector(".heat");
  heat.addEventListener("pointermove", (event) => {
    const box = heat.getBoundingClientRect();
    const widest = Math.max(...data.counts.map((row) => row.length));
    const layer = Math.floor(((event.clientY - box.top) / box.height) * data.counts.length);
    const expert = Math.floor(((event.clientX - box.left) / box.width) * widest);
    const row = data.counts[layer];
    if (!row || row[expert] === undefined) return hide();
    const mean = row.reduce((a, b) => a + b, 0) / row.length;
    show(event, `layer ${layer}, expert ${expert}\n${percent(row[expert] / data.tokens)} of tokens\n${(row[expert] / mean).toFixed(2)} x the layer's mean`);
  });
  heat.addEventListener("pointerleave", hide);
})();

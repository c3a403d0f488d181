// The frames of the last minutes, as numbers over time.

const MOST = 1200;
const sum = (list) => list.reduce((a, b) => a + b, 0);

export class History {
  constructor() { this.clear(); }

  clear() {
    this.points = []; // {t, tokens, hits, misses, stalls, layers}
    this.first = []; // [time of a first token, TTFT]
    this.series = { speed: [], ratio: [], waits: [] };
  }

  // Adds a frame, and the values of the charts at its time. Counters that fall begin a new history.
  add(frame) {
    const last = this.points.at(-1);
    const point = { t: frame.t, tokens: frame.tokens?.[1] ?? null, hits: null, misses: null, stalls: null };
    if (frame.states) point.layers = frame;
    if (frame.hits) Object.assign(point, { hits: sum(frame.hits), misses: sum(frame.misses) });
    if (frame.stalls) point.stalls = sum(frame.stalls) / 1000;
    if (last && (point.t < last.t || (point.hits ?? 0) < (last.hits ?? 0))) this.clear();
    this.points.push(point);
    for (const [age, ttft] of frame.answered ?? []) this.first.push([frame.t - age, ttft]);
    this.#addValue("speed", this.#rate("tokens", 2));
    this.#addValue("waits", this.#rate("stalls", 3));
    const [hits, misses] = [this.#change("hits", 5), this.#change("misses", 5)];
    this.#addValue("ratio", hits === null || hits.by + misses.by === 0 ? null : hits.by / (hits.by + misses.by));
    for (const list of [this.points, this.first, ...Object.values(this.series)]) {
      if (list.length > MOST) list.splice(0, list.length - MOST);
    }
  }

  addGreeting(greeting, t) {
    for (const [age, ttft] of greeting.answered ?? []) this.first.push([t - age, ttft]);
  }

  #addValue(name, value) { this.series[name].push([this.points.at(-1).t, value]); }

  // The point `span` before the last one.
  #before(span) {
    const { t } = this.points.at(-1);
    return this.points.findLast((point) => point.t <= t - span + 0.05) ?? this.points[0];
  }

  #change(field, span) {
    const [last, before] = [this.points.at(-1), this.#before(span)];
    if (last === before || last[field] === null || before[field] === null) return null;
    return { by: Math.max(0, last[field] - before[field]), in: last.t - before.t };
  }

  #rate(field, span) {
    const change = this.#change(field, span);
    return change === null ? null : change.by / change.in;
  }

  // What the layers did in the last `span`: lists of hits, misses and stalls (milliseconds).
  layers(span) {
    const last = this.points.at(-1)?.layers;
    if (!last) return null;
    const before = this.#before(span).layers ?? last;
    const change = (name) => last[name]?.map((value, i) => Math.max(0, value - before[name][i])) ?? null;
    return { hits: change("hits"), misses: change("misses"), stalls: change("stalls") };
  }

  // Bytes and busy share of each link in the last `span`.
  links(span) {
    const [last, before] = [this.points.at(-1), this.#before(span)];
    const seconds = last.t - before.t;
    return (last.layers?.links ?? []).map(([nbytes, busy], i) => {
      const old = before.layers?.links?.[i];
      if (!old || seconds <= 0) return { rate: 0, busy: 0 };
      const rate = nbytes === null ? null : Math.max(0, nbytes - old[0]) / seconds;
      return { rate, busy: Math.min(1, Math.max(0, busy - old[1]) / seconds) };
    });
  }
}

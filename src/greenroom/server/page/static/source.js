// Where frames come from: a server's stream, or a recording as one JSON object.

export const DATA = "v1/live";
const WAITS_S = [0.5, 1, 2, 4];
let key = null; // stays in this page's memory alone

export function setKey(value) { key = value; }

export function headers(more = {}) {
  return key === null ? more : { ...more, authorization: `Bearer ${key}` };
}

export async function* serverSentEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const event = { name: "message", data: "" };
      for (const line of part.split("\n")) {
        if (line.startsWith("event: ")) event.name = line.slice(7);
        if (line.startsWith("data: ")) event.data += line.slice(6);
      }
      if (event.data) yield event;
    }
  }
}

export async function problem(response) {
  try {
    const { error } = await response.json();
    return error.message ?? String(error);
  } catch {
    return `the server answers ${response.status}`;
  }
}

// An error of what is shown must not look like one of the network, nor end the stream.
function take(show, data) {
  try { show(JSON.parse(data)); } catch (error) { reportError(error); }
}

// Calls `on.greeting`, `on.frame`, `on.recording`, `on.away(text)` and `on.locked(text)`, for ever.
export async function follow(on) {
  for (let failures = 0; ; failures += 1) {
    let why = "the server cannot be reached";
    try {
      const response = await fetch(DATA, { headers: headers(), cache: "no-store" });
      if (response.status === 401) {
        await on.locked(key === null ? "" : await problem(response));
        continue;
      }
      if (!response.ok) {
        why = await problem(response);
      } else if (response.headers.get("content-type").startsWith("application/json")) {
        take(on.recording, await response.text());
        return;
      } else {
        for await (const { name, data } of serverSentEvents(response.body)) {
          failures = 0;
          take(name === "greeting" ? on.greeting : on.frame, data);
        }
      }
    } catch { /* the connection was lost: `take` reports other errors */ }
    on.away(why);
    await new Promise((done) => setTimeout(done, 1000 * WAITS_S[Math.min(failures, WAITS_S.length - 1)]));
  }
}

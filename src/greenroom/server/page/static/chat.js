// A chat over /v1/chat/completions, streamed.
import { $, make } from "./format.js";
import { headers, problem, serverSentEvents } from "./source.js";

export class Chat {
  constructor() {
    this.model = null;
    this.messages = [];
    this.running = null; // the AbortController of the answer under way
    $("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.running.abort(); else this.#ask();
    });
    $("chat-text").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        if (!this.running) this.#ask();
      }
    });
    $("chat-reset").addEventListener("click", () => {
      this.running?.abort();
      this.messages = [];
      $("chat-log").replaceChildren();
      $("chat-text").focus();
    });
  }

  begin(greeting) {
    this.model = greeting.title;
    $("chat").hidden = false;
  }

  #say(role, text = "") {
    const said = make("div", { class: `said ${role}` }, text);
    $("chat-log").append(said);
    $("chat-log").scrollTop = $("chat-log").scrollHeight;
    return said;
  }

  async #ask() {
    const text = $("chat-text").value.trim();
    if (!text || this.model === null) return;
    const messages = (this.messages = [...this.messages, { role: "user", content: text }]);
    $("chat-text").value = "";
    this.#say("user", text);
    const said = this.#say("assistant");
    said.classList.add("waits");
    this.running = new AbortController();
    $("chat-send").textContent = "Stop";
    let answer = "";
    try {
      for await (const { reasoning_content: thought, content } of this.#stream(messages, this.running.signal)) {
        said.classList.remove("waits");
        if (thought) {
          if (said.lastChild?.className !== "thought") said.append(make("span", { class: "thought" }));
          said.lastChild.append(thought);
        }
        if (content) { said.append(content); answer += content; }
        $("chat-log").scrollTop = $("chat-log").scrollHeight;
      }
    } catch (error) {
      if (error.name !== "AbortError") this.#say("error", error.message).setAttribute("role", "alert");
    }
    said.classList.remove("waits");
    said.normalize();
    if (!said.textContent) said.remove();
    if (this.messages === messages) {
      this.messages = answer ? [...messages, { role: "assistant", content: answer }] : messages.slice(0, -1);
    }
    this.running = null;
    $("chat-send").textContent = "Send";
  }

  async* #stream(messages, signal) {
    const most = Number($("chat-most").value);
    const body = { model: this.model, messages, stream: true, ...(most >= 1 ? { max_tokens: Math.floor(most) } : {}) };
    const response = await fetch("v1/chat/completions", {
      method: "POST", headers: headers({ "content-type": "application/json" }), body: JSON.stringify(body), signal,
    });
    if (!response.ok) throw new Error(await problem(response));
    for await (const { data } of serverSentEvents(response.body)) {
      if (data === "[DONE]") return;
      const part = JSON.parse(data);
      if (part.error) throw new Error(part.error.message);
      if (part.choices?.[0]?.delta) yield part.choices[0].delta;
    }
  }
}

// The chat box: this node's OpenAI route, streamed. The conversation is kept in this page only.

import { byId, element, setText } from "./elements.js";
import { counted } from "./state.js";

const UNAUTHORIZED = 401;

export class Chat {
  #log = byId("chat-log");
  #text = byId("chat-text");
  #send = byId("chat-send");
  #stop = byId("chat-stop");
  #account = byId("chat-account");
  #turns = [];
  #hasTemplate = true;
  #stopping = null;

  constructor() {
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#ask();
    });
    this.#text.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#ask();
    });
    this.#stop.addEventListener("click", () => this.#stopping?.abort());
    byId("chat-new").addEventListener("click", () => this.#forget());
  }

  show(state, delta) {
    if (delta && !delta.model) return;
    this.#hasTemplate = state.model.chat;
    setText(byId("chat-label"), this.#hasTemplate ? "Message" : "Text to be continued");
  }

  #forget() {
    this.#stopping?.abort();
    this.#turns = [];
    for (const turn of this.#log.querySelectorAll(".turn")) turn.remove();
    setText(this.#account, "");
    this.#text.focus();
  }

  async #ask() {
    const text = this.#text.value.trim();
    if (!text || this.#stopping) return;
    this.#text.value = "";
    this.#addTurn("You", text);
    const turns = this.#turns;
    turns.push({ role: "user", content: text });
    const answer = this.#addTurn("Model", "");
    this.#setBusy(true);
    this.#stopping = new AbortController();
    let said = "";
    try {
      for await (const piece of this.#stream(turns, text)) {
        said += piece;
        answer.lastChild.data = said;
        this.#log.scrollTop = this.#log.scrollHeight;
      }
    } catch (error) {
      if (error.name !== "AbortError") this.#fail(answer, error);
    }
    if (said) turns.push({ role: "assistant", content: said });
    else turns.pop(); // nothing was said to it, so it is no part of what is asked next
    this.#stopping = null;
    this.#setBusy(false);
  }

  #fail(answer, error) {
    answer.classList.add("failed");
    answer.lastChild.data += `The answer failed: ${error.message}`;
  }

  #setBusy(isBusy) {
    this.#send.disabled = isBusy;
    this.#stop.disabled = !isBusy;
    this.#log.setAttribute("aria-busy", String(isBusy)); // read when it is whole, not token by token
  }

  #addTurn(who, text) {
    const turn = element("p", { class: "turn" }, element("span", { class: "turn-who" }, who), text || " ");
    this.#log.append(turn);
    this.#log.scrollTop = this.#log.scrollHeight;
    return turn;
  }

  /** Pieces of the answer's text. */
  async *#stream(turns, text) {
    const body = this.#hasTemplate ? { messages: turns } : { prompt: text };
    const key = byId("chat-key").value;
    const answer = await fetch(this.#hasTemplate ? "/v1/chat/completions" : "/v1/completions", {
      method: "POST",
      headers: { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) },
      body: JSON.stringify({ ...body, stream: true }),
      signal: this.#stopping.signal,
    });
    if (!answer.ok) {
      if (answer.status === UNAUTHORIZED) byId("chat-key-row").hidden = false;
      const problem = await answer.json().catch(() => null);
      throw new Error(problem?.error?.message ?? `status ${answer.status}`);
    }
    let count = 0;
    for await (const piece of eventsOf(answer.body)) {
      if (piece.error) throw new Error(piece.error.message);
      const choice = piece.choices[0];
      count += "token" in piece;
      if (piece.swarm) setText(this.#account, accountText(count, piece.swarm));
      if (choice) yield choice.delta?.content ?? choice.text ?? "";
    }
  }
}

/** The JSON of server-sent events, up to [DONE]. */
async function* eventsOf(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
    }
  }
}

function accountText(count, swarm) {
  const workers = Object.keys(swarm.workers ?? {}).length;
  const share = Math.round(100 * (swarm.share_remote ?? 0));
  return `${counted(count, "token")}; ${counted(workers, "worker")} computed ${share} % of the rows.`;
}

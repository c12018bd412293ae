// The stream of events: a snapshot, then what changed. A page that nobody sees does not listen.
//
// Imports nothing: index.html loads this file by itself, so that the node answers while the rest of the page is on its way.

const RETRY_MS = 5000;

class Events {
  #take = null;
  #onLink = () => {};
  #source = null;
  #early = [];
  #timer = 0;

  constructor() {
    document.addEventListener("visibilitychange", () => (document.hidden ? this.#close() : this.#open()));
    addEventListener("pagehide", () => this.#close());
    addEventListener("pageshow", () => this.#open());
    this.#open();
  }

  /** Calls `take(name, value)` with "snapshot" or "delta", and `onLink("live" | "lost")`; also for what came before. */
  listen(take, onLink) {
    this.#take = take;
    this.#onLink = onLink;
    for (const event of this.#early.splice(0)) this.#heard(event);
  }

  #open() {
    if (this.#source) return;
    const source = new EventSource("/api/events");
    this.#source = source;
    for (const name of ["snapshot", "delta"]) source.addEventListener(name, (event) => this.#heard(event));
    source.addEventListener("error", () => {
      this.#onLink("lost");
      // The browser tries again by itself, unless it was refused.
      if (source.readyState !== EventSource.CLOSED) return;
      this.#close();
      this.#timer = setTimeout(() => this.#open(), RETRY_MS);
    });
  }

  #heard(event) {
    if (!this.#take) {
      this.#early.push(event);
      return;
    }
    this.#take(event.type, JSON.parse(event.data));
    this.#onLink("live");
  }

  #close() {
    clearTimeout(this.#timer);
    this.#source?.close();
    this.#source = null;
  }
}

/** Of this page. */
export const events = new Events();

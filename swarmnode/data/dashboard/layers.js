// The coverage map as tables, for whoever does not see it: all layers, and the holders in one. Filled while open.

import { byId, element, setText } from "./elements.js";
import { holdersText, layerFacts, layerNumbers, runsOf, runText } from "./state.js";

export class LayerTables {
  #all = byId("layers-details");
  #allBody = byId("layers-body");
  #one = byId("layer-details");
  #oneBody = byId("layer-body");
  #choice = byId("layer-choice");
  #state = null;
  #shown = "";

  constructor() {
    this.#all.addEventListener("toggle", () => this.#fillAll());
    this.#one.addEventListener("toggle", () => this.#fillOne());
    this.#choice.addEventListener("change", () => this.#fillOne());
  }

  show(state, delta) {
    this.#state = state;
    if (!delta || delta.model) {
      this.#choice.replaceChildren(...layerNumbers(state).map((layer) => element("option", {}, String(layer))));
    }
    if (!delta || delta.layers) this.#fillAll();
    if (!delta || delta.layers || delta.nodes || delta.gone) this.#fillOne();
  }

  /** Show the holders in a layer; with `open`, go there. */
  choose(layer, open) {
    this.#choice.value = String(layer);
    if (open) {
      this.#one.open = true;
      this.#choice.focus();
    }
    this.#fillOne();
  }

  #fillAll() {
    if (!this.#state || !this.#all.open) return;
    const rows = layerNumbers(this.#state).map((layer) => {
      const { held, twice, least, missing } = layerFacts(this.#state.layers[layer]);
      return element(
        "tr",
        {},
        element("th", { scope: "row" }, String(layer)),
        ...[held, twice, least].map((count) => element("td", { class: "number" }, String(count))),
        element("td", { class: "long" }, missing || "none"),
      );
    });
    this.#allBody.replaceChildren(...rows);
  }

  #fillOne() {
    if (!this.#state || !this.#one.open) return;
    const runs = runsOf(this.#state, Number(this.#choice.value));
    const lines = runs.map((run) => [runText([run.first, run.last]), run.replicas === 9 ? "9 or more" : String(run.replicas), holdersText(run.holders, run.replicas) || "nobody"]);
    const text = JSON.stringify([this.#choice.value, lines]);
    if (text === this.#shown) return;
    this.#shown = text;
    const rows = lines.map(([experts, replicas, holders]) =>
      element(
        "tr",
        {},
        element("th", { scope: "row" }, experts),
        element("td", { class: "number" }, replicas),
        element("td", { class: "long" }, holders),
      ),
    );
    this.#oneBody.replaceChildren(...rows);
    setText(this.#one.querySelector("summary"), `Holders in layer ${this.#choice.value}`);
  }
}

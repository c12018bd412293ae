// Everything beside the map.

import { Chat } from "./chat.js";
import { showInvitation } from "./join.js";
import { LayerTables } from "./layers.js";
import { OwnNode } from "./node.js";
import { PeerTable } from "./peers.js";
import { ThroughputCharts } from "./throughput.js";

export class Panels {
  #tables = new LayerTables();
  #parts = [new OwnNode(), new Chat(), new ThroughputCharts(), this.#tables, new PeerTable()];

  constructor() {
    showInvitation();
  }

  /** Every part takes from a state what it shows, and of a delta (null for a snapshot) what changed. */
  show(state, delta) {
    for (const part of this.#parts) part.show(state, delta);
  }

  /** The layer whose holders are listed. */
  chooseLayer(layer, open) {
    this.#tables.choose(layer, open);
  }
}

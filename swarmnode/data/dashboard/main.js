// Puts the page together: each part is shown every state, and what changed in it.

import { Chat } from "./chat.js";
import { byId, setText } from "./elements.js";
import { events } from "./events.js";
import { showInvitation } from "./join.js";
import { LayerTables } from "./layers.js";
import { CoverageMap } from "./map.js";
import { OwnNode } from "./node.js";
import { PeerTable } from "./peers.js";
import { applied } from "./state.js";
import { ThroughputCharts } from "./throughput.js";

const LINK = { live: "live", lost: "connection lost; trying again" };

const tables = new LayerTables();
const map = new CoverageMap((layer, open) => tables.choose(layer, open));
const others = [new OwnNode(), new Chat(), new ThroughputCharts(), tables, new PeerTable()];

/** Resolves when what was drawn is on the screen. */
const painted = () => new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));

let state = null;
let shown = null;

/** Shows a state, and (null for a snapshot) what changed in it. */
function show(delta) {
  const now = state;
  map.show(now, delta);
  // The map first: hundreds of rows of peers take longer.
  shown ??= painted().then(() => {
    map.markDrawn();
    showInvitation();
  });
  shown = shown.then(() => others.forEach((part) => part.show(now, delta)));
}

events.listen(
  (name, value) => {
    const delta = name === "delta" ? value : null;
    state = delta ? applied(state, delta) : value;
    show(delta);
  },
  (link) => {
    setText(byId("link-state"), LINK[link]);
    byId("link-state").dataset.state = link;
  },
);

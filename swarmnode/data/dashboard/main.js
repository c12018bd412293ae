// Puts the page together: the map first, and what else there is once that is on the screen.

import { byId, setText } from "./elements.js";
import { events } from "./events.js";
import { CoverageMap } from "./map.js";
import { applied } from "./state.js";

const LINK = { live: "live", lost: "connection lost; trying again" };

/** Resolves when what was drawn is on the screen. */
const painted = () => new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));

let state = null;
let panels = null;
let opening = null;

const map = new CoverageMap((layer, open) => panels?.chooseLayer(layer, open));

/** The other parts of the page: their files are fetched behind the map's. */
async function openPanels() {
  await painted();
  if (state) map.markDrawn();
  const { Panels } = await import("./panels.js");
  panels = new Panels();
  if (state) panels.show(state, null);
}

function openOnce() {
  opening ??= openPanels().catch((error) => {
    console.warn("the rest of the page did not come; with the node's next word, again:", error);
    opening = null;
  });
}

events.listen(
  (name, value) => {
    const delta = name === "delta" ? value : null;
    state = delta ? applied(state, delta) : value;
    map.show(state, delta);
    if (panels) panels.show(state, delta);
    else openOnce();
  },
  (link) => {
    setText(byId("link-state"), LINK[link]);
    byId("link-state").dataset.state = link;
    openOnce(); // also where there are no events to be had: a chat needs none
  },
);

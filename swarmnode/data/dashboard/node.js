// This node: its budget, what it holds, and whether others reach it.

import { byId, element, setText } from "./elements.js";
import { bytesText, counted } from "./state.js";

export class OwnNode {
  #list = byId("node-facts");
  #said = "";

  show(state, delta) {
    if (delta && !delta.node && !delta.model) return;
    this.#title(state.model);
    const facts = factsOf(state);
    const text = JSON.stringify(facts);
    if (text === this.#said) return;
    this.#said = text;
    this.#list.replaceChildren(...facts.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
    const warning = byId("warning");
    setText(warning, state.node.key_conflict ? "Another node runs with this node's key: stop one of the two." : "");
    warning.hidden = !state.node.key_conflict;
  }

  #title(model) {
    setText(byId("model"), `${model.name} · ${model.id.slice(0, 8)}`);
    document.title = `${model.name} · swarmnode`;
  }
}

function factsOf({ node, model }) {
  return [
    ["Node", node.name],
    ["Role", node.roles.join(", ") || "none"],
    ["Device", node.device || "unknown"],
    ["Budget", budgetText(node, model)],
    ["Holds", holdingsText(node, model)],
    ["Addresses", node.addresses.join(", ") || "none: it only dials"],
    ["Reachable", reachText(node)],
    ["Connected", `${counted(node.connected, "node")}, ${counted(node.neighbours, "gossip neighbour")}`],
  ];
}

function budgetText(node, model) {
  if (node.budget_bytes) return bytesText(node.budget_bytes);
  const memory = node.resident_bytes ? `, ${bytesText(node.resident_bytes)} of it kept in memory` : "";
  return node.seeds ? `the whole model, ${bytesText(model.bytes)} of experts, in its file${memory}` : "none";
}

function holdingsText(node, model) {
  if (node.seeds) return `all ${model.experts.toLocaleString("en")} experts, for others to fetch`;
  const layers = new Set(node.holdings.map(([layer]) => layer)).size;
  const fetching = node.fetching ? `, ${node.fetching} on their way` : "";
  return `${counted(node.serving, "expert")} in ${counted(layers, "layer")}, ${bytesText(node.serving_bytes)}${fetching}`;
}

function reachText(node) {
  if (!node.dialled) return "unknown: nobody has dialled this node yet";
  const outside = node.dialled_from_outside ? `, of that ${node.dialled_from_outside} from the internet` : ", not from the internet";
  return `yes: dialled ${node.dialled === 1 ? "once" : `${node.dialled} times`}${outside}`;
}

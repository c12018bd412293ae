// The table of peers: a row a node; only cells whose text changed are touched.

import { byId, element, setText } from "./elements.js";
import { bytesText, counted, rateText } from "./state.js";

const NUMBERS = new Set(["latency", "rows", "experts", "budget"]);

/** What the cells of a node's row say. */
function cellsOf(node) {
  const isKnown = node.connected || node.state === "lost" || node.state === "announced";
  return {
    state: isKnown ? node.state : `${node.state}, by its word`,
    role: node.roles.join(", "),
    device: node.device,
    latency: node.latency_ms === null ? "" : `${node.latency_ms} ms`,
    rows: node.rows_per_s ? rateText(node.rows_per_s) : node.connected ? "0" : "",
    experts: node.fetching ? `${node.serving} + ${node.fetching}` : String(node.serving),
    budget: node.budget_bytes ? bytesText(node.budget_bytes) : "",
    address: node.address,
  };
}

/** Connected ones first, then those that hold most. */
function inOrder(nodes) {
  return Object.keys(nodes).sort((a, b) => {
    const one = nodes[a];
    const other = nodes[b];
    return other.connected - one.connected || other.serving - one.serving || (one.name < other.name ? -1 : 1);
  });
}

export class PeerTable {
  #body = byId("peers-body");
  #rows = new Map();

  show(state, delta) {
    const { nodes } = state;
    if (!delta) this.#rows.clear();
    const changed = delta ? Object.entries(delta.nodes ?? {}) : Object.keys(nodes).map((id) => [id, nodes[id]]);
    let isMoved = !delta || Boolean(delta.gone);
    for (const [id, fields] of changed) {
      isMoved ||= !this.#rows.has(id) || "connected" in fields || "serving" in fields;
      this.#fill(id, nodes[id]);
    }
    for (const id of delta?.gone ?? []) this.#rows.delete(id);
    if (isMoved) this.#body.replaceChildren(...inOrder(nodes).map((id) => this.#rows.get(id).row));
    if (!delta || isMoved || delta.node) this.#summarise(state);
  }

  #summarise({ node, nodes }) {
    const listed = Object.keys(nodes).length;
    const more = node.nodes_known > listed ? `; the first ${listed} are listed` : "";
    setText(byId("peers-summary"), `${counted(node.nodes_known, "other node")} known, ${node.connected} connected${more}.`);
  }

  #fill(id, node) {
    const known = this.#rows.get(id) ?? this.#make(id, node);
    for (const [name, text] of Object.entries(cellsOf(node))) setText(known.cells[name], text);
    known.cells.state.dataset.state = node.state;
  }

  #make(id, node) {
    const cells = {};
    const row = element("tr", {}, element("th", { scope: "row", title: id }, node.name));
    for (const name of ["state", "role", "device", "latency", "rows", "experts", "budget", "address"]) {
      cells[name] = element("td", NUMBERS.has(name) ? { class: "number" } : {});
      row.append(cells[name]);
    }
    const made = { row, cells };
    this.#rows.set(id, made);
    return made;
  }
}

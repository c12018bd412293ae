// The swarm as the node tells it: a snapshot, and what changed since. No page here: values in, values out.

const FLAT = ["model", "node", "now", "layers"];

/** Of a cell's holders, so many are named; the others are counted. */
export const MOST_NAMED = 8;

/** The state after a delta (docs/node-api.md). Sections that changed are new objects, the others are shared. */
export function applied(state, delta) {
  const after = { ...state };
  for (const name of FLAT) if (delta[name]) after[name] = { ...state[name], ...delta[name] };
  if (delta.nodes || delta.gone) {
    after.nodes = { ...state.nodes };
    for (const id of delta.gone ?? []) delete after.nodes[id];
    for (const [id, fields] of Object.entries(delta.nodes ?? {})) after.nodes[id] = { ...after.nodes[id], ...fields };
  }
  return after;
}

/** Numbers of the layers that have routed experts, in order. */
export function layerNumbers(state) {
  return Object.keys(state.layers).map(Number).sort((a, b) => a - b);
}

/** Replicas of an expert: 0 to 9, where 9 means 9 or more. */
export function replicasOf(state, layer, expert) {
  return state.layers[layer].charCodeAt(expert) - 48;
}

/** Nodes that serve an expert by their own word and were not lost, in the order of their names. */
export function holdersOf(state, layer, expert) {
  const found = [];
  for (const [id, node] of Object.entries(state.nodes)) {
    if (node.state === "lost") continue;
    for (const [held, first, count] of node.ranges) {
      if (held === layer && first <= expert && expert < first + count) {
        found.push({ id, ...node });
        break;
      }
    }
  }
  return found.sort((a, b) => (a.name < b.name ? -1 : a.name > b.name ? 1 : 0));
}

/** One sentence about an expert, as the live region reads it. */
export function cellText(state, layer, expert) {
  const replicas = replicasOf(state, layer, expert);
  const holders = holdersOf(state, layer, expert);
  const count = Math.max(replicas, holders.length);
  if (!count) return `Layer ${layer}, expert ${expert}: no replica; this backbone computes it.`;
  const atLeast = replicas === 9 && holders.length <= 9 ? " or more" : "";
  const word = count === 1 && !atLeast ? "replica" : "replicas";
  return `Layer ${layer}, expert ${expert}: ${count}${atLeast} ${word}. ${holdersText(holders, count)}`;
}

/** Names of holders, and how many more there are. */
export function holdersText(holders, count = holders.length) {
  const named = holders.slice(0, MOST_NAMED).map((holder) => holder.name + (holder.device ? ` (${holder.device})` : ""));
  const more = Math.max(count, holders.length) - named.length;
  if (more > 0) named.push(`${more} more`);
  return named.length ? `Held by ${named.join(", ")}.` : "";
}

/** A layer as runs of neighbouring experts with the same replicas and holders. */
export function runsOf(state, layer) {
  const digits = state.layers[layer];
  const held = Array.from(digits, () => []);
  for (const [id, node] of Object.entries(state.nodes)) {
    if (node.state === "lost") continue;
    for (const [at, first, count] of node.ranges) {
      if (at !== layer) continue;
      for (let expert = first; expert < Math.min(first + count, digits.length); expert++) held[expert].push(id);
    }
  }
  const runs = [];
  let before = null;
  for (let expert = 0; expert < digits.length; expert++) {
    const key = digits[expert] + held[expert].join(" ");
    if (key === before) runs[runs.length - 1].last = expert;
    else runs.push({ first: expert, last: expert, replicas: Number(digits[expert]), holders: held[expert].map((id) => state.nodes[id]) });
    before = key;
  }
  return runs;
}

/** What a row of the table of layers says. */
export function layerFacts(digits) {
  let held = 0;
  let twice = 0;
  let least = 9;
  const missing = [];
  for (let expert = 0; expert < digits.length; expert++) {
    const replicas = digits.charCodeAt(expert) - 48;
    held += replicas > 0;
    twice += replicas > 1;
    least = Math.min(least, replicas);
    if (!replicas) {
      const last = missing[missing.length - 1];
      if (last && last[1] === expert - 1) last[1] = expert;
      else missing.push([expert, expert]);
    }
  }
  return { held, twice, least, missing: missing.map(runText).join(", ") };
}

/** Experts held and held twice, of all. */
export function coverage(state) {
  let held = 0;
  let twice = 0;
  for (const digits of Object.values(state.layers)) {
    const facts = layerFacts(digits);
    held += facts.held;
    twice += facts.twice;
  }
  return { held, twice, all: state.model.experts };
}

/** "3" or "3 to 7". */
export function runText([first, last]) {
  return first === last ? `${first}` : `${first} to ${last}`;
}

/** Bytes for people: decimal units, as the command line has them. */
export function bytesText(bytes) {
  for (const [unit, size] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (bytes >= size) return `${(bytes / size).toFixed(bytes >= 10 * size ? 0 : 1)} ${unit}`;
  }
  return `${bytes} B`;
}

/** A rate for people: no more digits than mean something. */
export function rateText(rate) {
  return rate >= 100 || rate === 0 ? Math.round(rate).toLocaleString("en") : rate.toFixed(1);
}

/** "1 node", "2 nodes". */
export function counted(count, noun) {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
}

/** Rounded down: 100 % means all. */
export function percent(part, whole) {
  return whole ? `${Math.floor((100 * part) / whole)} %` : "0 %";
}

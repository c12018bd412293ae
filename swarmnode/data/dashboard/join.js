// How another machine joins: what `swarmnode invite` prints, as a link, a command and a QR code.

import { byId, element } from "./elements.js";

const QUIET_ZONE = 4;

/** Ask this node, and show it. */
export async function showInvitation() {
  const body = byId("join-body");
  try {
    const answer = await fetch("/api/invite", { cache: "no-store" });
    const value = await answer.json();
    if (!answer.ok) throw new Error(value.error.message);
    body.replaceChildren(...partsOf(value));
  } catch (error) {
    body.replaceChildren(element("p", { class: "hint" }, `Not shown: ${error.message}`));
  }
}

function partsOf(invitation) {
  const text = element("div", {}, ...fieldOf("Link", "join-link", invitation.link), ...fieldOf("Command", "join-command", invitation.command));
  for (const hint of hintsOf(invitation)) text.append(element("p", { class: "hint" }, hint));
  return [element("div", { class: "join-grid" }, qrCode(invitation.qr), text)];
}

function fieldOf(name, id, value) {
  const input = element("input", { id, readonly: "", spellcheck: "false" });
  input.value = value;
  input.addEventListener("focus", () => input.select());
  const button = element("button", { type: "button" }, `Copy ${name.toLowerCase()}`);
  const said = element("span", { class: "hint", role: "status" });
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(value);
      said.textContent = " copied";
    } catch {
      input.focus();
      said.textContent = " selected: copy it with the keyboard";
    }
  });
  return [element("label", { for: id }, name), input, element("div", { class: "buttons" }, button, said)];
}

function hintsOf({ needs_secret, limited, reach, port }) {
  const hints = [];
  if (reach === "machine") hints.push(`Only this machine can join, each worker with a --home of its own. For others start this node with --listen 0.0.0.0:${port}.`);
  if (reach === "network") hints.push("These addresses work inside your own network only.");
  if (needs_secret) hints.push("The link does not carry the network's secret: copy its file to the other machine.");
  if (limited) hints.push("Only nodes whose ids are in this node's --allow file are admitted.");
  return hints;
}

/** Always black on white, with the margin that readers need, whatever the theme. */
function qrCode(rows) {
  const size = rows.length + 2 * QUIET_ZONE;
  const canvas = element("canvas", { class: "qr", role: "img", "aria-label": "The link as a QR code", width: size, height: size });
  const context = canvas.getContext("2d");
  context.fillStyle = "#ffffff";
  context.fillRect(0, 0, size, size);
  context.fillStyle = "#000000";
  rows.forEach((row, y) => {
    for (let x = 0; x < row.length; x++) if (row[x] === "1") context.fillRect(x + QUIET_ZONE, y + QUIET_ZONE, 1, 1);
  });
  return canvas;
}

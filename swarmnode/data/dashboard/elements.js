// Making elements. Text is always text: nothing here, or anywhere on the page, turns a string into markup.

/** The element with an id that index.html has. */
export function byId(id) {
  return document.getElementById(id);
}

/** A new element with attributes and children (elements, or strings that become text). */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** Set an element's text, if it is another one: a screen reader reads what is set again, changed or not. */
export function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

/** A custom property of the page's current theme. */
export function themeColour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Call `redraw` whenever the theme changes. */
export function onTheme(redraw) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}

/** Size a canvas in CSS pixels, sharp on every screen; returns its context, scaled so that a unit is a CSS pixel. */
export function sizedContext(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(width * ratio));
  canvas.height = Math.max(1, Math.round(height * ratio));
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

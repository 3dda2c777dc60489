// Small helpers to build elements; text is always text, never markup.

/** Return an element: h("p", {class: "pale"}, "text", child). Functions become listeners, null props are left out. */
export function h(tag, props = {}, ...children) {
  const el = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") el.addEventListener(name.slice(2), value);
    else if (name in el && typeof value === "boolean") el[name] = value;
    else el.setAttribute(name, value === true ? "" : value);
  }
  el.append(...children.flat().filter((c) => c !== null && c !== undefined && c !== false));
  return el;
}

/** Return an SVG element. */
export function svg(tag, props = {}, ...children) {
  const el = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(props)) el.setAttribute(name, value);
  el.append(...children);
  return el;
}

export const byId = (id) => document.getElementById(id);

const NOTHING = 1e-9; // rounding noise of the sums; shown as nought, without sign and colour

/** A number with its sign: +1.23, −0.40; the sign says what the colour says. */
export function signed(value) {
  if (Math.abs(value) < NOTHING) return "0.00";
  const text = Math.abs(value) >= 1000 || (value !== 0 && Math.abs(value) < 0.005)
    ? Math.abs(value).toExponential(1) : Math.abs(value).toFixed(2);
  return (value < 0 ? "−" : "+") + text;
}

/** The class of a signed number: for, against, or neither. */
export const side = (value) => (Math.abs(value) < NOTHING ? "" : value < 0 ? "against" : "for");

const SHOWN_AS_NOUGHT = 0.005; // contributions below it are 0.00: a map in colour would say more than there is

/** Whether a concept's map is painted: red or blue counts for or against, and one that adds 0.00 does neither. */
export const isPainted = (concept) => concept.contribution === null || concept.contribution === undefined || Math.abs(concept.contribution) >= SHOWN_AS_NOUGHT;

/** A share as percent: 99.8 %, > 99.9 %. */
export function percent(share) {
  if (share > 0.9995 && share < 1) return "> 99.9 %";
  if (share > 0 && share < 0.0005) return "< 0.1 %";
  return `${(100 * share).toFixed(share > 0 && share < 1 ? 1 : 0)} %`;
}

/** A number in three figures. */
export const figure = (value) => Number(value.toPrecision(3)).toLocaleString("en", { maximumSignificantDigits: 3 });

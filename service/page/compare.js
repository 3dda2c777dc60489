// Images side by side: a row per image, a column per concept, a switch per column.

import { h, percent, side, signed } from "./dom.js";
import { draw, peak } from "./draw.js";

const off = new Set(); // columns switched off, as "explainer/index"
let chosen = null; // the explainer compared

/** Return the element for the picked entries and a function that draws its heat anew. */
export function compareView(entries, view) {
  const names = [...new Set(entries.flatMap((e) => e.answer.explanations.filter((x) => x.concepts.some((c) => c.heatmap)).map((x) => x.name)))];
  if (!entries.length) return { element: h("div", { class: "empty" }, h("h2", {}, "Nothing to compare yet"), h("p", {}, "Look at some images, then tick those to compare under “Looked at so far”.")), refresh() {} };
  if (!names.length) return { element: h("div", { class: "empty" }, h("p", {}, "None of these answers has heatmaps; choose an explainer of concepts in the settings.")), refresh() {} };
  if (!names.includes(chosen)) chosen = names[0];
  const rows = entries.map((entry) => ({ entry, explanation: entry.answer.explanations.find((x) => x.name === chosen) })).filter((row) => row.explanation);
  const columns = new Map();
  for (const { explanation } of rows)
    for (const c of explanation.concepts) {
      const column = columns.get(c.index) ?? { index: c.index, label: c.label, top: 0, size: 0 };
      column.top = Math.max(column.top, peak(c.heatmap));
      column.size += Math.abs(c.contribution ?? c.activation);
      columns.set(c.index, column);
    }
  const order = [...columns.values()].sort((a, b) => b.size - a.size);
  const redraw = [];
  const refresh = () => redraw.forEach((one) => one());
  const head = order.map((column) => {
    const key = `${chosen}/${column.index}`;
    const button = h("button", { type: "button", class: "toggle", "aria-pressed": String(!off.has(key)), title: "Switch this column's heat on or off", onclick: () => {
      off[off.has(key) ? "delete" : "add"](key);
      button.setAttribute("aria-pressed", String(!off.has(key)));
      refresh();
    } }, column.label);
    return h("th", { scope: "col" }, button);
  });
  const versions = new Set(rows.map((row) => row.entry.answer.model.version));
  const body = rows.map(({ entry, explanation }) => {
    const plain = h("canvas", { class: "cell", role: "img", "aria-label": entry.name });
    redraw.push(() => draw(plain, entry, [], { ...view.drawing(), side: 160 }));
    const { prediction } = entry.answer;
    const { target } = explanation;
    return h("tr", {},
      h("th", { scope: "row" }, plain, h("span", { class: "name" }, entry.name), h("span", {}, `${prediction.label} ${percent(prediction.probability)}`),
        target.index !== prediction.index ? h("small", {}, `explained: ${target.label}`) : null,
        versions.size > 1 ? h("small", {}, `version ${entry.answer.model.version}`) : null),
      order.map((column) => {
        const concept = explanation.concepts.find((c) => c.index === column.index);
        if (!concept) return h("td", { class: "pale" }, "–");
        const value = concept.contribution;
        const canvas = h("canvas", { class: "cell", "aria-hidden": "true" });
        redraw.push(() => draw(canvas, entry, off.has(`${chosen}/${column.index}`) ? [] : [{ heat: concept.heatmap, against: (value ?? 1) < 0, top: column.top }], { ...view.drawing(), side: 160 }));
        return h("td", {}, h("span", { class: `number ${value === null ? "" : side(value)}` }, value === null ? concept.activation.toFixed(2) : signed(value)), canvas);
      }));
  });
  const select = h("select", { onchange: () => { chosen = select.value; view.rerender(); } }, names.map((name) => h("option", { value: name, selected: name === chosen }, name)));
  const all = (on) => { order.forEach((c) => off[on ? "delete" : "add"](`${chosen}/${c.index}`)); view.rerender(); };
  const element = h("div", { class: "card" },
    h("div", { class: "controls" }, h("label", {}, "Explainer ", select), h("button", { type: "button", onclick: () => all(true) }, "All columns on"), h("button", { type: "button", onclick: () => all(false) }, "All off")),
    versions.size > 1 ? h("p", { class: "bad" }, "These answers come from different versions of the model.") : null,
    h("p", { class: "pale" }, "Above each picture: what the concept adds (red, +) or takes (blue, −). Heat in a column has one scale, so a paler map is a weaker one."),
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Images by concepts" },
      h("table", { class: "compare" }, h("caption", { class: "unseen" }, `Concepts of ${chosen} in ${rows.length} images`), h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "image"), head)), h("tbody", {}, body))));
  return { element, refresh };
}

// Images side by side: a row per image, a column per concept, a switch per column.

import { h, isPainted, percent, side, signed } from "./dom.js";
import { draw, peak } from "./draw.js";

const off = new Set(); // columns switched off, as "explainer/index"
let chosen = null; // the explainer compared
let grouped = false; // whether concepts that fire together share one column

/** The columns: one per concept, or one per group of concepts (`[[0, 2], [1]]`), named by all of them. */
export function columnsOf(explanations, groups) {
  const groupOf = new Map((groups ?? []).flatMap((group) => group.map((index) => [index, group])));
  const columns = new Map();
  for (const explanation of explanations)
    for (const c of explanation.concepts) {
      const members = groupOf.get(c.index) ?? [c.index];
      const column = columns.get(members[0]) ?? { index: members[0], members, labels: new Map(), top: 0, size: 0 };
      column.labels.set(c.index, c.label);
      column.size += Math.abs(c.contribution ?? c.activation);
      columns.set(members[0], column);
    }
  for (const column of columns.values()) column.label = column.members.map((k) => column.labels.get(k)).filter(Boolean).join(", ");
  return [...columns.values()].sort((a, b) => b.size - a.size);
}

/** One cell of a column: contributions add up, heat too. Null where the image has none of the column's concepts. */
export function cellOf(explanation, column) {
  const concepts = explanation.concepts.filter((c) => column.members.includes(c.index));
  if (!concepts.length) return null;
  const sum = (values) => values.reduce((a, b) => a + b, 0);
  const maps = concepts.map((c) => c.heatmap).filter((m) => m?.values);
  const heatmap = maps.length ? { size: maps[0].size, values: maps[0].values.map((row, y) => row.map((_, x) => sum(maps.map((m) => m.values[y][x])))) } : null;
  const contribution = concepts.some((c) => c.contribution === null) ? null : sum(concepts.map((c) => c.contribution));
  return { contribution, activation: sum(concepts.map((c) => c.activation)), heatmap };
}

/** Return the element for the picked entries and a function that draws its heat anew. */
export function compareView(entries, view) {
  const names = [...new Set(entries.flatMap((e) => e.answer.explanations.filter((x) => x.concepts.some((c) => c.heatmap)).map((x) => x.name)))];
  if (!entries.length) return { element: h("div", { class: "empty" }, h("h2", {}, "Nothing to compare yet"), h("p", {}, "Look at some images, then tick those to compare under “Looked at so far”.")), refresh() {} };
  if (!names.length) return { element: h("div", { class: "empty" }, h("p", {}, "None of these answers has heatmaps; choose an explainer of concepts in the settings.")), refresh() {} };
  if (!names.includes(chosen)) chosen = names[0];
  const rows = entries.map((entry) => ({ entry, explanation: entry.answer.explanations.find((x) => x.name === chosen) })).filter((row) => row.explanation);
  const groups = view.groupsOf(chosen);
  const order = columnsOf(rows.map((row) => row.explanation), grouped ? groups : null);
  for (const column of order) column.top = Math.max(...rows.map((row) => peak(cellOf(row.explanation, column)?.heatmap)));
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
        const concept = cellOf(explanation, column);
        if (!concept) return h("td", { class: "pale" }, "–");
        const value = concept.contribution;
        const canvas = h("canvas", { class: "cell", "aria-hidden": "true" });
        redraw.push(() => draw(canvas, entry, off.has(`${chosen}/${column.index}`) || !isPainted(concept) ? [] : [{ heat: concept.heatmap, against: (value ?? 1) < 0, top: column.top }], { ...view.drawing(), side: 160 }));
        return h("td", {}, h("span", { class: `number ${value === null ? "" : side(value)}` }, value === null ? concept.activation.toFixed(2) : signed(value)), canvas);
      }));
  });
  const select = h("select", { onchange: () => { chosen = select.value; view.rerender(); } }, names.map((name) => h("option", { value: name, selected: name === chosen }, name)));
  const together = h("input", { type: "checkbox", onchange: () => { grouped = together.checked; view.rerender(); } });
  together.checked = grouped;
  const all = (on) => { order.forEach((c) => off[on ? "delete" : "add"](`${chosen}/${c.index}`)); view.rerender(); };
  const element = h("div", { class: "card" },
    h("div", { class: "controls" }, h("label", {}, "Explainer ", select), h("button", { type: "button", onclick: () => all(true) }, "All columns on"), h("button", { type: "button", onclick: () => all(false) }, "All off"),
      groups.some((group) => group.length > 1) ? h("label", { title: "Concepts that fire together in the same places" }, together, " One column per group") : null),
    versions.size > 1 ? h("p", { class: "bad" }, "These answers come from different versions of the model.") : null,
    h("p", { class: "pale" }, "Above each picture: what the concept adds (red, +) or takes (blue, −). Heat in a column has one scale, so a paler map is a weaker one."),
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Images by concepts" },
      h("table", { class: "compare" }, h("caption", { class: "unseen" }, `Concepts of ${chosen} in ${rows.length} images`), h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "image"), head)), h("tbody", {}, body))));
  return { element, refresh };
}

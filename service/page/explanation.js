// One image explained: prediction, signed bars that add up, heat on the image with a switch per concept.

import { figure, h, isPainted, percent, side, signed } from "./dom.js";
import { draw } from "./draw.js";
import { gauge } from "./stability.js";

export const keyOf = (explanation, concept) => `${explanation.name}/${concept.index}`;
const strength = (concept) => Math.abs(concept.contribution ?? concept.activation);
export const ranked = (concepts) => [...concepts].sort((a, b) => strength(b) - strength(a));

/** The sum of all parts, to be held against the target's value. */
export function total(explanation) {
  const parts = explanation.concepts.reduce((sum, c) => sum + (c.contribution ?? 0), 0);
  return parts + (explanation.bias ?? 0) + (explanation.residual ?? 0) + (explanation.others ?? 0);
}

/** The share that the listed concepts explain, of all that moves the value from its bias. */
export function explainedShare(explanation) {
  const listed = explanation.concepts.reduce((sum, c) => sum + Math.abs(c.contribution ?? 0), 0);
  const whole = listed + Math.abs(explanation.others ?? 0) + Math.abs(explanation.residual ?? 0);
  return whole > 0 ? listed / whole : 1;
}

export function addsUp(explanation) {
  return Math.abs(total(explanation) - explanation.target_value) <= 1e-4 * Math.max(1, Math.abs(explanation.target_value));
}

/** Heat shown when an image is first seen: the strongest concept of the first explainer that has a map. */
export function firstShown(answer) {
  for (const explanation of answer.explanations) {
    const concept = ranked(explanation.concepts).find((c) => c.heatmap);
    if (concept) return new Set([keyOf(explanation, concept)]);
  }
  return new Set();
}

/** The layers of heat that are switched on; several at once are weighed by their contributions. */
export function layersOf(entry) {
  const on = [];
  for (const explanation of entry.answer.explanations)
    for (const concept of explanation.concepts)
      if (concept.heatmap && isPainted(concept) && entry.shown.has(keyOf(explanation, concept)))
        on.push({ heat: concept.heatmap, against: (concept.contribution ?? 1) < 0, size: strength(concept) });
  const most = Math.max(...on.map((layer) => layer.size), 1e-30);
  return on.map((layer) => ({ ...layer, weight: on.length > 1 ? 0.25 + 0.75 * layer.size / most : 1 }));
}

function bar(value, most, kind = "") {
  const share = most > 0 ? Math.min(1, Math.abs(value) / most) : 0;
  const fill = h("span", { class: `fill ${value < 0 ? "against" : "for"} ${kind}` });
  fill.style.width = `${50 * share}%`;
  fill.style.left = value < 0 ? `${50 - 50 * share}%` : "50%";
  return h("span", { class: "bar", "aria-hidden": "true" }, fill);
}

function number(value, kind = "") {
  return h("td", { class: `number ${kind || side(value)}` }, signed(value));
}

function table(entry, explanation, view) {
  const concepts = ranked(explanation.concepts);
  const gives = explanation.bias !== null && concepts.every((c) => c.contribution !== null);
  const values = concepts.map((c) => c.contribution ?? c.activation);
  const most = Math.max(...values.map(Math.abs), Math.abs(explanation.bias ?? 0), Math.abs(explanation.residual ?? 0), 1e-30);
  const redraw = [];
  const rows = concepts.map((concept, i) => {
    const key = keyOf(explanation, concept);
    let control = h("span", { class: "pale", title: "this concept has no heatmap" }, "–");
    if (concept.heatmap) {
      const canvas = h("canvas", { "aria-hidden": "true", class: "thumb" });
      const box = h("input", { type: "checkbox", "aria-label": `Heat of ${concept.label}`, "data-key": key, onchange: () => {
        entry.shown[box.checked ? "add" : "delete"](key);
        view.redraw();
      } });
      box.checked = entry.shown.has(key);
      redraw.push(() => {
        box.checked = entry.shown.has(key);
        draw(canvas, entry, isPainted(concept) ? [{ heat: concept.heatmap, against: (concept.contribution ?? 1) < 0 }] : [], { ...view.drawing(), side: 96 });
      });
      control = h("label", { class: "heat" }, box, canvas);
    }
    const name = view.hasGallery(explanation.name)
      ? h("button", { type: "button", class: "link", title: "See images that show it", onclick: () => view.openGallery(explanation.name, concept.index) }, concept.label)
      : concept.label;
    return h("tr", {}, h("td", {}, control),
      h("th", { scope: "row" }, name, concept.note ? h("small", { class: "pale" }, concept.note) : null),
      h("td", { class: "bars" }, gives ? bar(values[i], most) : bar(values[i], most, "relevance")),
      gives ? number(values[i]) : h("td", { class: "number" }, figure(values[i])));
  });
  const plain = (name, value, why) => h("tr", { class: "rest" }, h("td"), h("th", { scope: "row", title: why }, name), h("td", { class: "bars" }, bar(value, most, "rest")), number(value, "rest"));
  if (gives) {
    rows.push(plain("bias", explanation.bias, "what the model says before it has seen anything"));
    if (explanation.others) rows.push(plain("other concepts", explanation.others, "the concepts that are not listed"));
    rows.push(plain("residual", explanation.residual, "what the concepts leave unexplained"));
  }
  const foot = gives ? h("tfoot", {}, h("tr", { class: "explained" }, h("td"), h("th", { scope: "row", colspan: "2" }, "explained by the concepts listed"), h("td", { class: "number" }, percent(explainedShare(explanation)))), h("tr", {}, h("td"), h("th", { scope: "row" }, "sum"),
    h("td", {}, addsUp(explanation)
      ? h("span", { class: "ok" }, `✓ equals the ${explanation.target_value_of ?? "logit"} of “${explanation.target.label}”, ${signed(explanation.target_value)}`)
      : h("span", { class: "bad" }, `✗ differs from ${signed(explanation.target_value)}`)),
    h("td", { class: "number" }, signed(total(explanation))))) : null;
  const caption = gives ? `What counts for (red, +) and against (blue, −) “${explanation.target.label}”` : `Relevance for “${explanation.target.label}”; this kind gives no signed contributions`;
  return { element: h("table", { class: "contributions" }, h("caption", {}, caption),
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "heat"), h("th", { scope: "col" }, "concept"), h("th", { scope: "col" }, h("span", { class: "ends" }, h("span", {}, "−", h("span", { class: "word" }, " against")), h("span", {}, h("span", { class: "word" }, "for "), "+"))), h("th", { scope: "col" }, gives ? "contribution" : "relevance"))),
    h("tbody", {}, rows), foot), redraw };
}

/** Whether an explanation holds a way through rules, in the form that `pathOf` draws. */
function hasPath({ extra }) {
  return Array.isArray(extra?.path) && Array.isArray(extra.alternatives) && extra.path.every((step) => typeof step?.rule === "string");
}

/** The way of an image through rules: these in order, the leaf it ends in, and what would lead elsewhere. */
function pathOf(explanation, view) {
  const { path, leaf, gallery, alternatives, tree_class, tree_probability, network_class, agrees_with_model } = explanation.extra;
  const steps = path.map((step) => h("li", {}, h("span", { class: "rule" }, step.rule), " ", h("span", { class: `number ${side(step.contribution)}` }, signed(step.contribution))));
  const pictures = gallery === undefined ? null
    : h("button", { type: "button", class: "link", onclick: () => view.openGallery(explanation.name, gallery) }, "images of this leaf");
  const end = h("li", { class: "end" }, h("strong", {}, `leaf ${leaf}: ${tree_class}, ${percent(tree_probability)}`), " ", pictures);
  const others = alternatives.map((other) => h("li", {}, h("strong", {}, other.class), ` (${percent(other.probability)}): `,
    other.changes.map((c) => `${c.label} from ${c.code} to ${c.wanted}`).join(", ")));
  return h("div", { class: "path" },
    h("p", {}, agrees_with_model ? "The tree says what the model says." : `The tree says “${tree_class}”, the model does not.`,
      network_class === tree_class ? "" : ` The network it was trained with says “${network_class}”.`),
    h("h4", {}, "Path through the tree"), h("ol", {}, steps, end),
    others.length ? h("details", {}, h("summary", {}, "What would have to change"), h("ul", {}, others)) : null);
}

function predictionCard(answer) {
  const { prediction, target } = answer;
  const rows = prediction.probabilities.slice(0, 5).map((p) => {
    const fill = h("span", { class: "fill plain" });
    fill.style.width = `${100 * p.probability}%`;
    return h("tr", { class: p.index === target.index ? "chosen" : "" }, h("th", { scope: "row" }, p.label), h("td", { class: "bars" }, h("span", { class: "bar from-left", "aria-hidden": "true" }, fill)), h("td", { class: "number" }, percent(p.probability)));
  });
  return h("section", { class: "card" }, h("h3", {}, "Prediction"),
    h("p", { class: "verdict" }, h("strong", {}, prediction.label), ` ${percent(prediction.probability)}`),
    h("table", { class: "probabilities" }, h("caption", { class: "unseen" }, "Most probable classes"), h("tbody", {}, rows)),
    target.index !== prediction.index ? h("p", {}, `Explained below: class “${target.label}”, logit ${signed(target.logit)}.`) : null);
}

/** Return the element of an entry and a function that draws its heat anew. */
export function explanationView(entry, view) {
  const { answer } = entry;
  const viewer = h("canvas", { class: "viewer", role: "img" });
  const redraw = [];
  const refresh = () => redraw.forEach((one) => one());
  const tableView = { ...view, redraw: refresh };
  redraw.push(() => {
    const layers = layersOf(entry);
    draw(viewer, entry, layers, { ...view.drawing(), side: 480 });
    viewer.setAttribute("aria-label", `${entry.name} with ${layers.length} of its heatmaps on it`);
  });
  const keys = answer.explanations.flatMap((e) => e.concepts.filter((c) => c.heatmap).map((c) => keyOf(e, c)));
  const show = (wanted) => { entry.shown = new Set(wanted); refresh(); };
  const tables = answer.explanations.map((explanation) => {
    const title = h("h3", {}, explanation.name, " ", h("small", { class: "pale" }, explanation.name === explanation.kind ? "" : explanation.kind));
    if (explanation.problem) return h("section", { class: "card" }, title, h("p", {}, explanation.problem));
    const made = table(entry, explanation, tableView);
    redraw.push(...made.redraw);
    const beyond = hasPath(explanation) ? pathOf(explanation, view)
      : (explanation.lines ?? []).map((line) => h("p", { class: "pale line" }, line));
    return h("section", { class: "card" }, title, made.element, beyond);
  });
  const picture = h("section", { class: "card picture" },
    h("h3", {}, entry.name),
    viewer,
    entry.bitmap ? null : h("p", { class: "pale" }, "This browser cannot show the file; the model could read it."),
    h("p", { class: "switches" }, h("button", { type: "button", onclick: () => show(keys) }, "All heat on"), h("button", { type: "button", onclick: () => show([]) }, "All off")),
    h("p", { class: "pale" }, "What the model sees. Several maps at once are weighed by their contributions."));
  const facts = h("details", { class: "card" }, h("summary", {}, "About this answer"),
    h("dl", {},
      h("dt", {}, "model"), h("dd", {}, `${answer.model.name} version ${answer.model.version}, digest ${answer.model.digest.slice(0, 12)}`),
      h("dt", {}, "explainers"), h("dd", {}, answer.explanations.map((e) => `${e.name} ${e.digest.slice(0, 12)}`).join(", ")),
      h("dt", {}, "time"), h("dd", {}, Object.entries(answer.timings).map(([stage, ms]) => `${stage} ${ms.toFixed(1)} ms`).join(", ")),
      h("dt", {}, "request"), h("dd", {}, answer.request_id)));
  const element = h("div", { class: "one" }, h("div", { class: "verdicts" }, predictionCard(answer), gauge(answer.stability)), picture, h("div", { class: "reasons" }, tables, facts));
  return { element, refresh };
}

// The stability gauge, and what it means in words.

import { figure, h, svg } from "./dom.js";

const WORDS = [
  [0.9, "Very stable", "Small changes of the image leave both the decision and its reasons as they are."],
  [0.75, "Stable", "Under small changes of the image the decision holds and its reasons change little."],
  [0.5, "Somewhat shaky", "Small changes of the image already shift the reasons; read the heatmaps with care."],
  [0.25, "Shaky", "Small changes of the image give clearly other reasons, or another decision; do not lean on this explanation."],
  [-1, "Unstable", "The slightest changes of the image give other reasons or another decision; this explanation says little."],
];

export function inWords(score) {
  const [, title, text] = WORDS.find(([least]) => score >= least);
  return { title, text };
}

function arc(from, to, radius = 80) {
  const at = (share) => [100 - radius * Math.cos(Math.PI * share), 100 - radius * Math.sin(Math.PI * share)];
  const [x1, y1] = at(from), [x2, y2] = at(to);
  return `M ${x1} ${y1} A ${radius} ${radius} 0 0 1 ${x2} ${y2}`;
}

export function gauge(stability) {
  if (!stability) return h("section", { class: "card" }, h("h3", {}, "Stability"), h("p", { class: "pale" }, "Not measured: it is switched off in the settings."));
  const { title, text } = inWords(stability.score);
  const score = Math.min(1, Math.max(0, stability.score));
  const dial = svg("svg", { viewBox: "0 0 200 112", class: "dial", role: "meter", "aria-valuemin": 0, "aria-valuemax": 1, "aria-valuenow": score.toFixed(2), "aria-label": "Stability score", "aria-valuetext": `${score.toFixed(2)} of 1: ${title}` },
    svg("path", { d: arc(0, 0.5), class: "zone low" }),
    svg("path", { d: arc(0.5, 0.75), class: "zone middle" }),
    svg("path", { d: arc(0.75, 1), class: "zone high" }),
    svg("line", { x1: 100, y1: 100, x2: 100 - 66 * Math.cos(Math.PI * score), y2: 100 - 66 * Math.sin(Math.PI * score), class: "needle" }),
    svg("circle", { cx: 100, cy: 100, r: 6, class: "hub" }));
  const how = stability.mode === "full" ? "power iteration" : `${stability.samples} random changes`;
  const grey = Math.round(255 * stability.radius * 10) / 10;
  return h("section", { class: "card" },
    h("h3", {}, "Stability"),
    h("div", { class: "gauge" }, dial, h("p", {}, h("strong", {}, `${score.toFixed(2)} `), h("span", {}, title))),
    h("p", {}, text),
    h("details", {},
      h("summary", {}, "How it was measured"),
      h("p", {}, `By ${how} of about ${grey} grey levels of 255 per pixel, looking at layer ${stability.layer || "the explained one"}. The score is 1 when neither decision nor reasons change, 0 when nothing of them remains.`),
      h("dl", {},
        h("dt", {}, "c1 ", figure(stability.c1)),
        h("dd", {}, "The layer moved at most this many times as far as the image."),
        h("dt", {}, "c2 ", figure(stability.c2)),
        h("dd", {}, "The reasons (the gradient at the pixels) moved at most this many times as far as the image."),
        h("dt", {}, "bound ", stability.bound === null ? "none" : figure(stability.bound)),
        h("dd", {}, stability.bound === null ? (stability.bound_reason || "No bound that holds for every image is known for this network.") : "No image whatsoever can make c1 larger than this."))));
}

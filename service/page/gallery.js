// What the concepts of an explainer look like: the images that show each best.

import { gallery } from "./api.js";
import { h } from "./dom.js";

const galleries = new Map(); // by digest: an explainer's pictures never change
let heat = true;

/** Fill a panel with the gallery of an explainer; `at` is a concept to bring into view. */
export async function galleryView(panel, explainers, name, at, choose) {
  const with_ = explainers.filter((e) => e.gallery !== false);
  if (!with_.length) {
    panel.replaceChildren(h("div", { class: "empty" }, h("p", {}, "No attached explainer keeps pictures of its concepts.")));
    return;
  }
  const explainer = with_.find((e) => e.name === name) ?? with_[0];
  const select = h("select", { onchange: () => choose(select.value) }, with_.map((e) => h("option", { value: e.name, selected: e === explainer }, e.name)));
  const box = h("input", { type: "checkbox", onchange: () => { heat = box.checked; list.classList.toggle("no-heat", !heat); } });
  box.checked = heat;
  const list = h("div", { class: heat ? "concepts" : "concepts no-heat", "aria-busy": "true" }, h("p", { class: "pale" }, "fetching …"));
  panel.replaceChildren(h("div", { class: "card controls" }, h("label", {}, "Explainer ", select), h("label", {}, box, " show where")), list);
  const key = `${explainer.digest} ${at ?? 0}`;
  if (!galleries.has(key)) galleries.set(key, await gallery(explainer.name, at ?? 0));
  const { concepts, sections = [], section = 0 } = galleries.get(key);
  if (sections.length > 1) {
    const of = h("select", { onchange: () => choose(explainer.name, Number(of.value)) }, sections.map((s, i) => h("option", { value: s.first, selected: i === section }, s.title)));
    panel.querySelector(".controls").append(h("label", {}, "of ", of));
  }
  list.removeAttribute("aria-busy");
  if (!concepts.length) {
    list.replaceChildren(h("p", { class: "pale" }, `Explainers of kind ${explainer.kind} keep no pictures.`));
    return;
  }
  const cards = concepts.map((concept) => h("section", { class: "card concept", id: `concept-${concept.index}`, tabindex: "-1" },
    h("h3", {}, concept.label),
    concept.pictures.length ? h("div", { class: "shots" }, concept.pictures.map((p) => h("figure", {},
      h("img", { class: "with-heat", src: p.heat, alt: `${p.label}, with where the concept is seen` }),
      h("img", { class: "without-heat", src: p.image, alt: p.label }),
      h("figcaption", {}, p.label)))) : h("p", { class: "pale" }, "no image shows it")));
  list.replaceChildren(...cards);
  if (at !== null && at !== undefined) {
    const card = cards.find((c) => c.id === `concept-${at}`);
    card?.scrollIntoView({ block: "center" });
    card?.focus({ preventScroll: true });
  }
}

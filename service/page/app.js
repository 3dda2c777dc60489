// The page: what was looked at, what is on show, and what happens on input.

import * as api from "./api.js";
import { compareView } from "./compare.js";
import { byId, h, percent, signed } from "./dom.js";
import { draw } from "./draw.js";
import { explanationView, firstShown, ranked } from "./explanation.js";
import { galleryView } from "./gallery.js";

const MOST_ENTRIES = 60; // images kept; the oldest leaves first
const TABS = ["explanation", "compare", "gallery"];

const narrow = matchMedia("(max-width: 720px)");
const state = { model: null, explainers: [], entries: [], current: null, tab: "explanation", gallery: { name: null, at: null }, refresh() {} };
let running = null; // AbortController of the request under way
let waiting = []; // images still to be explained
let nextId = 1;

// errors and status

function say(text) { byId("status").textContent = text; }

function showError(error) {
  const box = byId("error");
  const about = [error.code, error.requestId].filter(Boolean).join(", request ");
  box.replaceChildren(h("p", {}, error.message), about ? h("p", { class: "pale" }, about) : "", h("button", { type: "button", onclick: () => { box.hidden = true; } }, "Close"));
  box.hidden = false;
  if (error.status === 401) {
    byId("key-form").hidden = false;
    byId("key").focus();
  }
}

/** Run what may fail; the server's sentence goes to the reader, our own mistakes to the console as well. */
async function attempt(work) {
  try {
    await work();
    return true;
  } catch (error) {
    if (error.name === "AbortError") return false;
    if (!(error instanceof api.ServerError)) console.error(error);
    showError(error);
    say("");
    return false;
  }
}

// what the server has

async function meet() {
  const [model, explainers] = await Promise.all([api.model(), api.explainers()]);
  Object.assign(state, { model, explainers });
  byId("key-form").hidden = true;
  byId("error").hidden = true;
  byId("model").textContent = `${model.name || "model"} version ${model.version || "–"} · digest ${model.digest.slice(0, 12)} · ${model.class_names.length} classes · ${model.engine} engine`;
  const picked = new Map([...byId("explainers").querySelectorAll("input")].map((box) => [box.value, box.checked]));
  byId("explainers").replaceChildren(...explainers.map((e) => {
    const box = h("input", { type: "checkbox", value: e.name, onchange: settingsChanged });
    box.checked = picked.get(e.name) ?? e.default !== false;
    return h("label", {}, box, ` ${e.name} `, h("small", { class: "pale" }, e.name === e.kind ? "" : e.kind, e.default === false ? " slow" : ""));
  }));
  const target = byId("target");
  const before = target.value;
  target.replaceChildren(h("option", { value: "" }, "the prediction"), ...model.class_names.map((name, i) => h("option", { value: i }, name)));
  target.value = before;
  if (target.selectedIndex < 0) target.value = "";
}

async function meetSamples() {
  const samples = await api.samples();
  byId("samples-box").hidden = !samples.length;
  byId("samples").replaceChildren(...samples.map((sample) => h("button", { type: "button", class: "thumb", title: sample.name, onclick: () => take([{ name: sample.name, source: blobOf(sample.image) }]) },
    h("img", { src: sample.image, alt: `sample ${sample.name}` }))));
}

function blobOf(dataUrl) {
  const bytes = Uint8Array.from(atob(dataUrl.slice(dataUrl.indexOf(",") + 1)), (c) => c.charCodeAt(0));
  return new Blob([bytes], { type: "image/png" });
}

// explaining

function settings() {
  const names = [...byId("explainers").querySelectorAll("input:checked")].map((box) => box.value);
  const target = byId("target").value;
  return { explainers: names, target: target === "" ? null : Number(target), stability: byId("stability").value, heatmaps: "array" };
}

/** Explain new images, one after the other; before the server has answered what it explains, they wait. */
function take(images) {
  waiting.push(...images);
  if (!state.model) say(`${images[0].name} waits for the server …`);
  else if (!running) work();
}

async function work() {
  while (waiting.length) {
    const { name, source, again } = waiting.shift();
    running = new AbortController();
    say(`Explaining ${name} …`);
    byId("results").setAttribute("aria-busy", "true");
    await attempt(async () => {
      const options = settings();
      if (!options.explainers.length) throw new api.ServerError(0, "", "No explainer is chosen; tick at least one in the settings.", "");
      const answer = await api.explain({ image: await api.base64(source), ...options }, running.signal);
      byId("error").hidden = true;
      const bitmap = await createImageBitmap(source).catch(() => null); // a format that the model reads and the browser does not
      remember({ name, source, bitmap, answer, asked: options.target }, again);
      if (state.model && answer.model.version !== state.model.version) await meet(); // another version serves now
    });
    byId("results").removeAttribute("aria-busy");
    running = null;
  }
}

function remember(fresh, again) {
  const old = again ? state.entries.find((e) => e.id === again && e.asked === fresh.asked) : null;
  const entry = { ...fresh, id: old?.id ?? nextId++, picked: old?.picked ?? true, shown: old?.shown ?? firstShown(fresh.answer) };
  if (old) state.entries.splice(state.entries.indexOf(old), 1, entry);
  else state.entries.unshift(entry);
  state.entries.splice(MOST_ENTRIES);
  state.current = entry.id;
  if (state.tab === "gallery") open("explanation"); else render();
  const best = ranked(entry.answer.explanations.find((e) => e.concepts.length)?.concepts ?? [])[0];
  const why = best ? ` Strongest: ${best.label}${best.contribution === null ? "" : ` ${signed(best.contribution)}`}.` : "";
  if (narrow.matches) byId("results").scrollIntoView();
  say(`${entry.name}: ${entry.answer.prediction.label}, ${percent(entry.answer.prediction.probability)}.${why}`);
}

let changed = 0;
function settingsChanged() {
  clearTimeout(changed);
  changed = setTimeout(() => {
    const entry = state.entries.find((e) => e.id === state.current);
    if (!entry) return;
    running?.abort();
    waiting.unshift({ name: entry.name, source: entry.source, again: entry.id });
    if (!running) work();
  }, 350); // so that stepping through a list with the arrow keys asks once
}

// what is on show

const view = {
  drawing: () => ({ opacity: byId("opacity").value / 100, shape: state.model.input_shape, resize: state.model.resize }),
  hasGallery: (name) => {
    const explainer = state.explainers.find((e) => e.name === name);
    return explainer?.gallery !== false && explainer?.gallery_of_concepts !== false; // pictures may be of something else than concepts
  },
  groupsOf: (name) => state.explainers.find((e) => e.name === name)?.groups ?? [],
  openGallery: (name, at) => { state.gallery = { name, at }; open("gallery"); },
  rerender: () => render(),
};

function open(tab) {
  state.tab = tab;
  for (const name of TABS) {
    const chosen = name === tab;
    const button = byId(`tab-${name}`);
    button.setAttribute("aria-selected", String(chosen));
    button.tabIndex = chosen ? 0 : -1;
    byId(name).hidden = !chosen;
  }
  render();
}

function render() {
  renderSeen();
  const current = state.entries.find((e) => e.id === state.current);
  state.refresh = () => {};
  if (state.tab === "explanation" && current) {
    keepFocus(byId("explanation"), () => {
      const made = explanationView(current, view);
      byId("explanation").replaceChildren(made.element);
      state.refresh = made.refresh;
    });
  } else if (state.tab === "compare") {
    keepFocus(byId("compare"), () => {
      const made = compareView(state.entries.filter((e) => e.picked), view);
      byId("compare").replaceChildren(made.element);
      state.refresh = made.refresh;
    });
  } else if (state.tab === "gallery") {
    const { name, at } = state.gallery;
    state.gallery.at = null;
    attempt(() => galleryView(byId("gallery"), state.explainers, name, at, (chosen, concept = null) => { state.gallery = { name: chosen, at: concept }; render(); byId("gallery").querySelector("select").focus(); }));
  }
  state.refresh();
}

/** Rebuild a panel; the keyboard focus stays where it was. */
function keepFocus(panel, rebuild) {
  const all = () => [...panel.querySelectorAll("button, input, select, summary, [tabindex]")];
  const at = all().indexOf(document.activeElement);
  const unfolded = [...panel.querySelectorAll("details")].map((d) => d.open);
  rebuild();
  panel.querySelectorAll("details").forEach((d, i) => { d.open = unfolded[i] ?? false; });
  if (at >= 0) all()[at]?.focus();
}

function renderSeen() {
  byId("seen-box").hidden = !state.entries.length;
  const list = byId("seen");
  keepFocus(list, () => list.replaceChildren(...state.entries.map((entry) => {
    const canvas = h("canvas", { "aria-hidden": "true" });
    draw(canvas, entry, [], { ...view.drawing(), side: 96 });
    const box = h("input", { type: "checkbox", "aria-label": `Compare ${entry.name}`, onchange: () => { entry.picked = box.checked; if (state.tab === "compare") render(); } });
    box.checked = entry.picked;
    const label = entry.asked === null ? entry.answer.prediction.label : `${entry.answer.prediction.label}, why “${entry.answer.target.label}”`;
    return h("li", {}, h("button", { type: "button", class: "thumb", "aria-current": entry.id === state.current ? "true" : null, title: entry.name, onclick: () => { state.current = entry.id; open("explanation"); } },
      canvas, h("span", {}, label)), h("label", { class: "pick" }, box, " compare"));
  })));
}

// input

function takeFiles(files) {
  const images = [...files].filter((file) => file.size > 0);
  if (images.length) take(images.map((file) => ({ name: file.name || "pasted image", source: file })));
}

function listen() {
  byId("settings").open = !narrow.matches;
  const file = byId("file");
  const chosen = () => { takeFiles(file.files); file.value = ""; };
  file.addEventListener("change", chosen);
  chosen(); // what was chosen before this script came
  const drop = byId("drop");
  document.addEventListener("dragover", (event) => { event.preventDefault(); drop.classList.add("over"); });
  document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) drop.classList.remove("over"); });
  document.addEventListener("drop", (event) => { event.preventDefault(); drop.classList.remove("over"); takeFiles(event.dataTransfer.files); });
  document.addEventListener("paste", (event) => takeFiles(event.clipboardData?.files ?? []));
  byId("target").addEventListener("change", settingsChanged);
  byId("stability").addEventListener("change", settingsChanged);
  byId("opacity").addEventListener("input", () => state.refresh());
  byId("forget").addEventListener("click", () => {
    Object.assign(state, { entries: [], current: null });
    byId("explanation").replaceChildren(h("div", { class: "empty" }, h("p", {}, "Forgotten. Give an image, or take a sample.")));
    say("");
    render();
    byId("file").focus();
  });
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    api.useKey(byId("key").value);
    attempt(start);
  });
  for (const [i, name] of TABS.entries()) {
    const button = byId(`tab-${name}`);
    button.addEventListener("click", () => open(name));
    button.addEventListener("keydown", (event) => {
      const to = { ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: TABS.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      const next = TABS[(to + TABS.length) % TABS.length];
      open(next);
      byId(`tab-${next}`).focus();
    });
  }
  const theme = byId("theme");
  theme.value = localStorage.getItem("auditor.theme") || "";
  const paint = () => { document.documentElement.dataset.theme = theme.value; localStorage.setItem("auditor.theme", theme.value); };
  theme.addEventListener("change", paint);
  paint();
}

async function start() {
  await meet();
  if (waiting.length && !running) work();
  await meetSamples();
}

listen();
if (!await attempt(start)) byId("model").textContent = "not connected";

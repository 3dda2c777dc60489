// Images into groups, by dragging, by choosing and moving, or by keys; with heatmaps where a stage shows them.

export function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export function say(text) {
  document.getElementById("said").textContent = text;
}

const DRAG_PX = 6; // a mouse that moves less has clicked
const HOLD_MS = 220; // a finger that stays this long drags; one that moves at once scrolls
const EDGE_PX = 70; // near the edge of the window, dragging scrolls

export function grouping(step, draft, pictures, onChange) {
  const groups = new Map(); // image id -> group, 0 for none yet
  const cards = new Map();
  const chosen = new Set();
  const zones = [];
  const root = el("div", { class: step.shows === "heatmap" ? "hover" : "" });
  let slot = null; // the concept whose heatmap is shown on all images
  const hidden = new Set(); // concepts that are hidden in the comparison

  const picture = (image, which, on) => {
    const box = el("span", { class: "pic" });
    const whole = el("img", { src: `${pictures}image/${image.id}`, alt: "", draggable: "false" });
    whole.addEventListener("load", () => {
      box.classList.toggle("pixels", whole.naturalWidth <= 200);
    });
    box.append(whole);
    if (which !== null && image.heats?.[which]) {
      box.append(el("img", { class: "heat", src: pictures + image.heats[which], alt: "", draggable: "false" }));
      box.classList.toggle("on", on);
    }
    return box;
  };

  const value = (image, which) => {
    const line = el("span", { class: "value" });
    const v = image.values?.[which];
    if (which === null || v === undefined) return line;
    if (step.slots.contributions) {
      const shown = Math.abs(v) < 0.005 ? 0 : v;
      if (shown) line.classList.add(shown > 0 ? "pos" : "neg");
      line.textContent = `${shown > 0 ? "+" : shown < 0 ? "\u2212" : ""}${Math.abs(shown).toFixed(2)}`;
    } else line.textContent = v.toFixed(2);
    return line;
  };

  const name = (image) => `Image ${step.images.indexOf(image) + 1}`;
  const zoneName = (g) => (g ? `group ${g}` : "no group yet");

  function describe(image) {
    const card = cards.get(image.id);
    const parts = [name(image), zoneName(groups.get(image.id))];
    if (slot !== null && image.values?.length) parts.push(`H${slot + 1} ${card.querySelector(".value")?.textContent}`);
    const pick = card.querySelector(".pick");
    pick.setAttribute("aria-label", parts.join(", "));
    pick.setAttribute("aria-pressed", chosen.has(image.id));
    card.classList.toggle("chosen", chosen.has(image.id));
    card.querySelector(".banner").textContent = chosen.has(image.id) ? `\u2713 ${name(image)}` : name(image);
  }

  function paint(image) {
    const card = cards.get(image.id);
    const which = step.shows === "heatmap" ? 0 : slot;
    card.querySelector(".pic").replaceWith(picture(image, which, step.shows === "concepts"));
    if (step.shows === "concepts") card.querySelector(".value").replaceWith(value(image, slot));
    describe(image);
  }

  function count() {
    zones.forEach((zone, g) => {
      const n = [...groups.values()].filter((x) => x === g).length;
      zone.querySelector("h2").textContent = `${g ? `Group ${g}` : "Not in a group yet"} (${n})`;
    });
  }

  function moveTo(ids, g) {
    if (!ids.length) {
      say("Choose images first.");
      return;
    }
    const focused = document.activeElement?.closest(".card");
    ids.forEach((id) => {
      groups.set(id, g);
      zones[g].querySelector(".cards").append(cards.get(id));
      chosen.delete(id);
    });
    step.images.filter((image) => ids.includes(image.id)).forEach(describe);
    count();
    compare();
    if (focused) focused.querySelector(".pick").focus({ preventScroll: true });
    say(`${ids.length === 1 ? "1 image" : `${ids.length} images`} to ${zoneName(g)}.`);
    onChange();
  }

  function choose(image) {
    if (chosen.has(image.id)) chosen.delete(image.id);
    else chosen.add(image.id);
    describe(image);
    compare();
  }

  const order = () => [...root.querySelectorAll(".zones .pick")];
  const focusedId = () => document.activeElement?.closest(".card")?.dataset.id;

  root.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (/^[0-9]$/.test(event.key) && Number(event.key) <= step.n_groups) {
      const id = focusedId();
      moveTo(chosen.size ? [...chosen] : id ? [id] : [], Number(event.key));
      event.preventDefault();
    }
    const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (by && document.activeElement?.classList.contains("pick")) {
      const all = order();
      all[(all.indexOf(document.activeElement) + by + all.length) % all.length].focus();
      event.preventDefault();
    }
  });

  // dragging

  let drag = null;
  function begin(id, x, y) {
    const ids = chosen.has(id) ? [...chosen] : [id];
    const ghost = el("div", { class: "ghost" }, cards.get(id).querySelector(".pic").cloneNode(true));
    document.body.append(ghost);
    ids.forEach((i) => cards.get(i).classList.add("dragged"));
    drag = { ids, ghost };
    follow(x, y);
  }
  function zoneAt(x, y) {
    return document.elementFromPoint(x, y)?.closest(".zone") ?? null;
  }
  function follow(x, y) {
    drag.ghost.style.transform = `translate(${x - 55}px, ${y - 55}px)`;
    const zone = zoneAt(x, y);
    zones.forEach((z) => z.classList.toggle("over", z === zone));
    if (y < EDGE_PX) scrollBy(0, -14);
    else if (y > innerHeight - EDGE_PX) scrollBy(0, 14);
  }
  function finish(x, y) {
    const { ids, ghost } = drag;
    ghost.remove();
    const zone = x === null ? null : zoneAt(x, y);
    ids.forEach((i) => cards.get(i).classList.remove("dragged"));
    zones.forEach((z) => z.classList.remove("over"));
    drag = null;
    if (zone) moveTo(ids, zones.indexOf(zone));
  }

  function draggable(card, id) {
    let start = null;
    let timer = null;
    let dragged = false;
    const move = (event) => {
      if (!start) return;
      const far = Math.hypot(event.clientX - start.x, event.clientY - start.y);
      if (drag) follow(event.clientX, event.clientY);
      else if (start.touch && far > DRAG_PX) stop(); // it scrolls
      else if (!start.touch && far > DRAG_PX) {
        dragged = true;
        begin(id, event.clientX, event.clientY);
      }
    };
    const stop = () => {
      clearTimeout(timer);
      start = null;
      document.removeEventListener("pointermove", move);
      document.removeEventListener("pointerup", up);
      document.removeEventListener("pointercancel", cancel);
    };
    const up = (event) => {
      stop();
      if (drag) finish(event.clientX, event.clientY);
    };
    const cancel = () => {
      stop();
      if (drag) finish(null, null);
    };
    card.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || !event.isPrimary) return;
      dragged = false;
      const touch = event.pointerType !== "mouse";
      start = { x: event.clientX, y: event.clientY, touch };
      if (touch) {
        cards.forEach((c) => c.classList.toggle("touched", c === card));
        timer = setTimeout(() => {
          dragged = true;
          begin(id, start.x, start.y);
          navigator.vibrate?.(15);
        }, HOLD_MS);
      }
      document.addEventListener("pointermove", move);
      document.addEventListener("pointerup", up);
      document.addEventListener("pointercancel", cancel);
    });
    card.addEventListener("touchmove", (event) => drag && event.preventDefault(), { passive: false });
    card.addEventListener("contextmenu", (event) => event.preventDefault());
    card.addEventListener("dragstart", (event) => event.preventDefault());
    card.addEventListener("click", (event) => {
      if (dragged) event.stopPropagation();
      dragged = false;
    }, true);
  }

  // the parts of the view

  function toolbar() {
    const bar = el("div", { class: "bar", role: "group", "aria-label": "Heatmaps" });
    if (step.shows === "heatmap") {
      const all = el("button", { type: "button", "aria-pressed": "false", id: "all" }, "Show all heatmaps");
      all.addEventListener("click", () => {
        const on = all.getAttribute("aria-pressed") !== "true";
        all.setAttribute("aria-pressed", on);
        root.classList.toggle("all", on);
      });
      bar.append(all);
    } else {
      const buttons = Array.from({ length: step.slots.n }, (_, k) => {
        const label = step.slots.labels?.[k] ? `H${k + 1} ${step.slots.labels[k]}` : `H${k + 1}`;
        const button = el("button", { type: "button", "aria-pressed": "false", "data-slot": k }, label);
        button.setAttribute("aria-label", `${label} on all images`);
        button.addEventListener("click", () => {
          slot = slot === k ? null : k;
          buttons.forEach((b, i) => b.setAttribute("aria-pressed", i === slot));
          step.images.forEach(paint);
        });
        return button;
      });
      bar.append(...buttons);
      if (step.slots.contributions) {
        bar.append(
          el("span", { class: "pale" }, el("span", { class: "pos" }, "red: for"), " · ",
            el("span", { class: "neg" }, "blue: against")),
        );
      }
    }
    return bar;
  }

  const panel = el("section", { class: "compare", "aria-label": "Chosen images side by side", hidden: "" });
  function compare() {
    put.forEach((button) => (button.disabled = !chosen.size));
    if (step.shows !== "concepts") return;
    panel.hidden = !chosen.size;
    if (!chosen.size) return;
    const slots = Array.from({ length: step.slots.n }, (_, k) => k);
    const head = el("tr", {}, el("th", { scope: "col" }, el("span", { class: "unseen" }, "Image")));
    slots.forEach((k) => {
      const button = el("button", { type: "button", "aria-pressed": !hidden.has(k) }, `H${k + 1}`);
      button.setAttribute("aria-label", `H${k + 1} in this comparison`);
      button.addEventListener("click", () => {
        if (hidden.has(k)) hidden.delete(k);
        else hidden.add(k);
        compare();
        panel.querySelectorAll("thead button")[k].focus();
      });
      head.append(el("th", { scope: "col" }, button));
    });
    const body = el("tbody");
    step.images.filter((image) => chosen.has(image.id)).forEach((image) => {
      const row = el("tr", {}, el("th", { scope: "row" }, name(image)));
      slots.forEach((k) => row.append(el("td", {}, value(image, k), picture(image, k, !hidden.has(k)))));
      body.append(row);
    });
    panel.replaceChildren(
      el("h2", { tabindex: "-1" }, "Chosen images side by side"),
      el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Heatmaps of the chosen images" },
        el("table", {}, el("thead", {}, head), body)),
    );
  }

  const tray = el("div", { class: "zones" });
  const several = el("div", { class: "groups" });
  const put = [];
  for (let g = 0; g <= step.n_groups; g += 1) {
    const id = `zone-${g}`;
    const head = el("div", { class: "head" }, el("h2", { id }));
    if (g) {
      const here = el("button", { type: "button", disabled: "" }, "Put here");
      here.setAttribute("aria-label", `Put here, into group ${g}, the chosen images`);
      here.addEventListener("click", () => moveTo([...chosen], g));
      put.push(here);
      head.append(here);
    }
    const zone = el("section", { class: "zone", "aria-labelledby": id, "data-group": g }, head, el("div", { class: "cards" }));
    zones.push(zone);
    (g ? several : tray).append(zone);
  }
  tray.append(several);

  step.images.forEach((image) => {
    const pick = el("button", { type: "button", class: "pick" }, el("span", { class: "banner" }), picture(image, null, false));
    const card = el("div", { class: "card", "data-id": image.id });
    if (step.shows === "concepts") card.append(el("span", { class: "value" }));
    card.append(pick);
    pick.addEventListener("click", () => choose(image));
    draggable(card, image.id);
    cards.set(image.id, card);
    const g = Number(draft?.[image.id] ?? 0);
    groups.set(image.id, g);
    zones[g].querySelector(".cards").append(card);
  });
  const move = el("div", { class: "move", role: "group", "aria-label": "Move the chosen images" });
  for (let g = 1; g <= step.n_groups; g += 1) {
    const button = el("button", { type: "button", disabled: "", "data-to": g }, `${g}`);
    button.setAttribute("aria-label", `${g}: put the chosen images into group ${g}`);
    button.addEventListener("click", () => moveTo([...chosen], g));
    put.push(button);
    move.append(button);
  }
  const back = el("button", { type: "button", disabled: "", "data-to": 0 }, "Take out");
  back.addEventListener("click", () => moveTo([...chosen], 0));
  put.push(back);
  move.append(back);
  if (step.shows === "concepts") {
    const look = el("button", { type: "button", disabled: "", id: "look" }, "Compare");
    look.setAttribute("aria-label", "Compare the chosen images side by side");
    look.addEventListener("click", () => {
      panel.scrollIntoView({ block: "start" });
      panel.querySelector("h2").focus({ preventScroll: true });
    });
    put.push(look);
    move.append(look);
  }
  if (step.shows !== "nothing") root.append(toolbar());
  root.append(tray, panel, move);
  step.images.forEach(paint);
  count();
  if (step.shows === "concepts") {
    step.images.forEach((image) => image.heats.forEach((heat) => heat && (new Image().src = pictures + heat)));
  }

  return {
    root,
    move,
    value: () => ({ groups: Object.fromEntries([...groups].map(([id, g]) => [id, g || null])) }),
    problem: () => {
      const left = [...groups.values()].filter((g) => !g).length;
      return left ? `${left === 1 ? "1 image is" : `${left} images are`} in no group yet.` : "";
    },
  };
}

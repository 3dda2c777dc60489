// A participant's page: one step after the other. What is chosen is saved as it is chosen, on the server and, until
// the server has it, in this browser.
import { el, grouping, say } from "./grouping.js";

const base = location.pathname.replace(/\/+$/, "");
const main = document.getElementById("main");
const stop = document.getElementById("stop");
const draftKey = `study:${base}`; // where this browser keeps what the server may not have yet
const attemptKey = `study-begin:${base}`;
let attemptKept = null;
const RETRY_MS = 1500;
let state = null;
let current = null; // { value(), problem() } of the step that is shown
let seenSince = 0;
let seconds = 0;
let draftTimer = null;
let waiting = false; // for the network

class Refused extends Error {
  constructor(code, message) {
    super(message);
    this.code = code;
  }
}

async function call(path, body) {
  const reply = await fetch(`${base}/api/${path}`, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    credentials: "same-origin",
  });
  if (reply.status >= 502 && reply.status <= 504) throw new TypeError("the server is away");
  const document = await reply.json();
  if (!reply.ok) throw new Refused(document.error.code, document.error.message);
  return document;
}

function connection(text) {
  document.getElementById("connection").textContent = text;
}

// Ask until the server answers: a lost connection loses nothing, since the same answer may be sent twice.
async function insist(path, body) {
  for (;;) {
    try {
      const reply = await call(path, body);
      connection("");
      return reply;
    } catch (error) {
      if (error instanceof Refused) throw error;
      connection("No connection. Your answer is kept here and sent as soon as it is back.");
      await new Promise((done) => setTimeout(done, RETRY_MS));
    }
  }
}

function secondsSeen() {
  return seconds + (seenSince ? (performance.now() - seenSince) / 1000 : 0);
}

document.addEventListener("visibilitychange", () => {
  if (document.visibilityState === "hidden") {
    seconds = secondsSeen();
    seenSince = 0;
    sendDraft();
  } else seenSince = performance.now();
});

function remember() {
  if (!current || !state || !state.step) return;
  const note = { code: state.code, index: state.step.index, answer: current.value(), seconds: secondsSeen() };
  try {
    localStorage.setItem(draftKey, JSON.stringify(note));
  } catch { /* a browser that keeps nothing: the server does */ }
  clearTimeout(draftTimer);
  draftTimer = setTimeout(sendDraft, 250);
}

async function sendDraft() {
  clearTimeout(draftTimer);
  if (!current || !state || state.status !== "running" || waiting) return;
  const { index } = state.step;
  try {
    await call("draft", { turn: state.turn, step: index, answer: current.value(), seconds: secondsSeen() });
    connection("");
  } catch (error) {
    if (!state || state.step.index !== index) return;
    if (error instanceof Refused) {
      if (["other_tab", "no_session"].includes(error.code)) stopped(error.message);
      return;
    }
    connection("No connection. What you chose is kept here and sent as soon as it is back.");
    draftTimer = setTimeout(sendDraft, RETRY_MS);
  }
}

function keptDraft() {
  try {
    const note = JSON.parse(localStorage.getItem(draftKey) || "null");
    return note && note.code === state.code && note.index === state.step.index ? note : null;
  } catch {
    return null;
  }
}

function forget(key = draftKey) {
  try {
    localStorage.removeItem(key);
  } catch { /* nothing was kept */ }
}

// A secret that this browser begins with: asked again with the same one, the server gives the same session, so that a
// link is not used up by a reply that was lost.
function attempt() {
  const random = [...crypto.getRandomValues(new Uint8Array(24))].map((b) => b.toString(16).padStart(2, "0")).join("");
  try {
    const kept = localStorage.getItem(attemptKey) || random;
    localStorage.setItem(attemptKey, kept);
    return kept;
  } catch {
    attemptKept ??= random;
    return attemptKept;
  }
}

async function submit() {
  const problem = current.problem();
  const line = document.getElementById("problem");
  line.textContent = problem || "";
  if (problem || waiting) return;
  waiting = true;
  clearTimeout(draftTimer);
  const button = document.getElementById("next");
  button.disabled = true;
  remember();
  clearTimeout(draftTimer);
  try {
    const body = { turn: state.turn, step: state.step.index, answer: current.value(), seconds: secondsSeen() };
    const next = await insist("answer", body);
    forget();
    waiting = false;
    show(next);
  } catch (error) {
    waiting = false;
    button.disabled = false;
    if (error.code === "bad_answer") line.textContent = error.message;
    else stopped(error.message);
  }
}

// The page cannot go on by itself: say why, and offer to load it again.
function stopped(message) {
  stop.hidden = true;
  current = null;
  clearTimeout(draftTimer);
  const again = el("button", { class: "primary", type: "button" }, "Go on here");
  again.addEventListener("click", () => location.reload());
  page("Not here any more", el("p", { class: "problem", role: "alert" }, message), again);
}

function page(title, ...content) {
  main.replaceChildren(el("h1", {}, title), ...content);
  main.focus({ preventScroll: true });
  scrollTo(0, 0);
  document.title = title;
}

function nextButton(text = "Continue") {
  const button = el("button", { id: "next", class: "primary", type: "button" }, text);
  button.addEventListener("click", submit);
  return [el("p", { id: "problem", class: "problem", role: "alert" }), button];
}

function radios(name, legend, choices, chosen, shape) {
  const box = el("fieldset", {}, el("legend", {}, legend));
  const list = el("div", { class: shape });
  choices.forEach(([value, text]) => {
    const input = el("input", { type: "radio", name, value });
    if (value === chosen) input.checked = true;
    input.addEventListener("change", remember);
    list.append(el("label", { class: "choice" }, input, el("span", {}, text)));
  });
  box.append(list);
  const value = () => box.querySelector("input:checked")?.value ?? null;
  return { box, value };
}

const numbered = (choices) => choices.map((text, i) => [String(i), text]);
const asNumber = (value) => (value === null ? null : Number(value));

const VIEWS = {
  new(reply) {
    const agree = el("input", { type: "checkbox", id: "agree" });
    const code = el("input", { id: "code", autocomplete: "off", autocapitalize: "none" });
    code.value = decodeURIComponent(location.hash.slice(1));
    const problem = el("p", { id: "problem", class: "problem", role: "alert" });
    const begin = el("button", { class: "primary", type: "button", id: "next" }, "Begin");
    begin.addEventListener("click", async () => {
      if (!agree.checked) {
        problem.textContent = "Tick the box if you agree; then the study begins.";
        return;
      }
      begin.disabled = true;
      try {
        const reply = await insist("begin", { agreed: true, code: code.value, attempt: attempt() });
        forget(attemptKey);
        show(reply);
      } catch (error) {
        begin.disabled = false;
        problem.textContent = error.message;
      }
    });
    page(
      reply.title,
      el("p", { class: "text" }, reply.welcome),
      el("h2", {}, "What happens with your answers"),
      el("p", { class: "text" }, reply.consent),
      el("p", {}, el("label", { class: "choice" }, agree, el("span", {}, "I have read this, and I agree to take part."))),
      reply.asks_code ? el("p", {}, el("label", { for: "code" }, "Code of the study "), code) : "",
      problem,
      begin,
    );
  },
  questions(step, draft) {
    const given = draft?.questions ?? {};
    const fields = step.questions.map((q) => {
      const text = q.text + (q.required ? "" : " (optional)");
      if (q.choices.length) {
        return [q.key, radios(q.key, text, q.choices.map((c) => [c, c]), given[q.key] || null, "list")];
      }
      const input = el("input", { id: `q-${q.key}`, maxlength: 200 });
      input.value = given[q.key] ?? "";
      input.addEventListener("input", remember);
      const box = el("p", {}, el("label", { for: `q-${q.key}` }, text), el("br"), input);
      return [q.key, { box, value: () => input.value }];
    });
    page("A few questions", ...fields.map(([, field]) => field.box), ...nextButton());
    return {
      value: () => ({ questions: Object.fromEntries(fields.map(([key, f]) => [key, f.value() ?? ""])) }),
      problem: () => "",
    };
  },
  practice(step, draft) {
    const view = grouping(step, draft?.groups, `${base}/picture/`, remember);
    page(
      "Practice: shapes",
      el("p", {}, "Try it with these shapes; what you do here is not counted. Put shapes of one sort into one group."),
      el("p", {}, HOW),
      view.root,
    );
    view.move.append(...last(view));
    return view;
  },
  group(step, draft) {
    const view = grouping(step, draft?.groups, `${base}/picture/`, remember);
    page(`Part ${step.stage} of ${step.stages}: which images belong together?`, ...INTRO[step.shows](step), view.root);
    view.move.append(...last(view));
    return view;
  },
  confidence(step, draft) {
    const field = radios(
      "confidence",
      "What is your confidence level that the groups you made are all right?",
      numbered(step.choices),
      draft?.confidence == null ? null : String(draft.confidence),
      "steps",
    );
    page("How sure are you?", field.box, ...nextButton());
    return {
      value: () => ({ confidence: asNumber(field.value()) }),
      problem: () => (field.value() === null ? "Choose one of the seven." : ""),
    };
  },
  rating(step, draft) {
    const fields = step.assistants.map((a) => [
      a.key,
      radios(
        a.key,
        `${a.name} (${a.shows === "heatmap" ? "one heatmap per image" : "several heatmaps with numbers"})`,
        numbered(step.choices),
        draft?.ratings?.[a.key] == null ? null : String(draft.ratings[a.key]),
        "steps",
      ),
    ]);
    page(
      fields.length > 1 ? "How good were the assistants?" : "How good was the assistant?",
      el("p", {}, "How well did each of them help to distinguish images?"),
      ...fields.map(([, field]) => field.box),
      ...nextButton(),
    );
    return {
      value: () => ({ ratings: Object.fromEntries(fields.map(([key, f]) => [key, asNumber(f.value())])) }),
      problem: () => (fields.some(([, f]) => f.value() === null) ? "Give every assistant a rating." : ""),
    };
  },
  comment(step, draft) {
    const area = el("textarea", { id: "comment", maxlength: step.longest });
    area.value = draft?.comment ?? "";
    area.addEventListener("input", remember);
    page(
      "Anything else?",
      el("p", {}, el("label", { for: "comment" }, "What you would like to say about the study (optional)")),
      el("p", {}, area),
      ...nextButton("Finish"),
    );
    return { value: () => ({ comment: area.value }), problem: () => "" };
  },
};

const HOW =
  "Drag images into groups, or choose images by clicking or tapping and then choose a group. With the keyboard: Tab and " +
  "the arrow keys go through the images, Space chooses, a digit puts what is chosen into that group and 0 takes it out.";

const INTRO = {
  nothing: () => [el("p", {}, "Put images that belong together into one group, by what you see in them.")],
  heatmap: (step) => [
    el("p", {}, `${step.assistant} uses heatmaps to distinguish one image from another. Point at an image, tap it or go to it `,
      "with the keyboard to see what it looks at, in red; or show all heatmaps at once."),
  ],
  concepts: (step) => [
    el("p", {}, `${step.assistant} uses several heatmaps together to distinguish one image from another. Show one of them on `,
      "all images with the buttons H1, H2, …; ",
      step.slots.contributions
        ? "the number above an image says how much this heatmap counts in what the assistant takes the image for: red for it, blue against it. "
        : "the number above an image says how much of it the image holds. ",
      step.slots.by_rank ? "Each image has its own heatmaps; H1 is the one that counts most for it. " : "",
      "Choose images and press Compare to see all their heatmaps side by side."),
  ],
};

function last(view) {
  const [problem, button] = nextButton();
  button.classList.add("last");
  view.root.append(problem);
  return [button];
}

function where(step) {
  const text = step.batch ? `Batch ${step.batch} of ${step.batches} · ` : "";
  document.getElementById("where").textContent = step.of ? `${text}Step ${Math.min(step.index + 1, step.of)} of ${step.of}` : "";
}

// Where many people use one browser: let the next one begin.
function nextPerson(body) {
  if (!base.endsWith("/open")) return "";
  const next = el("button", { type: "button", id: "leave" }, "Next person");
  next.addEventListener("click", async () => {
    next.disabled = true;
    await insist("leave", body);
    forget();
    location.reload();
  });
  return next;
}

function finished(reply) {
  forget();
  stop.hidden = true;
  page(
    "Thank you",
    el("p", {}, "All your answers are saved. This is your code; with it the owner of the study can erase them:"),
    el("p", { class: "code", id: "code" }, reply.code),
    nextPerson({}),
  );
}

// Nobody has to finish: say what is saved, how to go on later, and by which code it can be erased.
async function pause() {
  if (waiting || !current) return;
  stop.hidden = true;
  seconds = secondsSeen();
  seenSince = 0;
  await sendDraft();
  clearTimeout(draftTimer);
  if (!current) return; // it was refused, and the page says why
  const { code } = state;
  current = null;
  const again = el("button", { class: "primary", type: "button", id: "next" }, "Go on");
  again.addEventListener("click", () => location.reload());
  page(
    "You can stop here",
    el("p", {}, "What you answered so far is saved. To go on later, open this address again in this browser."),
    el("p", {}, "If you do not want to go on: this is your code; with it the owner of the study can erase your answers."),
    el("p", { class: "code", id: "stopped-code" }, code),
    el("p", { class: "row" }, again, nextPerson({ stopped: true })),
  );
}

function show(reply) {
  state = reply;
  stop.hidden = reply.status !== "running";
  current = null;
  seconds = reply.seconds ?? 0;
  seenSince = document.visibilityState === "hidden" ? 0 : performance.now();
  if (reply.status === "new") {
    VIEWS.new(reply);
    return;
  }
  where(reply.step);
  if (reply.status === "finished") {
    finished(reply);
    return;
  }
  const note = keptDraft();
  if (note && note.seconds > seconds) seconds = note.seconds;
  current = VIEWS[reply.step.kind](reply.step, note?.answer ?? reply.draft);
  main.dataset.step = reply.step.index;
  main.dataset.kind = reply.step.kind;
  say(document.querySelector("h1").textContent);
}

stop.addEventListener("click", pause);
try {
  show(await insist("resume", {}));
} catch (error) {
  page("This link does not open the study", el("p", { class: "problem", role: "alert" }, error.message));
}

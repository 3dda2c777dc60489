// The owner's page: how the study stands, links, erasing, and the answers as a file. The key stays in this tab.
const get = (id) => document.getElementById(id);
let key = sessionStorage.getItem("study-owner-key") || "";

async function call(path, body) {
  const reply = await fetch(`/owner/api/${path}`, {
    method: body ? "POST" : "GET",
    headers: { authorization: `Bearer ${key}`, ...(body ? { "content-type": "application/json" } : {}) },
    ...(body ? { body: JSON.stringify(body) } : {}),
  });
  if (!reply.ok) throw new Error((await reply.json()).error.message);
  return reply;
}

const NAMES = [
  ["links", "links made"], ["links_used", "links used"], ["began", "people began"], ["finished", "people finished"],
  ["answers", "answers saved"],
];

async function refresh() {
  const state = await (await call("progress")).json();
  get("figures").replaceChildren(
    ...NAMES.flatMap(([name, words]) => {
      const [dt, dd] = [document.createElement("dt"), document.createElement("dd")];
      dt.textContent = words;
      dd.textContent = state[name];
      return [dt, dd];
    }),
  );
  get("inside").hidden = false;
  get("login").hidden = true;
}

async function attempt(work) {
  get("problem").textContent = "";
  try {
    await work();
  } catch (error) {
    get("problem").textContent = error.message;
  }
}

get("login").addEventListener("submit", (event) => {
  event.preventDefault();
  key = get("key").value;
  attempt(async () => {
    await refresh();
    sessionStorage.setItem("study-owner-key", key);
  });
});
get("make").addEventListener("submit", (event) => {
  event.preventDefault();
  attempt(async () => {
    const { links } = await (await call("links", { n: Number(get("n").value) })).json();
    get("links").replaceChildren(
      ...links.map((link) => Object.assign(document.createElement("li"), { textContent: link })),
    );
    await refresh();
  });
});
get("remove").addEventListener("submit", (event) => {
  event.preventDefault();
  attempt(async () => {
    await call("erase", { code: get("code").value });
    get("erased").textContent = "Erased.";
    get("code").value = "";
    await refresh();
  });
});
get("export").addEventListener("click", () =>
  attempt(async () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(await (await call("export")).blob());
    link.download = "answers.json";
    link.click();
    URL.revokeObjectURL(link.href);
  }),
);
if (key) attempt(refresh);

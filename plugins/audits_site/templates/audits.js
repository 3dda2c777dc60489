// Fill in what takes time: each [data-load] is replaced by the part of the page the server renders for it.
"use strict";
for (const part of document.querySelectorAll("[data-load]")) {
  fetch(part.dataset.load, { credentials: "same-origin", headers: { "X-Requested-With": "auditor" } })
    .then((answer) => answer.text().then((text) => ({ whole: answer.headers.get("X-Auditor-Part") === "1", text })))
    .then(({ whole, text }) => {
      if (!whole) throw new Error("the server answered with something else");
      part.innerHTML = text; // escaped by the server; the page's policy runs no inline script
    })
    .catch((error) => {
      const line = document.createElement("p");
      line.className = "warn";
      line.textContent = `This part could not be loaded: ${error.message}. Reload the page to try again.`;
      part.replaceChildren(line);
    })
    .finally(() => part.setAttribute("data-done", ""));
}

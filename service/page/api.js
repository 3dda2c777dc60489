// Talks to the service that served this page.

const ROOT = new URL(location.pathname.replace(/\/ui(\/.*)?$/, "/"), location.origin);
const KEY = "auditor.key";
let key = sessionStorage.getItem(KEY) || "";

/** What the server said was wrong: its sentence, code and request id. */
export class ServerError extends Error {
  constructor(status, code, message, requestId) {
    super(message);
    Object.assign(this, { status, code, requestId });
  }
}

export function useKey(value) {
  key = value;
  sessionStorage.setItem(KEY, value);
}

async function ask(path, init = {}) {
  const headers = { accept: "application/json", ...(init.body ? { "content-type": "application/json" } : {}) };
  if (key) headers["x-api-key"] = key;
  let answer;
  try {
    answer = await fetch(new URL(path, ROOT), { ...init, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, "unreachable", "The server does not answer; see whether it still runs, then try again.", "");
  }
  const body = await answer.json().catch(() => null);
  if (answer.ok && body !== null) return body;
  const problem = body?.error;
  if (problem?.message) throw new ServerError(answer.status, problem.code, problem.message, problem.request_id || "");
  throw new ServerError(answer.status, "unknown", `The server answered with status ${answer.status} and no explanation.`, "");
}

export const model = () => ask("model");
export const explainers = () => ask("explainers");
export const samples = () => ask("samples");
export const gallery = (name, concept = 0) => ask(`gallery/${encodeURIComponent(name)}${concept ? `?concept=${concept}` : ""}`);
export const explain = (body, signal) => ask("explain", { method: "POST", body: JSON.stringify(body), signal });

/** A file's bytes in base64, as the service takes them. */
export async function base64(blob) {
  const url = await new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(new ServerError(0, "unreadable", "The browser cannot read this file.", ""));
    reader.readAsDataURL(blob);
  });
  return url.slice(url.indexOf(",") + 1);
}

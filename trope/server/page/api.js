// Requests to the server that the page came from. A failure is an Error with the server's own line.

export class KeyNeeded extends Error {}

let key = read("trope-key");

/** Send this key from now on; it is forgotten when the tab is closed. */
export function useKey(value) {
  key = value;
  write("trope-key", value);
}

export const get = (path, parameters = {}, signal) => request(`${path}?${new URLSearchParams(parameters)}`, { signal });

export const post = (path, content, signal) => request(path, {
  method: "POST", body: JSON.stringify(content), headers: { "Content-Type": "application/json" }, signal,
});

async function request(path, options) {
  const headers = key ? { ...options.headers, "X-API-Key": key } : options.headers;
  let answer, content;
  try {
    answer = await fetch(path, { ...options, headers });
    content = await answer.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    if (!(error instanceof SyntaxError)) throw new Error("The server does not answer. Is it still running?");
  }
  // No JSON, or a failure without our line.
  if (!content || (!answer.ok && !content.error)) {
    throw new Error(`The answer, with status ${answer.status}, is not from trope. Does a proxy stand before it?`);
  }
  if (answer.status === 401) throw new KeyNeeded(content.error);
  if (!answer.ok) throw new Error(content.error);
  return content;
}

// A browser may forbid storage; the page works without it.
function read(name) {
  try { return sessionStorage.getItem(name); } catch { return null; }
}

function write(name, value) {
  try { sessionStorage.setItem(name, value); } catch { /* kept in memory */ }
}

// Calls of the API: the tab's key, errors with the path of their field, and server-sent events.

const KEY = "penstock-api-key";

export const hasKey = () => sessionStorage.getItem(KEY) !== null;
export const keepKey = (key) => sessionStorage.setItem(KEY, key);

export class ApiError extends Error {
  constructor(error, status) {
    super(error?.message ?? `the server answered with status ${status}`);
    this.path = error?.param ?? null;
    this.status = status;
  }
}

let askForKey = async () => false;
let asking = null;

// `ask` gets the server's message and returns whether a key was entered.
export function onKeyNeeded(ask) {
  askForKey = ask;
}

// POSTs `body` as JSON, or GETs without one. On a 401 it asks for the key and tries again, unless it is `quiet`.
export async function call(path, { body, signal, quiet = false } = {}) {
  for (;;) {
    const headers = {};
    const key = sessionStorage.getItem(KEY);
    if (key !== null) headers.Authorization = `Bearer ${key}`;
    if (body !== undefined) headers["Content-Type"] = "application/json";
    const response = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      body: body === undefined ? undefined : JSON.stringify(body),
      cache: "no-store",
      headers,
      signal,
    });
    if (response.ok) return response;
    const error = await response.json().catch(() => ({}));
    if (response.status !== 401 || quiet) throw new ApiError(error.error, response.status);
    if (sessionStorage.getItem(KEY) !== key) continue; // another call has asked meanwhile
    asking ??= askForKey(error.error?.message).finally(() => (asking = null));
    if (!(await asking)) throw new ApiError(error.error, 401);
  }
}

// The chunks of a stream. Throws the error that the server sends in it, and where it ends too early.
export async function* chunks(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new ApiError({ message: "the connection ended before the answer did" });
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data: ")) continue;
        if (line === "data: [DONE]") return;
        const chunk = JSON.parse(line.slice(6));
        if (chunk.error) throw new ApiError(chunk.error, response.status);
        yield chunk;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

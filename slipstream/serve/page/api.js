// The server as any client sees it. Errors are passed on as the server words them.

export class ServerError extends Error {
  constructor(status, error) {
    super(error?.message ?? `the server answered ${status}`);
    Object.assign(this, { status, code: error?.code ?? null, param: error?.param ?? null });
  }
}

export async function stats(signal) {
  const response = await fetch("stats", { signal, cache: "no-store" });
  if (!response.ok) throw await errorOf(response);
  return response.json();
}

// The events of a stream, until the server says that it is done.
export async function* chat(body, key, signal) {
  const headers = { "content-type": "application/json" };
  if (key) headers.authorization = `Bearer ${key}`;
  const response = await fetch("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
  if (!response.ok) throw await errorOf(response);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ServerError(response.status, event.error);
    yield event;
  }
  throw new ServerError(response.status, { message: "the connection ended before the answer did" });
}

async function errorOf(response) {
  const text = await response.text();
  try {
    return new ServerError(response.status, JSON.parse(text).error);
  } catch {
    return new ServerError(response.status, { message: text.slice(0, 500) || response.statusText });
  }
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {}); // a stream that is left early is closed
  }
}

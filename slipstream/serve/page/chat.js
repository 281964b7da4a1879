// The conversation: asks, shows answers token by token, and says what they took.

import { chat, ServerError } from "./api.js";
import { byId, element } from "./dom.js";
import { Tokens } from "./tokens.js";

export class Chat {
  constructor(settings, inspector) {
    this.settings = settings;
    this.inspector = inspector;
    this.turns = []; // {asked, texts: by mode}
    this.running = null; // AbortController
  }

  get isBusy() {
    return this.running !== null;
  }

  stop() {
    this.running?.abort();
  }

  clear() {
    this.stop();
    this.turns = [];
    byId("log").replaceChildren();
    byId("empty").hidden = false;
  }

  async ask(text) {
    const { modes, together, key } = this.settings;
    const turn = { asked: text, texts: {} };
    const fields = this.settings.fields();
    const answers = modes.map((mode) => new Answer(mode, fields, modes.length > 1, this.inspector));
    const box = element("div", { class: `answers ${modes.length > 1 ? "two" : ""}` }, ...answers.map((one) => one.box));
    const shown = element("article", { class: "turn" }, element("p", { class: "asked" }, text), box);
    byId("empty").hidden = true;
    byId("log").append(shown);
    shown.scrollIntoView({ block: "end" });
    this.running = new AbortController();
    const one = (answer) => answer.run(this.#history(answer.mode, text), key, this.running.signal);
    try {
      if (together) await Promise.all(answers.map(one));
      else for (const answer of answers) if (!this.running.signal.aborted) await one(answer);
    } finally {
      this.running = null;
    }
    for (const answer of answers) answer.end("stopped"); // those whose turn did not come
    for (const answer of answers) if (answer.text) turn.texts[answer.mode] = answer.text;
    if (Object.keys(turn.texts).length) this.turns.push(turn);
    if (modes.length > 1) shown.append(verdict(answers, this.settings));
    if (isAtEnd()) shown.scrollIntoView({ block: "end" });
    byId("announcer").textContent = answers.map((answer) => `${answer.mode}: ${answer.text}`).join("\n");
  }

  // What was said so far, as this mode answered it (or another, where this one was not asked).
  #history(mode, text) {
    const before = this.turns.flatMap(({ asked, texts }) => [
      { role: "user", content: asked },
      { role: "assistant", content: texts[mode] ?? Object.values(texts)[0] },
    ]);
    return [...before, { role: "user", content: text }];
  }
}

class Answer {
  constructor(mode, fields, isOneOfTwo, inspector) {
    this.mode = mode;
    this.fields = fields;
    this.text = "";
    this.reason = null;
    this.sums = { tokens: 0, steps: 0, verified: 0, accepted: 0 };
    this.body = element("div", { class: "text", role: "group", ariaLabel: `Answer, mode ${mode}` });
    this.figures = element("p", { class: "figures quiet small" });
    this.box = element("section", { class: "answer busy" }, element("h3", {}, element("b", {}, mode)), this.body, this.figures);
    this.box.dataset.mode = mode;
    this.box.ariaBusy = "true";
    if (isOneOfTwo) this.figures.append("waits for its turn");
    this.tokens = new Tokens(this.body, inspector);
  }

  async run(messages, key, signal) {
    this.messages = JSON.stringify(messages);
    const asked = { messages, stream: true, verify: this.mode, return_steps: true, ...this.fields };
    this.figures.replaceChildren();
    this.begun = performance.now();
    try {
      for await (const event of chat(asked, key, signal)) this.#take(event.choices[0]);
    } catch (error) {
      if (!signal.aborted) this.box.append(problem(error));
      this.end(signal.aborted ? "stopped" : this.text && "broken off");
    }
    this.end("");
  }

  // Once; the first reason counts.
  end(reason) {
    if (this.box.ariaBusy === "false") return;
    this.reason ??= reason;
    this.box.classList.remove("busy");
    this.box.ariaBusy = "false";
    this.#tell();
  }

  #take(choice) {
    const now = performance.now();
    this.first ??= now;
    this.last = now;
    const follows = isAtEnd();
    this.text += choice.delta.content ?? "";
    for (const step of choice.steps) this.#count(step);
    this.reason = choice.finish_reason ?? this.reason;
    this.#tell();
    if (follows) this.figures.scrollIntoView({ block: "nearest" });
  }

  #count(step) {
    this.tokens.add(step);
    this.sums.tokens += step.tokens.length;
    this.sums.steps += 1;
    this.sums.verified += step.verified;
    this.sums.accepted += step.accepted;
  }

  #tell() {
    const { tokens, steps, verified, accepted } = this.sums;
    if (!tokens) return this.figures.replaceChildren(...(this.reason ? [this.reason] : []));
    const parts = [`${tokens} tokens in ${steps} steps`];
    if (verified) parts.push(`${Math.round((100 * accepted) / verified)}% of ${verified} verified drafts accepted`);
    if (this.last > this.first) parts.push(`${((1000 * (tokens - 1)) / (this.last - this.first)).toFixed(1)} tok/s`);
    if (this.first) parts.push(`first after ${Math.round(this.first - this.begun)} ms`);
    if (this.fields.temperature !== 0) parts.push(`seed ${this.fields.seed}`);
    if (this.reason && this.reason !== "stop") parts.push({ length: "cut at the limit" }[this.reason] ?? this.reason);
    this.figures.replaceChildren(...parts.map((part) => element("span", {}, part)));
  }
}

function problem(error) {
  const status = error instanceof ServerError ? `${error.status} ${error.code ?? ""}`.trim() : "no answer";
  return element("p", { class: "problem", role: "alert" }, element("code", {}, status), " ", error.message);
}

// Whether the end of the conversation is in view, so that what comes is to be followed.
function isAtEnd() {
  return byId("log").getBoundingClientRect().bottom < window.innerHeight + 80;
}

// What side by side comes to: the texts have to be the same, and the steps are not.
function verdict([one, other], { dtype, acceptance }) {
  const said = element("p", { class: "verdict quiet small" });
  if ([one, other].some(({ reason }) => reason !== "stop" && reason !== "length")) return said;
  const steps = `${one.sums.steps} steps of ${one.mode}, ${other.sums.steps} of ${other.mode}.`;
  if (one.text === other.text) said.append(`The same text: ${steps}`);
  else if (one.messages !== other.messages) said.append(`What was said before differs, so the texts do: ${steps}`);
  else if (acceptance === "rejection") said.append(`The texts differ, as sampled ones may under rejection: ${steps}`);
  else if (dtype === "float32") said.append(`The texts differ, which they should not in float32: ${steps}`);
  else said.append(`The texts part where rounding decided a tie, as it may in ${dtype}: ${steps}`);
  return said;
}

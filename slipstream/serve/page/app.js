// The page: what belongs to what.

import { Chat } from "./chat.js";
import { byId, element } from "./dom.js";
import { Live } from "./live.js";
import { Settings } from "./settings.js";
import { Inspector } from "./tokens.js";

const EXAMPLES = [
  "A baker sells 12 boxes of 8 rolls each. How many rolls is that?",
  "Write a Python function that says whether a number is prime.",
  "Why is the sky blue?",
];

const settings = new Settings();
const inspector = new Inspector(byId("inspector"));
const chat = new Chat(settings, inspector);
const live = new Live(look);

function look(found, error) {
  const state = byId("state");
  state.classList.toggle("good", Boolean(found?.ready));
  state.classList.toggle("bad", !found?.ready);
  const said = found ? (found.ready ? "ready" : Object.values(found.modes).map((mode) => mode.state).find((one) => one !== "running") ?? "shutting down") : `no connection: ${error.message}`;
  if (state.textContent !== said) state.textContent = said; // a status is read aloud when it changes
  if (!found) return;
  byId("about").textContent = `${found.model}, ${Object.keys(found.modes).join(", ")}`;
  settings.learn(found);
}

async function send() {
  const text = byId("prompt").value.trim();
  if (!text || chat.isBusy || !settings.modes.length) return;
  byId("prompt").value = "";
  busy(true);
  live.show(settings.modes[0]);
  try {
    await chat.ask(text);
  } finally {
    busy(false);
    byId("prompt").focus({ preventScroll: true });
  }
}

function busy(is) {
  byId("send").hidden = is;
  byId("stop").hidden = !is;
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  inspector.hide();
  chat.stop();
});
byId("stop").addEventListener("click", () => chat.stop());
byId("anew").addEventListener("click", () => {
  chat.clear();
  byId("prompt").focus();
});
byId("examples").append(
  ...EXAMPLES.map((text) => {
    const button = element("button", { type: "button" }, text);
    button.addEventListener("click", () => {
      byId("prompt").value = text;
      send();
    });
    return element("li", {}, button);
  }),
);

live.run();

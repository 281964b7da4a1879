// What the next request asks for. Nothing is kept but the key, for as long as the tab is open.

import { byId } from "./dom.js";

const KEY = "slipstream-key";
const NUMBERS = ["temperature", "top_p", "max_tokens"];

export class Settings {
  constructor() {
    this.offered = [];
    byId("key").value = sessionStorage.getItem(KEY) ?? "";
    byId("key").addEventListener("change", () => sessionStorage.setItem(KEY, byId("key").value));
    byId("beside").addEventListener("change", () => this.#tell());
    byId("verify").addEventListener("change", () => this.#fillBeside());
  }

  // What the server says of itself; called with every look at it.
  learn({ modes, verify, dtype, acceptance, needs_key: needsKey }) {
    this.dtype = dtype;
    this.acceptance = acceptance;
    byId("key-label").hidden = !needsKey;
    const names = Object.keys(modes);
    if (names.join() === this.offered.join()) return;
    this.offered = names;
    byId("verify").replaceChildren(...names.map((name) => new Option(name, name, name === verify, name === verify)));
    byId("verify").disabled = names.length < 2;
    this.#fillBeside();
  }

  #fillBeside() {
    const [before, verify] = [byId("beside").value, byId("verify").value];
    const others = this.offered.filter((name) => name !== verify);
    byId("beside").replaceChildren(new Option("none", ""), ...others.map((name) => new Option(name, name)));
    byId("beside").value = others.includes(before) ? before : "";
    byId("beside").disabled = !others.length;
    this.#tell();
  }

  #tell() {
    const two = byId("beside").value !== "";
    byId("together-label").hidden = !two;
    byId("hint").replaceChildren();
    if (this.offered.length === 1) byId("hint").append("Start the server with --also to compare modes here.");
    else if (two) byId("hint").append("Two answers are made one after the other, so that they do not compete for the machine.");
  }

  // The modes to ask, in order.
  get modes() {
    return [byId("verify").value, byId("beside").value].filter(Boolean);
  }

  get together() {
    return byId("together").checked;
  }

  get key() {
    return byId("key").value;
  }

  // Fields of a request. Two modes get the same seed, so that they have to give the same text.
  fields() {
    const fields = {};
    for (const name of NUMBERS) if (byId(name).value !== "") fields[name] = Number(byId(name).value);
    fields.seed = byId("seed").value !== "" ? Number(byId("seed").value) : Math.floor(Math.random() * 2 ** 31);
    return fields;
  }
}

// Tokens of an answer, each marked by its origin, and what became of the drafts of its step.

import { element } from "./dom.js";

// What a step of the server ({drafted, verified, accepted, tokens}) says of its token number `place`.
export function originOf(step, place) {
  if (place < step.accepted) return { kind: "accepted", why: "Accepted draft" };
  if (step.accepted < step.verified) {
    return { kind: "own", why: `The target's own: draft ${step.accepted + 1} was rejected` };
  }
  if (step.verified < step.drafted) {
    const what = step.verified ? `draft ${step.verified + 1} was pruned` : "all drafts were pruned";
    return { kind: "pruned", why: `The target's own: ${what}` };
  }
  return { kind: "own", why: step.drafted ? "The target's own: all drafts were accepted" : "The target's own: nothing was drafted" };
}

// The texts of an answer's steps as elements; keyboard, pointer and touch show what the inspector knows of each.
export class Tokens {
  constructor(container, inspector) {
    this.container = container;
    this.inspector = inspector;
    this.count = 0; // steps so far
    this.known = new WeakMap();
    container.addEventListener("pointerover", (event) => this.#show(event.target));
    container.addEventListener("pointerleave", () => inspector.hide());
    container.addEventListener("focusin", (event) => this.#show(event.target));
    container.addEventListener("focusout", () => inspector.hide());
    container.addEventListener("keydown", (event) => this.#walk(event));
  }

  add(step) {
    this.count += 1;
    const number = this.count;
    step.tokens.forEach((text, place) => {
      const { kind, why } = originOf(step, place);
      const token = element("span", { class: `token ${kind}`, tabIndex: -1 }, text);
      if (text === "") token.hidden = true; // its text comes with the token that completes the character
      else if (!this.container.querySelector("[tabindex='0']")) token.tabIndex = 0;
      this.known.set(token, { step, number, place, why });
      this.container.append(token);
    });
  }

  #show(token) {
    const about = this.known.get(token);
    if (!about) return this.inspector.hide();
    const same = [...this.container.children].filter((other) => this.known.get(other)?.number === about.number);
    this.inspector.show(token, same, about);
  }

  #walk(event) {
    const tokens = [...this.container.children].filter((token) => !token.hidden);
    const at = tokens.indexOf(document.activeElement);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tokens.length - 1 }[event.key];
    if (at < 0 || to === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    const next = tokens[Math.min(Math.max(to, 0), tokens.length - 1)];
    tokens[at].tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
}

// One for the whole page.
export class Inspector {
  constructor(box) {
    this.box = box;
    this.shown = null;
    window.addEventListener("scroll", () => this.hide(), { passive: true });
  }

  show(token, same, { step, number, place, why }) {
    this.hide();
    this.shown = { token, same };
    token.setAttribute("aria-describedby", this.box.id);
    token.parentElement.classList.add("same-step");
    for (const one of same) one.classList.add("in-step");
    this.box.replaceChildren(
      element("strong", {}, why),
      strip(step),
      element("div", {}, `Step ${number}, token ${place + 1} of ${step.tokens.length}`),
      element("div", {}, `width ${step.verified}: drafted ${step.drafted}, verified ${step.verified}, accepted ${step.accepted}`),
    );
    this.box.hidden = false;
    this.#place(token.getClientRects()[0] ?? token.getBoundingClientRect());
  }

  hide() {
    if (!this.shown) return;
    const { token, same } = this.shown;
    token.removeAttribute("aria-describedby");
    token.parentElement?.classList.remove("same-step");
    for (const one of same) one.classList.remove("in-step");
    this.box.hidden = true;
    this.shown = null;
  }

  #place(token) {
    const { offsetWidth: width, offsetHeight: height } = this.box;
    const room = document.documentElement.clientWidth;
    const left = Math.min(Math.max(token.left, 8), room - width - 8);
    const below = token.bottom + 8;
    this.box.style.left = `${left + window.scrollX}px`;
    this.box.style.top = `${(below + height < window.innerHeight ? below : token.top - height - 8) + window.scrollY}px`;
  }
}

// A step's drafts as little boxes: accepted, rejected, pruned.
function strip({ drafted, verified, accepted }) {
  const kinds = Array.from({ length: drafted }, (_, i) => (i < accepted ? "accepted" : i < verified ? "rejected" : "pruned"));
  return element("div", { class: "strip", ariaHidden: "true" }, ...kinds.map((kind) => element("i", { class: kind })));
}

// Elements are made of text, never of HTML: whatever a model writes stays text.

export function element(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") made.className = value;
    else made[key] = value;
  }
  made.append(...children); // strings become text nodes
  return made;
}

export const byId = (id) => document.getElementById(id);

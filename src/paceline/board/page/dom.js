// Creates elements. Text always becomes a text node, so a run's name is never parsed as markup.
export const $ = (id) => document.getElementById(id);

export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") element.className = value;
    else if (name === "color") element.style.setProperty("--run", value);
    else if (name === "width" || name === "left" || name === "background") element.style[name] = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (["checked", "value", "selected", "readOnly", "disabled"].includes(name)) element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// A message for an empty view: what is missing and, in a second line, what to do.
export function empty(what, todo = "", command = "") {
  return make("div", { class: "empty" }, make("p", {}, what), todo || command ? make("p", {}, ...[todo].flat(), command ? make("code", {}, command) : null) : null);
}

export function remembered(name, fallback) {
  try {
    const kept = localStorage.getItem(`paceline.${name}`);
    return kept === null ? fallback : JSON.parse(kept);
  } catch {
    return fallback;
  }
}

export function remember(name, value) {
  try {
    localStorage.setItem(`paceline.${name}`, JSON.stringify(value));
  } catch {
    // Without storage, the choice is not remembered.
  }
}

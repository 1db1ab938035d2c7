// Elements from plain values: text goes in as text alone, whatever a peer has called itself.

export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else if (name in node && typeof value !== "string") node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

export const text = (node, value) => {
  if (node.textContent !== value) node.textContent = value;
};

export function card(title, { id, wide = false, tools = [], lead = "" } = {}, ...children) {
  const heading = el("h2", { id: `${id}-title` }, title);
  return el("section", { class: wide ? "card wide" : "card", id, "aria-labelledby": `${id}-title` },
    el("div", { class: "card-head" }, heading, lead ? el("p", { class: "lead" }, lead) : null, el("div", { class: "tools" }, ...tools)),
    ...children);
}

/** A table with its caption for screen readers; cells are text or nodes, numbers stand right. */
export function table(caption, columns, rows, { empty = "Nothing yet." } = {}) {
  if (!rows.length) return el("p", { class: "empty" }, empty);
  const right = columns.map((column) => column.number);
  const head = el("tr", {}, ...columns.map((column) => el("th", { scope: "col", class: column.number ? "num" : "" }, column.name)));
  const body = rows.map((cells) => el("tr", {}, ...cells.map((cell, index) =>
    el(index ? "td" : "th", index ? { class: right[index] ? "num" : "" } : { scope: "row", class: right[0] ? "num" : "" }, cell ?? "–"))));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    el("table", {}, el("caption", { class: "hidden" }, caption), el("thead", {}, head), el("tbody", {}, ...body)));
}

/** Radio buttons that look like one switch. */
export function choice(label, options, value, changed) {
  const name = `choice-${label.replace(/\W+/g, "-")}`;
  return el("fieldset", { class: "choice" }, el("legend", { class: "hidden" }, label), ...options.map(([key, words]) => {
    const input = el("input", { type: "radio", name, value: key, id: `${name}-${key}`, checked: key === value, onchange: () => changed(key) });
    return el("span", {}, input, el("label", { for: `${name}-${key}` }, words));
  }));
}

export const calm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

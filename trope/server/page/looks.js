// A colour and a dash for every item, the same in both models. Items of one list look different.

const COLOURS = 7, DASHES = 3;

/** A map from item id to { colour, dash }. */
export function chooseLooks(timelines) {
  const beside = new Map(); // ids that stand in a list with an id
  const order = new Map(); // how often each is listed
  for (const timeline of timelines) {
    for (const list of timeline.lists) {
      const ids = list.map((item) => timeline.id(item));
      for (const id of ids) {
        order.set(id, (order.get(id) ?? 0) + 1);
        if (!beside.has(id)) beside.set(id, new Set());
        for (const other of ids) if (other !== id) beside.get(id).add(other);
      }
    }
  }
  const looks = new Map();
  // Those that are listed most choose first, and get undashed lines.
  for (const [id] of [...order].sort((a, b) => b[1] - a[1])) {
    const taken = new Array(COLOURS * DASHES).fill(0);
    for (const other of beside.get(id)) if (looks.has(other)) taken[looks.get(other).index] += order.get(other);
    const index = taken.indexOf(Math.min(...taken));
    looks.set(id, { index, colour: index % COLOURS, dash: Math.floor(index / COLOURS) });
  }
  return looks;
}

export const classOf = (look) => `s${look.colour} d${look.dash}`;

const SVG = "http://www.w3.org/2000/svg";

/** An SVG element with attributes. */
export function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** An HTML element with a class and a text; text is never read as HTML. */
export function html(name, className = "", text = "") {
  const element = document.createElement(name);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}

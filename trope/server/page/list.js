// The list of recommendations. Rows keep their elements; a row that changes its place glides there.

import { classOf, html, svg } from "./looks.js";

const calm = matchMedia("(prefers-reduced-motion: reduce)");
const GLIDE = { duration: 220, easing: "ease-out", composite: "add" };

export class RankedList {
  /** pick: called with an item when its row is chosen. */
  constructor(root, pick) {
    this.root = root;
    this.pick = pick;
    this.rows = new Map(); // by item
    this.shown = [];
  }

  load(timeline, looks) {
    Object.assign(this, { timeline, looks });
    this.first = new Map(timeline.lists[0].map((item, place) => [item, place]));
    this.rows.clear();
    this.shown = [];
    this.root.replaceChildren();
    this.height = 0;
  }

  show(step, chosen) {
    const before = new Map(this.shown.map((item, place) => [item, place]));
    const entries = this.timeline.at(step);
    this.shown = entries.map((entry) => entry.item);
    const now = new Set(this.shown);
    for (const item of before.keys()) if (!now.has(item)) this.rows.get(item).li.remove();
    for (const { item, place, score } of entries) {
      const row = this.rows.get(item) ?? this.make(item);
      if (this.root.children[place] !== row.li) this.root.insertBefore(row.li, this.root.children[place] ?? null);
      this.write(row, item, place, score, chosen);
      this.glide(row, place, before.get(item));
    }
  }

  /** Row height is asked for once, so that dragging reads no layout. */
  glide(row, place, from) {
    if (calm.matches || from === place) return;
    if (from === undefined) {
      row.li.animate([{ opacity: 0 }, { opacity: 1 }], { duration: 180 });
      return;
    }
    this.height ||= row.li.offsetHeight;
    // Added to a glide under way, so that a row never jumps.
    const away = `translateY(${(from - place) * this.height}px)`;
    row.li.animate([{ transform: away }, { transform: "translateY(0)" }], GLIDE);
  }

  /** After the window has changed its size. */
  measure() { this.height = 0; }

  write(row, item, place, score, chosen) {
    row.rank.data = String(place + 1);
    row.score.data = score.toFixed(3);
    const start = this.first.get(item);
    row.moved.data = start === undefined ? "new" : start === place ? "" : start > place ? `▲${start - place}` : `▼${place - start}`;
    row.button.setAttribute("aria-pressed", String(item === chosen));
  }

  make(item) {
    const look = this.looks.get(this.timeline.id(item)), label = this.timeline.label(item);
    const li = html("li"), button = html("button");
    button.type = "button";
    const [rank, moved, score] = ["", "", ""].map((text) => document.createTextNode(text));
    const cell = (className, content) => {
      const span = html("span", className);
      span.append(content);
      button.append(span);
      return span;
    };
    cell("rank", rank);
    const line = svg("line", { x1: 1, x2: 27, y1: 6, y2: 6, class: `curve ${classOf(look)}` });
    button.append(svg("svg", { viewBox: "0 0 28 12", "aria-hidden": "true" }, line));
    const name = html("bdi", "", label);
    cell("name", name).title = label === this.timeline.id(item) ? label : `${label} (${this.timeline.id(item)})`;
    cell("moved", moved).title = "places since the first day";
    cell("score", score);
    li.dataset.item = this.timeline.id(item);
    button.addEventListener("click", () => this.pick(item));
    li.append(button);
    const row = { li, button, rank, moved, score };
    this.rows.set(item, row);
    return row;
  }
}

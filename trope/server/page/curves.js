// Curves of the shown items' scores over the year, as means of seven days, with a line at the slider. A click or a drag moves the slider.

import { monthStarts } from "./dates.js";
import { classOf, svg } from "./looks.js";

const LEFT = 40, RIGHT = 8, TOP = 8, BOTTOM = 20;
let plots = 0;

export class Curves {
  /** move: called with the step that a pointer is at. */
  constructor(root, move) {
    this.root = root;
    const clip = `clip-${plots++}`;
    this.window = svg("rect");
    this.grid = svg("g");
    this.lines = svg("g", { "clip-path": `url(#${clip})` });
    this.under = svg("svg", { class: "under", role: "img" },
      svg("defs", {}, svg("clipPath", { id: clip }, this.window)), this.grid, this.lines);
    // The line and its dots have a layer of their own: the curves below are painted again only when they change.
    this.cursor = svg("line", { class: "cursor", x1: 0, x2: 0 });
    this.dots = svg("g", { "clip-path": `url(#${clip})` });
    this.over = svg("svg", { class: "over", "aria-hidden": "true" }, this.cursor, this.dots);
    root.append(this.under, this.over);
    this.under.addEventListener("pointerdown", (event) => {
      this.under.setPointerCapture(event.pointerId);
      move(this.stepAt(event));
    });
    this.under.addEventListener("pointermove", (event) => {
      if (event.buttons) move(this.stepAt(event));
    });
  }

  load(timeline, looks) {
    Object.assign(this, { timeline, looks });
    this.curves = new Map();
    const [low, high] = timeline.range();
    const spread = high - low || 1;
    // Room below for items that are not listed all year; what lies lower is cut off.
    [this.low, this.high] = [low - 0.25 * spread, high + 0.05 * spread];
    this.under.setAttribute("aria-label", "Scores of the listed items over the year, as curves");
    this.resize();
  }

  resize() {
    if (!this.timeline) return;
    this.width = this.root.clientWidth;
    this.height = this.root.clientHeight;
    const area = { x: LEFT, y: TOP, width: this.width - LEFT - RIGHT, height: this.height - TOP - BOTTOM };
    for (const [name, value] of Object.entries(area)) this.window.setAttribute(name, Math.max(0, value));
    this.cursor.setAttribute("y1", TOP);
    this.cursor.setAttribute("y2", this.height - BOTTOM);
    this.paths = new Map();
    this.circles = new Map();
    this.lines.replaceChildren();
    this.dots.replaceChildren();
    this.drawGrid();
  }

  x(step) { return LEFT + (step / (this.timeline.moments.length - 1)) * (this.width - LEFT - RIGHT); }

  y(score) { return TOP + ((this.high - score) / (this.high - this.low)) * (this.height - TOP - BOTTOM); }

  stepAt(event) {
    const share = (event.clientX - this.root.getBoundingClientRect().left - LEFT) / (this.width - LEFT - RIGHT);
    const last = this.timeline.moments.length - 1;
    return Math.max(0, Math.min(last, Math.round(share * last)));
  }

  drawGrid() {
    const parts = [], bottom = this.height - BOTTOM;
    const every = Math.ceil(40 / ((this.width - LEFT - RIGHT) / 12));
    monthStarts(this.timeline.moments).forEach(({ step, name }, place) => {
      const x = this.x(step);
      parts.push(svg("line", { class: "axis", x1: x, x2: x, y1: TOP, y2: bottom }));
      const fits = x > LEFT + 12 && x < this.width - 24;
      if (place % every === 0 && fits) parts.push(svg("text", { x, y: this.height - 5, "text-anchor": "middle" }, name));
    });
    const size = niceStep((this.high - this.low) / 4);
    for (let value = Math.ceil(this.low / size) * size; value <= this.high; value += size) {
      const y = this.y(value);
      parts.push(svg("line", { class: "axis", x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y }));
      parts.push(svg("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, value.toFixed(size < 0.1 ? 2 : 1)));
    }
    this.grid.replaceChildren(...parts);
  }

  show(step, chosen) {
    const shown = this.timeline.lists[step], now = new Set(shown);
    for (const held of [this.paths, this.circles]) {
      for (const [item, element] of held) if (!now.has(item)) element.remove();
    }
    const x = this.x(step);
    this.cursor.setAttribute("transform", `translate(${x} 0)`);
    for (const item of shown) {
      const path = this.paths.get(item) ?? this.makePath(item), dot = this.circles.get(item);
      if (!path.isConnected) {
        this.lines.append(path);
        this.dots.append(dot);
      }
      path.classList.toggle("chosen", item === chosen);
      const score = this.curves.get(item)[step];
      dot.setAttribute("transform", score === null ? "translate(-9 0)" : `translate(${x} ${this.y(score).toFixed(1)})`);
    }
  }

  makePath(item) {
    if (!this.curves.has(item)) this.curves.set(item, this.timeline.curve(item));
    let d = "", pen = "M";
    smooth(this.curves.get(item)).forEach((score, step) => {
      if (score === null) {
        pen = "M";
      } else {
        d += `${pen}${this.x(step).toFixed(1)} ${this.y(score).toFixed(1)}`;
        pen = "L";
      }
    });
    const look = classOf(this.looks.get(this.timeline.id(item)));
    const path = svg("path", { d, class: `curve ${look}` });
    this.paths.set(item, path);
    this.circles.set(item, svg("circle", { r: 4, class: look }));
    return path;
  }
}

/** Means of seven days, so that a season is seen beneath the days of the week; the dots are the days' own scores. */
function smooth(scores) {
  return scores.map((score, step) => {
    if (score === null) return null;
    const week = scores.slice(Math.max(0, step - 3), step + 4).filter((value) => value !== null);
    return week.reduce((sum, value) => sum + value, 0) / week.length;
  });
}

/** 1, 2 or 5 times a power of ten. */
function niceStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((times) => times * power).find((size) => size >= rough);
}

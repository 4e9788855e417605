// One model: its list, its curves, and why an item is there.

import { Curves } from "./curves.js";
import { RankedList } from "./list.js";
import { Why } from "./why.js";

export class Panel {
  /** description: of GET /model. move: called with a step when a pointer moves over the curves. */
  constructor(description, move) {
    this.root = document.getElementById("model").content.firstElementChild.cloneNode(true);
    this.root.querySelector(".run").textContent = description.run;
    this.version = this.root.querySelector(".version");
    this.by = this.root.querySelector(".source");
    this.empty = this.root.querySelector(".empty");
    this.list = new RankedList(this.root.querySelector("ol"), (item) => this.choose(item));
    this.curves = new Curves(this.root.querySelector(".plot"), move);
    this.why = new Why(this.root.querySelector(".why"));
    this.root.querySelector("ol").setAttribute("aria-label", `Recommended by ${description.run}`);
    new ResizeObserver(() => this.resize()).observe(this.root);
  }

  load(timeline, looks) {
    this.timeline = timeline;
    this.version.textContent = timeline.model;
    this.chosen = undefined; // the best item is explained until another is chosen
    for (const part of [this.list, this.curves, this.why]) part.load(timeline, looks);
  }

  show(step) {
    this.step = step;
    const item = this.chosen ?? this.timeline.lists[step][0];
    this.by.textContent = this.timeline.isByCounts(step) ? "from everybody's counts" : "";
    this.empty.hidden = this.timeline.lists[step].length > 0;
    this.list.show(step, item);
    this.curves.show(step, item);
    this.why.show(step, item);
  }

  choose(item) {
    this.chosen = this.chosen === item ? undefined : item;
    this.show(this.step);
  }

  resize() {
    if (!this.timeline) return;
    this.list.measure();
    this.curves.resize();
    this.show(this.step);
  }

  /** The first three items, for a screen reader. */
  spoken(step) {
    const best = this.timeline.lists[step].slice(0, 3).map((item) => this.timeline.label(item));
    return best.map((label, place) => `${place + 1}, ${label}`).join("; ");
  }
}

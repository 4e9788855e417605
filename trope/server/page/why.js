// Why an item is there: the parts that its score is the sum of, as bars.

import { html } from "./looks.js";

const PARTS = {
  standing: ["Taste", "the history, from this moment", 0],
  turning: ["Season", "the time readout of the item", 4],
  counts: ["Popular now", "everybody's counts", 2],
  own_items: ["Own items", "how often, and when last", 3],
};

export class Why {
  constructor(root) {
    this.item = root.querySelector(".item");
    this.bars = root.querySelector("dl");
    this.sum = root.querySelector(".sum");
  }

  load(timeline) {
    this.timeline = timeline;
    [this.low, this.high] = timeline.partRange();
    this.rows = timeline.parts.map((part) => {
      const [name, about, colour] = PARTS[part];
      const term = html("dt", "", name), bar = html("dd", `bar s${colour}`), value = html("dd", "value");
      term.append(html("small", "", about));
      bar.append(html("i"), html("b"));
      bar.style.setProperty("--zero", this.percent(-this.low));
      bar.setAttribute("aria-hidden", "true");
      return { term, bar, value, name };
    });
    this.bars.replaceChildren(...this.rows.flatMap(({ term, bar, value }) => [term, bar, value]));
  }

  percent(size) { return `${(100 * size) / (this.high - this.low)}%`; }

  show(step, item) {
    const label = item === undefined ? "" : this.timeline.label(item);
    if (this.item.textContent !== label) this.item.textContent = label;
    const parts = item === undefined ? null : this.timeline.why(step, item), means = this.timeline.meanWhy(step);
    this.rows.forEach(({ bar, value }, place) => {
      const size = parts?.[place] ?? 0;
      bar.style.setProperty("--left", this.percent(Math.min(0, size) - this.low));
      bar.style.setProperty("--width", this.percent(Math.abs(size)));
      bar.style.setProperty("--mean", this.percent((means[place] ?? 0) - this.low));
      value.textContent = parts ? signed(size) : "–";
    });
    const total = parts?.reduce((sum, size) => sum + size, 0);
    this.sum.textContent = parts ? `Together ${total.toFixed(3)}. A mark on a bar is the mean of the list.` : "Not among the ten at this moment.";
  }
}

const signed = (value) => (value > 0 ? "+" : "") + value.toFixed(3);

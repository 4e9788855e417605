// The answer of POST /timeline, by step. Numbers arrive as whole multiples of `unit`.

export class Timeline {
  constructor(answer) {
    Object.assign(this, { model: answer.model, note: answer.note, moments: answer.moments, parts: answer.parts });
    this.items = answer.items;
    this.lists = answer.lists;
    this.unit = answer.unit;
    this.rawScores = answer.scores;
    this.rawWhy = answer.why;
    this.counted = new Set(answer.by_counts);
    this.curves = answer.curves;
    // Scores by counts have another scale than the model's: a year with both draws the model's alone.
    this.isMixed = this.counted.size > 0 && this.counted.size < this.lists.length;
  }

  /** Entries of the list at a step, best first: place in `items`, score, and what it is the sum of. */
  at(step) {
    return this.lists[step].map((item, place) => ({ item, place, score: this.rawScores[step][place] * this.unit }));
  }

  label(item) {
    const { name, item_id: id } = this.items[item];
    return name ?? String(id);
  }

  id(item) { return String(this.items[item].item_id); }

  isByCounts(step) { return this.counted.has(step); }

  isDrawn(step) { return !(this.isMixed && this.counted.has(step)); }

  /** Numbers in the order of `parts`, null where the item is not listed. */
  why(step, item) {
    const place = this.lists[step].indexOf(item);
    return place < 0 ? null : this.rawWhy[step][place].map((value) => value * this.unit);
  }

  /** The mean of each part over the list at a step. */
  meanWhy(step) {
    const rows = this.rawWhy[step];
    return this.parts.map((_, part) => rows.reduce((sum, row) => sum + row[part], 0) * this.unit / rows.length || 0);
  }

  /** The item's score at every step; null where it is not known. Items that are rarely listed have listed ones only. */
  curve(item) {
    const whole = this.curves[item];
    return this.lists.map((list, step) => {
      if (!this.isDrawn(step)) return null;
      if (whole) return whole[step] * this.unit;
      const place = list.indexOf(item);
      return place < 0 ? null : this.rawScores[step][place] * this.unit;
    });
  }

  /** Smallest and largest listed score of the steps that are drawn. */
  range() {
    let low = Infinity, high = -Infinity;
    this.rawScores.forEach((row, step) => {
      if (!this.isDrawn(step)) return;
      for (const value of row) {
        low = Math.min(low, value * this.unit);
        high = Math.max(high, value * this.unit);
      }
    });
    return low <= high ? [low, high] : [0, 1];
  }

  /** Most negative and most positive part of any listed score, so that bars keep their scale while one drags. */
  partRange() {
    let low = 0, high = 0;
    for (const row of this.rawWhy) {
      for (const parts of row) {
        for (const value of parts) {
          low = Math.min(low, value * this.unit);
          high = Math.max(high, value * this.unit);
        }
      }
    }
    return high - low > 0 ? [low, high] : [0, 1];
  }
}

// A pasted history: lines of an item and a time. The server reads the times; it also says what is wrong with one.

/** Events of `item,time` lines; a heading, and empty lines, are left out. Throws with the line's number. */
export function readHistory(text, idsAreText) {
  const events = [];
  text.split(/\r?\n/).forEach((line, place) => {
    if (!line.trim()) return;
    // The time comes last: an item's own id may hold a comma.
    const cut = Math.max(line.lastIndexOf(","), line.lastIndexOf(";"), line.lastIndexOf("\t"));
    const item = unquoted(line.slice(0, cut)), time = unquoted(line.slice(cut + 1));
    if (cut > 0 && !place && !/\d/.test(time)) return;
    if (cut < 1 || !item || !time) throw new Error(`Line ${place + 1} is not "item,time": ${line.slice(0, 60)}`);
    if (!idsAreText && !/^-?\d+$/.test(item)) throw new Error(`Line ${place + 1}: items of this model are whole numbers, not ${item.slice(0, 40)}`);
    // JSON numbers are doubles here: a larger one would be sent as another item.
    if (!idsAreText && !Number.isSafeInteger(Number(item))) throw new Error(`Line ${place + 1}: a browser cannot send ${item.slice(0, 40)}, which has too many digits; ask with curl instead`);
    events.push({ item_id: idsAreText ? item : Number(item), timestamp: /^\d{9,}$/.test(time) ? Number(time) : time });
  });
  if (!events.length) throw new Error("Paste at least one line, such as: item,2017-01-14");
  return events;
}

/** Unix seconds of the last event whose time the browser can read, or undefined. */
export function lastTime(events) {
  const times = events.map(({ timestamp: time }) => (typeof time === "number" ? time : Date.parse(time) / 1000));
  const known = times.filter(Number.isFinite);
  return known.length ? known.reduce((most, time) => Math.max(most, time)) : undefined;
}

const unquoted = (text) => text.trim().replace(/^"(.*)"$/, "$1").replaceAll('""', '"');

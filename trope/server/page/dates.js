// Days of the slider. All of them are UTC, as in the data; a day is asked for at noon.

export const DAY = 86_400;
export const STEPS = 366;

const long = new Intl.DateTimeFormat("en-GB", {
  timeZone: "UTC", weekday: "short", day: "numeric", month: "long", year: "numeric",
});
const month = new Intl.DateTimeFormat("en-GB", { timeZone: "UTC", month: "short" });

/** "2017-02-01" of Unix seconds. */
export const isoDay = (seconds) => new Date(seconds * 1000).toISOString().slice(0, 10);

/** Unix seconds of a day's midnight, NaN where it is no day. */
export const midnight = (day) => Date.parse(`${day}T00:00:00Z`) / 1000;

/** The 366 noons from a day on. */
export const noons = (day) => Array.from({ length: STEPS }, (_, step) => midnight(day) + (step + 0.5) * DAY);

/** "Wed, 20 December 2017". */
export const say = (seconds) => long.format(seconds * 1000);

/** Steps at which a month begins, with its name, and the year with January. */
export function monthStarts(moments) {
  const found = [];
  moments.forEach((seconds, step) => {
    const date = new Date(seconds * 1000);
    if (date.getUTCDate() !== 1) return;
    const year = date.getUTCMonth() === 0 ? ` ${date.getUTCFullYear()}` : "";
    found.push({ step, name: month.format(date).slice(0, 3) + year });
  });
  return found;
}

/** The step a calendar month later or earlier, held inside the slider; the 31st becomes a shorter month's last day. */
export function monthsAway(moments, step, months) {
  const date = new Date(moments[step] * 1000);
  const last = new Date(Date.UTC(date.getUTCFullYear(), date.getUTCMonth() + months + 1, 0)).getUTCDate();
  const day = Math.min(date.getUTCDate(), last);
  const there = Date.UTC(date.getUTCFullYear(), date.getUTCMonth() + months, day, 12) / 1000;
  return Math.max(0, Math.min(moments.length - 1, Math.round((there - moments[0]) / DAY)));
}

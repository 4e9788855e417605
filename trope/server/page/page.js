// The page: asks for a year once, then shows any of its days without a request.

import { get, KeyNeeded, post, useKey } from "./api.js";
import { DAY, isoDay, midnight, monthsAway, monthStarts, noons, say } from "./dates.js";
import { lastTime, readHistory } from "./history.js";
import { chooseLooks, html } from "./looks.js";
import { Panel } from "./panel.js";
import { People } from "./people.js";
import { startTheme } from "./theme.js";
import { Timeline } from "./timeline.js";

const MONTH = 31 * DAY, YEAR = 365 * DAY, LISTED = 10, STILL = 600;
const at = (id) => document.getElementById(id);
const slider = at("moment"), start = at("start"), user = at("user"), history = at("history");
const people = new People(user, at("users"), askUser, fail);

let model, panels = [], moments = [], dates = [], asking, painting = false, speaking;

/** What is wanted, as it stands after # in the address, so that a link shows the same. */
let wanted = new URLSearchParams(location.hash.slice(1));
/** What is shown, for the address: the form may have changed since it was asked. */
let shown;

async function open() {
  startTheme(at("theme"));
  model = await get("/model");
  const models = [model, ...(model.compared ? [model.compared] : [])];
  panels = models.map((each) => new Panel(each, (step) => { slider.value = step; soon(); }));
  at("models").replaceChildren(...panels.map((panel) => panel.root));
  at("models").classList.toggle("two", panels.length > 1);
  start.min = isoDay(model.trained_from);
  start.max = isoDay(Math.max(model.trained_until, Date.now() / 1000));
  fillIn();
  at("key-form").hidden = true;
  const { users } = await get("/users", { limit: 20 });
  if (wanted.get("user")) {
    await ask();
  } else if (users.length) {
    askUser(users.reduce((most, each) => (each.events > most.events ? each : most)));
  } else {
    choose("history"); // without a dataset there is nobody to pick
  }
}

/** Put what is wanted into the form. */
function fillIn() {
  start.value = wanted.get("from") ?? isoDay(usualStart());
  at("grows").checked = wanted.has("grows");
  at("fresh").checked = wanted.has("fresh");
  if (!wanted.get("user")) return;
  user.value = wanted.get("user");
  choose("user");
}

/** A year before the last training event; a month after the first one where the data hold no more than a year. */
const usualStart = () => Math.min(model.trained_until, Math.max(model.trained_until - YEAR, model.trained_from + MONTH));

function askUser(found) {
  user.value = found.user_id;
  // A user who came later has no history at the usual start.
  if (found.first && found.first >= midnight(start.value)) start.value = isoDay(found.first + DAY);
  return ask();
}

/** Ask every model for the year, and show it. */
async function ask() {
  asking?.abort();
  const mine = asking = new AbortController();
  try {
    const question = { ...whom(), k: LISTED, filter_seen: at("fresh").checked ? "history" : "none" };
    const first = midnight(start.value);
    if (!Number.isFinite(first)) throw new Error("Choose the day until which the history counts.");
    question.moments = noons(start.value);
    if (!at("grows").checked) question.history_until = first;
    const place = new URLSearchParams({ from: start.value });
    if (question.user_id) place.set("user", question.user_id);
    if (at("grows").checked) place.set("grows", "1");
    if (at("fresh").checked) place.set("fresh", "1");
    document.body.classList.add("waiting");
    const answers = await Promise.all(panels.map((_, place) => (
      post("/timeline", place ? { ...question, compared: true } : question, mine.signal)
    )));
    if (asking === mine) load(answers.map((answer) => new Timeline(answer)), place);
    at("problem").hidden = true;
  } catch (error) {
    if (error.name !== "AbortError") fail(error);
  } finally {
    if (asking === mine) document.body.classList.remove("waiting");
  }
}

function whom() {
  if (kind() === "history") return { history: readHistory(history.value, model.item_ids_are_text) };
  if (!user.value.trim()) throw new Error("Type a user's id, or paste a history.");
  return { user_id: user.value };
}

function load(timelines, place) {
  shown = place;
  moments = timelines[0].moments;
  dates = moments.map(say);
  const looks = chooseLooks(timelines);
  timelines.forEach((timeline, place) => panels[place].load(timeline, looks));
  slider.max = moments.length - 1;
  slider.disabled = false;
  if (wanted.has("day")) slider.value = wanted.get("day");
  wanted.delete("day");
  const names = monthStarts(moments).map(({ step, name }) => {
    const label = html("span", "", name.slice(0, 3));
    label.style.left = `${(100 * step) / (moments.length - 1)}%`;
    return label;
  });
  at("months").replaceChildren(...names);
  const notes = new Set(timelines.map((timeline) => timeline.note).filter(Boolean));
  at("note").textContent = [...notes].join(" ");
  at("note").hidden = !notes.size;
  // Above where it explains the lists; below where it speaks of the end of the year alone.
  at("models")[timelines.some((timeline) => timeline.counted.size) ? "before" : "after"](at("note"));
  paint();
}

/** Show the slider's day in the next frame, however many events came in this one. */
function soon() {
  if (painting || !moments.length) return;
  painting = true;
  requestAnimationFrame(paint);
}

function paint() {
  painting = false;
  const step = Number(slider.value);
  at("date").textContent = dates[step];
  slider.setAttribute("aria-valuetext", dates[step]);
  const after = Math.ceil((moments[step] - model.trained_until) / DAY);
  at("since").textContent = after > 0 ? `${after} ${after === 1 ? "day" : "days"} after the last training event` : "";
  for (const panel of panels) panel.show(step);
  clearTimeout(speaking);
  speaking = setTimeout(settle, STILL, step);
}

/** When the slider rests: tell a screen reader, and put the day into the address. */
function settle(step) {
  at("spoken").textContent = panels.map((panel) => panel.spoken(step)).join(". ");
  shown.set("day", step);
  window.history.replaceState(null, "", `#${shown}`);
}

const kind = () => document.querySelector("[name=kind]:checked").value;

function choose(value) {
  document.querySelector(`[name=kind][value=${value}]`).checked = true;
  at("by-user").hidden = value !== "user";
  at("by-history").hidden = value !== "history";
}

function fail(error) {
  at("key-form").hidden = !(error instanceof KeyNeeded);
  at("problem").textContent = error.message;
  at("problem").hidden = false;
}

slider.addEventListener("input", soon);
slider.addEventListener("keydown", (event) => {
  const months = { PageUp: 1, PageDown: -1 }[event.key];
  if (!months || !moments.length) return;
  event.preventDefault(); // a browser would go a tenth of the year
  slider.value = monthsAway(moments, Number(slider.value), months);
  soon();
});
at("question").addEventListener("submit", async (event) => {
  event.preventDefault();
  people.close();
  try {
    if (!panels.length) { // it could not be opened: a key is missing, or the server was away
      at("problem").hidden = true;
      if (kind() === "user" && user.value.trim()) wanted.set("user", user.value);
      await open();
    } else if (kind() === "history") {
      const last = lastTime(readHistory(history.value, model.item_ids_are_text));
      if (last !== undefined && !at("grows").checked) start.value = isoDay(last + DAY);
      await ask();
    } else {
      const isTyped = document.activeElement === user;
      // An id may begin or end with a space; what was pasted may, too.
      const found = await people.exact(user.value) ?? await people.exact(user.value.trim());
      user.value = found ? found.user_id : user.value.trim();
      await (found && isTyped ? askUser(found) : ask());
    }
  } catch (error) {
    fail(error);
  }
});
for (const id of ["start", "grows", "fresh"]) at(id).addEventListener("change", () => { if (moments.length) ask(); });
for (const radio of document.querySelectorAll("[name=kind]")) radio.addEventListener("change", () => choose(radio.value));
window.addEventListener("hashchange", () => { // a link in this tab, or another address
  const link = new URLSearchParams(location.hash.slice(1));
  if (!link.has("user") && !link.has("from")) return; // a place on the page, such as the slider
  wanted = link;
  if (!panels.length) return; // it is still opening
  fillIn();
  ask();
});
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(at("key").value);
  at("problem").hidden = true;
  open().catch(fail);
});

open().catch(fail);

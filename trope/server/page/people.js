// Finding a user by the beginning of an id: a combobox as the ARIA practices describe it.

import { get } from "./api.js";
import { html } from "./looks.js";

const PAUSE = 120;

export class People {
  /** pick: called with a user that was found. fail: with an error. */
  constructor(input, list, pick, fail) {
    Object.assign(this, { input, list, pick, fail });
    this.found = [];
    this.active = -1;
    input.addEventListener("input", () => {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.search(), PAUSE);
    });
    input.addEventListener("keydown", (event) => this.press(event));
    input.addEventListener("focus", () => input.select());
    input.addEventListener("blur", () => this.close());
    // Before the blur, which would close the list.
    list.addEventListener("pointerdown", (event) => event.preventDefault());
    list.addEventListener("click", (event) => {
      const option = event.target.closest("li");
      if (option) this.choose([...list.children].indexOf(option));
    });
  }

  async search() {
    this.abort?.abort();
    this.abort = new AbortController();
    try {
      const prefix = this.input.value;
      const { users } = await get("/users", { prefix, limit: 20 }, this.abort.signal);
      this.found = users;
      this.open();
    } catch (error) {
      if (error.name !== "AbortError") this.fail(error);
    }
  }

  /** The user with the id that was typed, where the server knows it. */
  async exact(id) {
    const { users } = await get("/users", { prefix: id, limit: 1 });
    return users.find((user) => user.user_id === id);
  }

  open() {
    this.list.replaceChildren(...this.found.map((user, place) => {
      const option = html("li");
      option.id = `user-${place}`;
      option.setAttribute("role", "option");
      option.append(html("bdi", "", user.user_id), html("small", "", `${user.events.toLocaleString("en")} events`));
      return option;
    }));
    this.list.hidden = !this.found.length;
    this.input.setAttribute("aria-expanded", String(!this.list.hidden));
    this.mark(-1);
  }

  close() {
    clearTimeout(this.timer);
    this.abort?.abort();
    this.found = [];
    this.open();
  }

  mark(place) {
    this.active = place;
    [...this.list.children].forEach((option, each) => option.setAttribute("aria-selected", String(each === place)));
    if (place < 0) {
      this.input.removeAttribute("aria-activedescendant");
    } else {
      this.input.setAttribute("aria-activedescendant", `user-${place}`);
      this.list.children[place].scrollIntoView({ block: "nearest" });
    }
  }

  press(event) {
    const count = this.found.length;
    if (event.key === "ArrowDown" && !count) {
      this.search();
    } else if (event.key === "ArrowDown") {
      this.mark((this.active + 1) % count);
    } else if (event.key === "ArrowUp" && count) {
      this.mark((this.active + count - 1 + (this.active < 0)) % count);
    } else if (event.key === "Escape") {
      this.close();
    } else if (event.key === "Enter" && this.active >= 0) {
      this.choose(this.active);
    } else {
      return;
    }
    event.preventDefault();
  }

  choose(place) {
    const user = this.found[place];
    this.input.value = user.user_id;
    this.close();
    this.pick(user);
  }
}

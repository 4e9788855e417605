"""From input to painted list: the page of `trope serve` in Chromium, its slider dragged over a year.

    python benchmarks/page_slider.py --out results/page_slider.json      # needs playwright and chromium

The model has the demo's shape and random weights, so that lists change more from day to day than a trained model's. A
mouse drags the slider over 365 positions, then the arrow key goes them back; then both with two models side by side.

main, of the mouse: until the page's thread has painted the frame. shown, of the key: Chromium's Event Timing, until the
frame is presented; in steps of 8 ms, at least 16; there is none for a mouse that moves. cpu_ms: processor time of the
page's thread for a position, which does not depend on what else the machine does. All traffic stays on the loopback
interface.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

DAYS = 365
# Timed from the mouse or the key itself: the slider's own event comes when the page handles it, up to a frame later.
# The message comes after the frame's own task, which ends with painting.
CLOCK = """
() => {
  const slider = document.getElementById("moment");
  const isOn = window.times !== undefined;
  window.times = []; window.shown = []; window.waiting = 0;
  if (isOn) return;
  let cause = 0;
  for (const name of ["pointerdown", "pointermove", "keydown"]) {
    window.addEventListener(name, (event) => { cause = event.timeStamp; }, true);
  }
  const begin = () => {
    const since = cause, step = Number(slider.value);
    window.waiting += 1;
    requestAnimationFrame(() => {
      const { port1, port2 } = new MessageChannel();
      port1.onmessage = () => {
        window.times.push({ step, ms: performance.now() - since });
        window.waiting -= 1;
      };
      port2.postMessage(null);
    });
  };
  slider.addEventListener("input", begin);
  new PerformanceObserver((list) => {
    for (const entry of list.getEntries()) if (entry.name === "keydown") window.shown.push(entry.duration);
  }).observe({ type: "event", durationThreshold: 16 });
}
"""
# The page's policy forbids wait_for_function, which evaluates text inside the page.
DONE = """
() => new Promise((done) => {
  const look = () => (window.waiting ? setTimeout(look, 5) : setTimeout(done, 100));  // Event Timing reports later
  look();
})
"""


def find_chromium() -> str | None:
    """Where Chromium is, under Debian's name or another's."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def drag(page: Any) -> dict[str, Any]:
    """Drag the slider from end to end with the mouse, one position at a time; returns times in ms."""
    begin = start(page)
    box = page.locator("#moment").bounding_box()
    thumb = 16  # the middle of the thumb is half of it inside the slider's ends
    left, width, y = box["x"] + thumb / 2, box["width"] - thumb, box["y"] + box["height"] / 2
    page.mouse.move(left, y)
    page.mouse.down()
    for day in range(1, DAYS + 1):
        page.mouse.move(left + width * day / DAYS, y)
    page.mouse.up()
    return collect(page, begin)


def press(page: Any, key: str = "ArrowLeft", times: int = DAYS) -> dict[str, Any]:
    """Press a key on the slider again and again; returns times in ms."""
    begin = start(page)
    page.locator("#moment").focus()
    for _ in range(times):
        page.keyboard.press(key)
        page.evaluate("() => new Promise(requestAnimationFrame)")  # a finger is slower than a frame
    return collect(page, begin)


def start(page: Any) -> tuple[Any, float]:
    """Start the clocks; returns what `collect` needs."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.evaluate(CLOCK)
    return session, cpu_seconds(session)


def cpu_seconds(session: Any) -> float:
    """Processor time that the page's thread has used for its tasks."""
    metrics = session.send("Performance.getMetrics")["metrics"]
    return next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")


def collect(page: Any, begin: tuple[Any, float]) -> dict[str, Any]:
    """Percentiles of what the clocks have seen."""
    session, before = begin
    page.evaluate(DONE)
    cpu = cpu_seconds(session) - before
    times = page.evaluate("window.times")
    main, shown = sorted(time["ms"] for time in times), sorted(page.evaluate("window.shown"))
    found = {"positions": len({time["step"] for time in times}), "cpu_ms": 1000 * cpu / len(times)}
    if shown:
        # Chromium holds messages back while keys come in, so the first clock would tell the time of a later key.
        shown = [16.0] * (len(main) - len(shown)) + shown  # shorter ones are not reported
        return found | {"shown_p50": at(shown, 0.5), "shown_p95": at(shown, 0.95), "shown_max": shown[-1]}
    return found | {"main_p50": at(main, 0.5), "main_p95": at(main, 0.95), "main_max": main[-1]}


def at(values: list[float], share: float) -> float:
    """A percentile of sorted values, nearest rank."""
    return values[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    from playwright.sync_api import sync_playwright
    from serve_load import make_run

    from trope.bench.server import serve
    from trope.environment import describe

    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "trope-serve-bench")
    parser.add_argument("--run", type=Path, help="a trained run instead of the random one")
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    run = given.run or make_run(given.folder)
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        for name, more in (("one model", []), ("two models", ["--compare", str(given.compare or run)])):
            server = serve(run, "--quiet", "--store", f"{folder}/{name}", *more)
            try:
                page = browser.new_page(viewport={"width": 1280, "height": 900})
                with page.expect_response("**/timeline") as answer:
                    page.goto(server.url)
                page.wait_for_selector("ol li")
                size = len(answer.value.body())
                rows[f"{name}, mouse"] = {"bytes": size, **drag(page)}
                rows[f"{name}, key"] = {"bytes": size, **press(page)}
                page.close()
            finally:
                server.end()
    for name, row in rows.items():
        print(
            f"{name:18}", "  ".join(f"{key} {value:.1f}".removesuffix(".0") for key, value in row.items()), flush=True
        )
    if given.out:
        given.out.write_text(json.dumps({"environment": describe(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

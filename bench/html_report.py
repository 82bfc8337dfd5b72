"""How long does the HTML report take, how large is it, and how quickly does a browser draw it?

A job of 64 ranks and one hour, and one of 8,000 ranks on 1,000 nodes: rendering beside that of the
JSON report of the same job; then, where there is a Chromium, time to the first paint, time until
everything is drawn, and time from a turn of the wheel to the end of the frame that shows it.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from browser import Browser, program
from histories import hour

from clusterprof.findings import Report
from clusterprof.renderers.html.page import Html
from clusterprof.renderers.json_ import Json

ROUNDS = 3
FRAMES = 40
PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
ZOOM = """(async () => {
  const canvas = document.querySelector('.rows canvas');
  canvas.scrollIntoView({block: 'center'});
  const box = canvas.getBoundingClientRect();
  const [drawings, times] = [[], []];
  for (let i = 0; i < FRAMES; i++) {
    const turn = new WheelEvent('wheel', {
      deltaY: i < FRAMES / 2 ? -60 : 60, ctrlKey: true, cancelable: true, bubbles: true,
      clientX: box.left + box.width * 0.6, clientY: box.top + 40,
    });
    await new Promise((done) => setTimeout(done, 20));
    const began = await new Promise((done) => requestAnimationFrame(() => {
      const now = performance.now();
      canvas.dispatchEvent(turn);
      done(now);
    }));
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    times.push(performance.now() - began);
    drawings.push(performance.getEntriesByName('draw')[0].duration);
  }
  return [drawings, times].map((all) => all.sort((one, other) => one - other));
})()""".replace("FRAMES", str(FRAMES))


def cpu_s(renderer: Html | Json, report: Report) -> float:
    """Least CPU time of a few rounds."""
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.process_time()
        renderer.render(report)
        best = min(best, time.process_time() - began)
    return best


def drawn(browser: Browser, file: Path) -> str:
    """Open the page a few times and zoom in it; the best opening and all frames are told."""
    paints, readies = [], []
    for _ in range(ROUNDS):
        browser.open(file)
        browser.frame()
        paints.append(browser.evaluate(PAINT))
        readies.append(browser.evaluate("performance.getEntriesByName('drawn')[0].startTime"))
    drawings, frames = browser.evaluate(ZOOM)
    assert browser.complaints() == []
    return (
        f"  browser: first paint {min(paints):.0f} ms, all drawn {min(readies):.0f} ms (target"
        f" 1,000)\n  a turn of the wheel: drawn in {drawings[FRAMES // 2]:.0f} ms median,"
        f" {drawings[int(0.95 * FRAMES)]:.0f} p95 (target 50); to the end of the frame"
        f" {frames[FRAMES // 2]:.0f} ms median"
    )


def main() -> None:
    """Print both jobs."""
    jobs = {
        "64 ranks, 1 h, 720 stretches": hour(8, 8, 720, 5000),
        "8,000 ranks on 1,000 nodes, 1 h": hour(1000, 8, 360, 200),
    }
    for name, report in jobs.items():
        ours, theirs = cpu_s(Html(), report), cpu_s(Json(), report)
        page = Html().render(report)
        print(
            f"{name}: {ours:.2f} CPU-s (target 5), {ours / theirs:.1f} x the JSON report,"
            f" {len(page) / 1e6:.2f} MB (target 2)"
        )
        if program() is None:
            print("  browser: none here")
            continue
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "report.html"
            file.write_text(page, encoding="ascii")
            with Browser.start(Path(folder)) as browser:
                print(drawn(browser, file))


if __name__ == "__main__":
    main()

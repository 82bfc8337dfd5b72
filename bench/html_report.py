"""How long does the HTML report take, how large is it, and how quickly does a browser draw it?

A job of 64 ranks and one hour, and one of 8,000 ranks on 1,000 nodes: rendering beside that of the
JSON report of the same job. Where a Chromium is installed, also the time to the first paint, time
and CPU until everything is drawn, and the time of a frame while the wheel zooms.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from clusterprof.output.renderers.html.page import Html
from clusterprof.output.renderers.json import Json
from clusterprof.report.model import Report
from tests.support.browser import Browser, find_chromium
from tests.support.histories import make_one_hour_job

ROUNDS = 3
FRAMES = 40
PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
ZOOM = """(async () => {
  const canvas = document.querySelector('.rows canvas');
  canvas.scrollIntoView({block: 'center'});
  const box = canvas.getBoundingClientRect();
  const drawings = [];
  for (let i = 0; i < FRAMES; i++) {
    const turn = new WheelEvent('wheel', {
      deltaY: i < FRAMES / 2 ? -60 : 60, ctrlKey: true, cancelable: true, bubbles: true,
      clientX: box.left + box.width * 0.6, clientY: box.top + 40,
    });
    await new Promise((done) => setTimeout(done, 20));
    canvas.dispatchEvent(turn);
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    drawings.push(performance.getEntriesByName('draw')[0].duration);
  }
  return drawings.sort((one, other) => one - other);
})()""".replace("FRAMES", str(FRAMES))


def measure_cpu_s(renderer: Html | Json, report: Report) -> float:
    """Least CPU time of a few rounds."""
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.process_time()
        renderer.render(report)
        best = min(best, time.process_time() - began)
    return best


def measure_drawing(browser: Browser, file: Path) -> str:
    """Open the page a few times and zoom in it; return the best opening and all frames."""
    paints, readies, spent = [], [], []
    for _ in range(ROUNDS):
        browser.open(file)
        browser.wait_for_frame()
        spent.append(browser.read_cpu_s())
        paints.append(browser.evaluate(PAINT))
        readies.append(browser.evaluate("performance.getEntriesByName('drawn')[0].startTime"))
    before = browser.read_cpu_s()
    drawings = browser.evaluate(ZOOM)
    each = (browser.read_cpu_s() - before) / FRAMES
    assert browser.list_errors() == []
    return (
        f"  opening: first paint {min(paints):.0f} ms (target 1,000), all drawn"
        f" {min(readies):.0f} ms, {1e3 * min(spent):.0f} ms of CPU\n"
        f"  a turn of the wheel: {1e3 * each:.0f} ms of CPU a frame (target 50); drawn in"
        f" {drawings[FRAMES // 2]:.0f} ms median, {drawings[int(0.95 * FRAMES)]:.0f} p95"
    )


def main() -> None:
    """Print both jobs."""
    jobs = {
        "64 ranks, 1 h, 720 stretches": make_one_hour_job(8, 8, 720, 5000),
        "8,000 ranks on 1,000 nodes, 1 h": make_one_hour_job(1000, 8, 360, 200),
    }
    for name, report in jobs.items():
        ours, theirs = measure_cpu_s(Html(), report), measure_cpu_s(Json(), report)
        page = Html().render(report)
        print(
            f"{name}: {ours:.2f} CPU-s (target 5), {ours / theirs:.1f} x the JSON report,"
            f" {len(page) / 1e6:.2f} MB (target 2)"
        )
        if find_chromium() is None:
            print("  no browser here")
            continue
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "report.html"
            file.write_text(page, encoding="ascii")
            with Browser.start(Path(folder)) as browser:
                print(measure_drawing(browser, file))


if __name__ == "__main__":
    main()

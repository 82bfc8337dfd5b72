"""Whole outputs of reports made by hand; `make golden` accepts new ones, the diff is reviewed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clusterprof.output.renderers.base import Renderer
from clusterprof.output.renderers.brief import Brief
from clusterprof.output.renderers.json import Json
from clusterprof.output.renderers.markdown import Markdown
from clusterprof.output.renderers.plain import Plain
from clusterprof.output.renderers.terminal import Terminal
from clusterprof.report import aggregate
from tests.support.cluster_report import make_cluster_report
from tests.support.reports import ALL

GOLDEN = Path(__file__).parents[2] / "golden"
OUTPUTS: dict[str, Renderer] = {
    "screen.txt": Terminal(80, False, 2.5, full=False),
    "screen.md": Markdown(full=False),
    "terminal.txt": Terminal(80, False, 2.5),
    "terminal-color.txt": Terminal(100, True),
    "plain.txt": Plain(2.5, "EUR"),
    "brief.txt": Brief(2.5, "EUR"),
    "report.json": Json(),
    "report.md": Markdown(),
}
# 128 ranks are 8,500 lines; "two-nodes" has one of everything that they have
LEFT_OUT = {("cluster", "report.json")}
LARGE = ["screen.txt", "brief.txt", "terminal.txt", "plain.txt", "report.md"]
"""Outputs of 10,000 ranks: none grows with them."""
FEW = "few-listed.report.json"
WANTED = [(name, output) for name in ALL for output in OUTPUTS if (name, output) not in LEFT_OUT]


@pytest.mark.parametrize(("name", "output"), WANTED)
def test_every_output_matches_its_golden_file(name: str, output: str) -> None:
    check(f"{name}.{output}", OUTPUTS[output].render(ALL[name]()))


def check(name: str, text: str) -> None:
    file = GOLDEN / name
    if os.environ.get("CLUSTERPROF_ACCEPT_GOLDEN"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


@pytest.mark.parametrize("output", LARGE)
def test_outputs_of_ten_thousand_ranks_match_golden_files(output: str) -> None:
    check(f"ten-thousand.{output}", OUTPUTS[output].render(make_cluster_report(1250, 8)))


def test_json_with_few_listed_ranks_matches_its_golden_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As above 512 ranks, with limits that 6 ranks on 3 nodes exceed.

    Listed are rank 0, which caused most, 4, the first culprit of preprocessing, and 5, which lost
    most. Summed are 1, beside 0 on its node, and 2 and 3.
    """
    for limit, value in (("LISTED_RANKS", 4), ("LISTED_CULPRITS", 1), ("OUTLIERS", 1)):
        monkeypatch.setattr(aggregate, f"MAX_{limit}", value)
    check(FEW, Json().render(make_cluster_report(3, 2)))


def test_every_golden_file_is_in_use() -> None:
    wanted = {f"{name}.{output}" for name, output in WANTED} | {FEW}
    wanted |= {f"ten-thousand.{output}" for output in LARGE}
    assert {file.name for file in GOLDEN.iterdir()} == wanted


def test_the_readme_shows_the_actual_output() -> None:
    readme = (GOLDEN.parent.parent / "README.md").read_text(encoding="utf-8")
    shown = readme.split("```text\n")[1].split("```")[0].splitlines()
    assert shown[1].startswith(" 16 nodes, 128 of 136 ranks")
    printed = (GOLDEN / "cluster.screen.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in shown if line != " …" and line not in printed] == []

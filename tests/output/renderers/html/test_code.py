"""Stacks on the page: the data of the flame graph, and tables that need no script."""

from __future__ import annotations

import json
from typing import Any

import pytest

from clusterprof.output.renderers.html.data import build_script_json
from clusterprof.output.renderers.html.page import Html
from clusterprof.report.code import CodeProfile, Place, StackTime
from clusterprof.report.model import Report
from tests.support.code_profiles import PROFILE, S, add_code_profile, make_report_with_code
from tests.support.hostile_names import HOSTILE
from tests.support.reports import make_storage_report


def document(report: Report) -> Any:
    return json.loads(build_script_json(report))


def test_stacks_share_their_outer_frames() -> None:
    data = document(make_report_with_code())
    causes = [cause["id"] for cause in data["causes"]]
    local, cpu, none = map(causes.index, ("storage-local", "cpu-preprocess", "unattributed"))
    assert data["code"] == {
        "files": ["train.py", "torch/utils/data/loader.py", "PIL/Image.py", "data/utils.py"],
        "paths": [PROFILE.places[at].file for at in (0, 1, 3, 4)],
        "places": [
            [0, 90, "main", 0],
            [1, 733, "__next__", 1],
            [0, 42, "Images.augment", 0],
            [2, 2450, "Image.resize", 1],
            [3, 7, "collate", 0],
        ],
        # frame n + 1 is frames[n]: its parent and its place; -1 = the stack is not known
        "frames": [[0, 0], [1, 1], [2, 2], [3, 3], [2, 4], [0, -1]],
        "times": [
            [4, local, 1, 5 * S, 100],
            [4, cpu, 1, 2 * S, 40],
            [5, local, 0, 2 * S, 40],
            [6, none, 0, S, 20],
        ],
        "reduced": 0,
    }


def test_without_stacks_the_page_has_no_code_section() -> None:
    assert document(make_storage_report())["code"] is None
    assert 'id="where"' not in Html().render(make_storage_report())
    why = CodeProfile(why_missing="--stacks off was given", notes=("workers were not sampled",))
    html = Html().render(add_code_profile(make_storage_report(), (), why))
    assert document(add_code_profile(make_storage_report(), (), why))["code"] is None
    assert '<p class="note">Not known: --stacks off was given.</p>' in html
    assert "workers were not sampled" in html and 'id="where-body"' not in html


def test_many_stacks_keep_their_total_time_in_bounded_size() -> None:
    places = tuple(Place(f"/job/{at}/a/long/path/of/a/file.py", at, "f" * 99) for at in range(9000))
    stacks = tuple(
        StackTime("storage-local", at % 2, (at, at + 1, at + 2), 9000 - at, 1) for at in range(8000)
    )
    report = add_code_profile(
        make_storage_report(), (), CodeProfile(places, (False,) * 9000, stacks, 8000)
    )
    code = document(report)["code"]
    assert len(json.dumps(code)) <= 400_000 and len(Html().render(report)) < 1_000_000
    assert sum(time[3] for time in code["times"]) == sum(stack.lost_ns for stack in stacks)
    assert 0 < code["reduced"] < 8000
    assert all(parent <= number for number, (parent, _) in enumerate(code["frames"]))


def test_code_tables_are_rendered_without_a_script() -> None:
    html = Html().render(make_report_with_code())
    words = (
        "train.py:42 in Images.augment &#8594; PIL/Image.py:2450 Image.resize: 71 % &#177; 4 of it"
    )
    assert f"<dt>Where</dt><dd><p>{words}, in the data loader&#x27;s transform Resize</p>" in html
    assert (
        '<tr><td class="n">71 % &#177; 4</td><td class="n">2.4 min</td><td><code'
        ' title="/job/train.py">train.py:42</code> in Images.augment<span class="below">'
        "&#8594; PIL/Image.py:2450 Image.resize, in the data loader&#x27;s transform Resize</span>"
    ) in html
    assert (
        '<tr><th scope="row"><code>train.py:42</code></th><td class="n">7.00 s</td>'
        '<td class="n">70.0 %</td><td>Images.augment</td><td>storage-local</td></tr>'
    ) in html
    assert "&#8230; and 1.00 s (10.0 %) without a known stack" in html


@pytest.mark.parametrize(
    "poison", ["</script><script>alert(1)</script>", "<img src=x onerror=a()>"]
)
def test_code_names_are_escaped_in_markup(poison: str) -> None:
    clean = with_poison("x")
    html, plain = Html().render(with_poison(poison)), Html().render(clean)
    for tag in ("<script", "<img", "<code", "<td", "<th", "<span", "<p"):
        assert html.count(tag) == plain.count(tag)
    data = build_script_json(with_poison(poison))
    assert "<" not in data and json.loads(data)["code"]["places"][0][2].startswith(poison[:50])


def with_poison(name: str) -> Report:
    place = Place(f"/{name}", 1, name)
    profile = CodeProfile((place,), (False,), (StackTime("storage-local", 0, (0,), S, 1),), 1)
    (first, *_) = make_report_with_code().findings
    line = first.lines[0]
    hostile = type(line)(place, place, S, 0.5, 0.1, 1, "transform", name)
    return add_code_profile(make_storage_report(), (hostile,), profile)


def test_hostile_names_are_escaped_in_their_cells() -> None:
    for name in HOSTILE:
        html = Html().render(with_poison(name[:60]))
        assert html.isascii() and "\x1b" not in html
        assert html.count("<td") == Html().render(with_poison("x")).count("<td"), ascii(name)

"""What is pasted stays whole: no line is broken inside a word, before an option, or in quotes."""

from __future__ import annotations

import shlex
import subprocess

import pytest

from clusterprof.output.renderers.html.verdict import render_change
from clusterprof.output.renderers.text.advice import (
    SEE_BELOW,
    capitalize_change,
    limit_lines,
    split_change,
    wrap_change,
    wrap_command,
)
from clusterprof.output.renderers.text.safety import count_columns, wrap_text
from clusterprof.report.model import Advice

TAR = "tar --sort=name -cf shard-00000.tar -C /data SAMPLES"
MOUNT = (
    "umount /data; mount -t nfs -o nconnect=8,rsize=1048576 filer.cluster.example.org:/export/data"
    " /data"
)


def advice(change: str, *commands: str) -> Advice:
    return Advice("do", "", change, "", "", "", commands=commands)


def texts(item: Advice, width: int) -> list[str]:
    return [line.text for line in wrap_change(item, width, "Change:")]


def test_a_short_command_stays_inline_within_prose() -> None:
    recommendation = advice(f"{TAR} (about 1 GB a shard), read in order", TAR)
    assert texts(recommendation, 72) == [f"Change: {TAR} (about 1 GB", "a shard), read in order"]


def test_a_command_that_does_not_fit_gets_separate_lines() -> None:
    recommendation = advice(f"pack them: {TAR} (about 1 GB), read in order", TAR)
    assert texts(recommendation, 60) == [
        "Change: pack them:",
        f"  {TAR}",
        "(about 1 GB), read in order",
    ]


def test_a_long_command_is_continued_with_backslashes_at_blanks() -> None:
    assert wrap_command(MOUNT, 72) == [
        "  umount /data; mount -t nfs -o nconnect=8,rsize=1048576 \\",
        "    filer.cluster.example.org:/export/data /data",
    ]
    assert all(count_columns(line) <= 72 for line in wrap_command(MOUNT, 72))


@pytest.mark.parametrize("width", range(40, 90, 5))
def test_a_shell_runs_the_wrapped_lines_as_the_same_command(width: int) -> None:
    for words in (
        ["printf", "<%s>", "a b", "it's", "--sort=name", "4096 131072 268435456", "x" * 15],
        ["printf", "<%s>", "-x", "a\\ b", 'say "no"', "$HOME", "a  b"],
    ):
        command = shlex.join(words)
        pasted = "\n".join(wrap_command(command, width))
        run = subprocess.run(["sh", "-c", pasted], capture_output=True, text=True, check=True)
        assert run.stdout == "".join(f"<{word}>" for word in words[2:])


def test_limited_lines_never_truncate_a_command() -> None:
    recommendation = advice(f"mount anew: {MOUNT} (or in fstab)", MOUNT)
    lines = wrap_change(recommendation, 72, "Change:")
    assert [line.text for line in limit_lines(lines, 3, 72)][1:] == wrap_command(MOUNT, 72)
    assert [line.text for line in limit_lines(lines, 2, 72)] == [f"Change: mount anew: {SEE_BELOW}"]
    prose = wrap_change(advice("word " * 60), 72, "Change:")
    kept = limit_lines(prose, 2, 72)
    assert len(kept) == 2 and kept[1].text.endswith(" …")
    assert limit_lines(lines, 9, 72) == lines


def test_names_in_a_command_are_matched_exactly_and_escaped() -> None:
    command = "umount '/d\x1b[2J  x'"
    recommendation = advice(f"{command}; then again", command)
    assert split_change(recommendation) == [
        (True, "umount '/d\\x1b[2J  x'"),
        (False, "; then again"),
    ]
    assert texts(recommendation, 72) == ["Change: umount '/d\\x1b[2J  x'; then again"]
    assert split_change(advice("nothing of it", "rm")) == [(False, "nothing of it")]


def test_wrapping_keeps_an_option_with_the_preceding_word() -> None:
    narrow = wrap_text("Remedy: run docker --cpus-per-task=8 now", 20)
    assert narrow == ["Remedy: run docker", "--cpus-per-task=8", "now"]  # both have no room
    assert wrap_text("set the quota with docker --cpus=8 now", 27) == [
        "set the quota with",
        "docker --cpus=8 now",
    ]
    assert wrap_text("by -0.2 points", 6) == ["by", "-0.2", "points"]  # a number is no option


def test_the_page_offers_commands_without_prose_to_copy() -> None:
    recommendation = advice(f"{TAR} (about 1 GB a shard)", TAR)
    sentence, block = (str(part) for part in render_change(recommendation))
    assert sentence == f"<p><code>{TAR}</code> (about 1 GB a shard)</p>"
    assert block == f'<pre class="copy"><code>{TAR}</code></pre>'
    assert [str(part) for part in render_change(advice(TAR, TAR)) if part] == [block]


@pytest.mark.parametrize(
    ("change", "commands", "printed"),
    [
        ("let a thread of its own sleep or retry", (), "Let a thread of its own sleep or retry"),
        ("mount anew: mount /data", ("mount /data",), "Mount anew: mount /data"),
        ("sudo sysctl -w kernel.x=1 and so on", (), "sudo sysctl -w kernel.x=1 and so on"),
        ("tar --sort=name and more words here", (), "tar --sort=name and more words here"),
        ("mount /data", ("mount /data",), "mount /data"),
        (
            "nvidia.dali, torchvision and more of them",
            (),
            "nvidia.dali, torchvision and more of them",
        ),
    ],
)
def test_only_a_sentence_is_capitalized(
    change: str, commands: tuple[str, ...], printed: str
) -> None:
    item = advice(change, *commands)
    assert capitalize_change(item).change == printed

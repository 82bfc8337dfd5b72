"""Run every question of this folder: `make bench`, or `python -m bench [NAME…] [--save]`.

Each file answers one question and prints its own lines: figures as ratios in one run, because the
machines are noisy. With `--save` the answers, the machine and the date go into bench/README.md.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
RESULTS_MARK = "<!-- results: written by `python -m bench --save` -->\n"
SLOWEST_S = 1800


def main(arguments: list[str]) -> int:
    """Run the named questions, or all; return 1 when any of them failed."""
    save = "--save" in arguments
    wanted = {name for name in arguments if not name.startswith("-")}
    scripts = sorted(path for path in FOLDER.glob("*.py") if not path.name.startswith("_"))
    chosen = [path for path in scripts if not wanted or path.stem in wanted]
    unknown = wanted - {path.stem for path in scripts}
    if unknown:
        print(
            f"no such question: {', '.join(sorted(unknown))}; there are "
            f"{', '.join(path.stem for path in scripts)}",
            file=sys.stderr,
        )
        return 2
    answers = [f"{describe_machine()}\n"]
    print(answers[0])
    failed = False
    for path in chosen:
        answer, ok = run_question(path)
        failed = failed or not ok
        print(answer, flush=True)
        answers.append(answer)
    if save:
        store_answers(answers, only_some=bool(wanted))
    return 1 if failed else 0


def describe_machine() -> str:
    """Return one line about where and when this ran."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    today = datetime.date.today().isoformat()
    return (
        f"{today} · {os.cpu_count()} × {model} · Linux {platform.release().split('-')[0]} · "
        f"Python {platform.python_version()}"
    )


def run_question(path: Path) -> tuple[str, bool]:
    """Run one question in a process of its own; return its answer, and whether it ended well."""
    done = subprocess.run(
        [sys.executable, str(path)],
        cwd=FOLDER.parent,
        capture_output=True,
        text=True,
        timeout=SLOWEST_S,
        check=False,
    )
    text = f"== {path.stem}\n{done.stdout}"
    if done.returncode != 0:
        text += f"(exit {done.returncode})\n{done.stderr[-2000:]}"
    return text, done.returncode == 0


def store_answers(answers: list[str], only_some: bool = False) -> None:
    """Replace the results in bench/README.md; of only some questions theirs alone, dated."""
    page = FOLDER / "README.md"
    head, _, tail = page.read_text(encoding="utf-8").partition(RESULTS_MARK)
    if only_some:
        old = re.split(r"\n(?=== )", tail.strip().removeprefix("```text\n").removesuffix("```"))
        sections = {part.split("\n", 1)[0]: part.rstrip() + "\n" for part in old}
        for answer in answers[1:]:
            title, _, text = answer.partition("\n")
            sections[title] = f"{title}\n{answers[0].strip()}\n{text}".rstrip() + "\n"
        answers = list(sections.values())
    body = "\n".join(answers)
    page.write_text(f"{head}{RESULTS_MARK}\n```text\n{body}```\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

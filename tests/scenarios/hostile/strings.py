"""What a hostile or broken machine could use as the name of anything: more than 300 strings.

By what they attack: a terminal, a reader's eyes, a page, a table, a spreadsheet, a CI runner, a
parser, or code that expects short names.
"""

from __future__ import annotations

from tests.scenarios.hostile.strings_parsed import MARKUP, PARSERS, RUNNERS, SHEETS, TABLES

_C0 = [chr(code) for code in range(0x20)]
_C1 = [chr(code) for code in range(0x7F, 0xA0)]
_BIDI = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
_ZERO = "\u00ad\u034f\u115f\u1160\u17b4\u17b5\u180b\u180e\u200b\u200c\u200d\u2060\u2061\u2062\u2063"
_ZERO += "\u2064\u206a\u206f\u2800\u3164\ufe00\ufe0f\ufeff\uffa0\ufff9\ufffb\U000e0001\U000e0041"
_ODD = [
    "\u2028",
    "\u2029",
    "\u0085",
    "\u00a0",
    "\u3000",
    "\ufffe",
    "\uffff",
    "\ue000",
    "\U000f0000",
]
_ODD += ["\U0010ffff", "\u0378", "\U000e0100", "\ufdd0", "\u1680", "\u205f"]

CONTROL = [f"a{letter}b" for letter in (*_C0, *_C1)]
EYES = [
    *(f"a{letter}b" for letter in (*_BIDI, *_ZERO, *_ODD)),
    "\u202egnp.exe",
    "user\u2066 \u2069admin",
    "\u202eabc\u202c\u202edef",
    "раураl",  # Cyrillic that looks Latin
    "e" + "\u0301" * 400,
    "Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢",
    "\u0e33\u0e33\u0e33" * 50,
    "﷽" * 20,
    "👨\u200d👩\u200d👧\u200d👦",
    "🇩🇪🏴\U000e0067\U000e0062\U000e007f",
    "漢字かな" * 60,
    "ﬁ\u212a\u017f",
    "\u200b",
    "\u202e",
    "\u2800\u2800\u2800",
]
TERMINAL = [
    "\x1b[2J\x1b[H",
    "\x1b[31mred\x1b[0m",
    "\x1b[8mhidden\x1b[28m",
    "\x1b[1A\x1b[2K",
    "\x1b[?1049h\x1b[?25l",
    "\x1b[6n",
    "\x1b[c",
    "\x1b[20h",
    "\x1b]0;owned\x07",
    "\x1b]2;owned\x1b\\",
    "\x1b]8;;http://evil.example\x1b\\click\x1b]8;;\x1b\\",
    "\x1b]52;c;ZXZpbA==\x07",
    "\x1b]1337;File=inline=1:AAAA\x07",
    "\x1b]9;4;1;50\x07",
    "\x1bP1$r0m\x1b\\",
    "\x1bPq#0;2;0;0;0\x1b\\",
    "\x1b_Gf=24;AAAA\x1b\\",
    "\x1b^secret\x1b\\",
    "\x1bc",
    "\x1b(0lqqk\x1b(B",
    "\x1b%@",
    "\x1b",
    "\x1b[",
    "\x9b31m",
    "\x9b2J",
    "\x9d0;owned\x9c",
    "\x90q\x9c",
    "\x0e\x0f",
    "a\rb",
    "a\r\nb",
    "a\nb",
    "a\n\n\nb",
    "a\tb\vc\fd",
    "safe\b\b\b\bevil",
    "\x07\x07\x07",
    "\x00",
    "a\x00b\x00",
    "^[[2J",
    "\\x1b[2J",
    "\\033[31m",
    "\\e[31m",
    "%s%s%n%x",
    "{0.__class__.__mro__}",
    "{}",
    "$(id)",
    "`id`",
    "; rm -rf ~",
    "-rf",
    "--help",
    "../../etc/passwd",
    "/dev/../dev/null",
    "~",
    "C:\\con",
    "\\\\server\\share",
]
SIZES = [
    "",
    " ",
    "   ",
    "a" * 10_000,
    "a " * 5_000,
    "漢" * 10_000,
    "\x1b[31m" * 2_000,
    "<" * 10_000,
    "|" * 10_000,
    "\n" * 10_000,
    "::error::" * 1_000,
    "\u202e" * 10_000,
    "=1," * 3_000,
    *(f"{'x' * number}::error::x" for number in range(0, 80, 8)),
    *(f"{'x' * number}\x1b[2J" for number in range(190, 206, 3)),
]

GROUPS: dict[str, list[str]] = {
    "control": CONTROL,
    "eyes": EYES,
    "terminal": TERMINAL,
    "markup": MARKUP,
    "tables": TABLES,
    "sheets": SHEETS,
    "runners": RUNNERS,
    "parsers": PARSERS,
    "sizes": SIZES,
}
HOSTILE: tuple[str, ...] = tuple(
    dict.fromkeys(value for group in GROUPS.values() for value in group)
)

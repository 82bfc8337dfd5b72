"""Binary layouts are the same on every machine: our files and rings, the kernel's structures."""

from __future__ import annotations

import ast
import inspect
import os
import shlex
import shutil
import struct
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

from clusterprof.agent.launch import nccl
from clusterprof.agent.linux import files, vendor_tools
from clusterprof.agent.linux.network import netdev, netlink
from clusterprof.agent.processes import registry
from clusterprof.probe import layout

PACKAGE = Path(inspect.getfile(layout)).parents[1]
STRUCT_CALLS = {f"struct.{name}" for name in ("Struct", "calcsize", "iter_unpack")}
STRUCT_CALLS |= {f"struct.{name}" for name in ("pack", "pack_into", "unpack", "unpack_from")}
ARRAY_CODES = set("bBiIqQfd")
"""Of these, a C compiler for Linux gives each the same size on x86-64 and arm64, and on musl."""


@cache
def list_package_calls() -> list[tuple[str, ast.Call]]:
    """List all calls in the package with their places."""
    return [
        (f"{path.relative_to(PACKAGE)}:{node.lineno}", node)
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
    ]


def has_explicit_sizes(form: ast.expr) -> bool:
    """Return whether a format begins with a byte order: its sizes are then the same everywhere."""
    if isinstance(form, ast.BinOp):
        return has_explicit_sizes(form.left)
    if isinstance(form, ast.JoinedStr):
        return has_explicit_sizes(form.values[0])
    return isinstance(form, ast.Constant) and str(form.value).startswith(("<", ">", "=", "!"))


@pytest.mark.parametrize(
    ("form", "explicit"), [("'<Q'", True), ("'q'", False), ("f'={n}Q'", True), ("f'{n}Q'", False)]
)
def test_a_format_is_explicit_by_its_first_character(form: str, explicit: bool) -> None:
    assert has_explicit_sizes(ast.parse(form, mode="eval").body) is explicit


def test_no_structure_has_native_sizes() -> None:
    calls = [
        (place, call)
        for place, call in list_package_calls()
        if ast.unparse(call.func) in STRUCT_CALLS and call.args
    ]
    assert len(calls) > 40
    assert [place for place, call in calls if not has_explicit_sizes(call.args[0])] == []


def test_no_array_has_elements_of_a_native_size() -> None:
    codes = {
        place: call.args[0].value
        for place, call in list_package_calls()
        if ast.unparse(call.func).split(".")[-1] in ("array", "cast")
        if call.args and isinstance(call.args[0], ast.Constant)
    }
    assert len(codes) > 10
    assert {place: code for place, code in codes.items() if code not in ARRAY_CODES} == {}


def test_no_library_is_opened_by_the_name_that_glibc_gives_it() -> None:
    """musl has no libc.so.6; `CDLL(None)` is the C library of the process, whichever it is."""
    texts = [path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")]
    assert any("CDLL(None" in text for text in texts)
    assert [text[:80] for text in texts if "libc.so" in text or "gnu_get_libc" in text] == []
    names = {ast.unparse(call.func).split(".")[-1] for _, call in list_package_calls()}
    assert "find_library" not in names  # runs a compiler where there is no ldconfig


def test_the_ring_has_the_offsets_that_are_specified() -> None:
    """As in docs/design/recording-format.md; numbers have 8 bytes, but for four of the header."""
    assert (layout.HEADER.size, layout.RECORD.size, layout.UNDER_WAY.size) == (48, 64, 40)
    assert (layout.WRITTEN_OFFSET, layout.SWITCHED_OFF_OFFSET) == (8 + 4 * 4 + 8, 8 + 4 * 4 + 16)
    assert layout.NAMES_OFFSET + 64 * 48 == layout.UNDER_WAY_OFFSET
    assert layout.HEADER.pack(b"CPRING1\n", 1, 2, 3, 4, 5, 6, 7).hex() == (
        b"CPRING1\n".hex() + "01000000020000000300000004000000" + "05" + "00" * 7
    ) + ("06" + "00" * 7 + "07" + "00" * 7)


HEADER_BYTES = netlink.HEADER.size
TCP_FIELDS = ("lost", "rtt", "total_retrans", "bytes_acked", "bytes_received", "min_rtt")
TCP_FIELDS += ("delivery_rate", "busy_time", "rwnd_limited", "sndbuf_limited", "delivered_ce")
KERNEL_FIELDS: tuple[tuple[str, struct.Struct, int, str], ...] = (
    # structure of the kernel, our layout, bytes before the structure in it, the kernel's fields
    ("ifreq", netdev._IFREQ, 0, "ifr_ifrn.ifrn_name ifr_ifru.ifru_data"),
    ("ethtool_sset_info", netdev._SSET_INFO, 0, "cmd reserved sset_mask data"),
    ("nlmsghdr", netlink.HEADER, 0, "nlmsg_len nlmsg_type nlmsg_flags nlmsg_seq nlmsg_pid"),
    ("nlmsghdr", netlink.HEAD, 0, "nlmsg_len nlmsg_type nlmsg_flags nlmsg_seq"),
    ("nlattr", netlink._ATTRIBUTE, 0, "nla_len nla_type"),
    (
        *("ifaddrmsg", netlink._IFADDRMSG, 0),
        "ifa_family ifa_prefixlen ifa_flags ifa_scope ifa_index",
    ),
    (
        *("inet_diag_req", netlink._LIST_REQUEST, 0),
        "idiag_family idiag_src_len idiag_dst_len idiag_ext id idiag_states idiag_dbs",
    ),
    (
        *("inet_diag_req_v2", netlink._SINGLE_REQUEST, 0),
        "sdiag_family sdiag_protocol idiag_ext pad idiag_states id",
    ),
    ("inet_diag_msg", netlink._ENTRY, HEADER_BYTES, "idiag_family id"),
    ("inet_diag_msg", netlink._INODE, HEADER_BYTES, "idiag_inode"),
    (*("inet_diag_msg", netlink._MESSAGE, HEADER_BYTES), "idiag_state idiag_rqueue idiag_wqueue"),
    ("tcp_info", netlink._COMPLETE_STRUCT, 0, " ".join(f"tcpi_{name}" for name in TCP_FIELDS)),
    *(
        ("tcp_info", form, 0, f"tcpi_{name}")
        for form, name in zip(netlink._PARTS, TCP_FIELDS, strict=True)
    ),
)
KERNEL_NUMBERS = {
    "sizeof(struct ifreq)": netdev._IFREQ.size,
    "offsetof(struct ethtool_gstrings, data)": 12,
    "offsetof(struct ethtool_stats, n_stats)": 4,
    "offsetof(struct ethtool_stats, data)": 8,
    "sizeof(struct nlmsghdr)": netlink.HEADER.size,
    "sizeof(struct nlattr)": netlink._ATTRIBUTE.size,
    "sizeof(struct ifaddrmsg)": netlink._IFADDRMSG.size,
    "sizeof(struct inet_diag_req)": netlink._LIST_REQUEST.size,
    "sizeof(struct inet_diag_req_v2)": netlink._SINGLE_REQUEST.size,
    "sizeof(struct inet_diag_msg)": netlink._MESSAGE_END - HEADER_BYTES,
    "sizeof(struct inet_diag_sockid)": 48,
    "offsetof(struct inet_diag_hostcond, port)": 4,
    "offsetof(struct inet_diag_hostcond, addr)": netlink._HOST.size,
    "SIOCETHTOOL": netdev._SIOCETHTOOL,
    "ETHTOOL_GSTRINGS": netdev._GSTRINGS,
    "ETHTOOL_GSTATS": netdev._GSTATS,
    "ETHTOOL_GSSET_INFO": netdev._GSSET_INFO,
    "ETH_SS_STATS": netdev._STATS,
    "ETH_GSTRING_LEN": netdev._NAME_BYTES,
    "RTM_GETADDR": netlink._GET_ADDRESS,
    "RTM_NEWADDR": netlink._NEW_ADDRESS,
    "TCPDIAG_GETSOCK": netlink._TCPDIAG_GETSOCK,
    "SOCK_DIAG_BY_FAMILY": netlink._BY_FAMILY,
    "INET_DIAG_INFO": netlink._INFO,
    "INET_DIAG_BC_JMP": netlink._JUMP,
    "INET_DIAG_BC_S_COND": netlink._SOURCE_IS,
    "IN_MOVED_TO": files._MOVED_TO,
    "IN_ONLYDIR": files._ONLY_FOLDERS,
    "FALLOC_FL_KEEP_SIZE": nccl._KEEP_SIZE,
    "FALLOC_FL_PUNCH_HOLE": nccl._PUNCH_HOLE,
    "PR_SET_PDEATHSIG": vendor_tools._PR_SET_PDEATHSIG,
}
NEW_KERNEL_NUMBERS = {  # of headers of Linux 6.15 and newer
    "PIDFD_GET_INFO": registry._PIDFD_GET_INFO,
    "PIDFD_INFO_EXIT": registry._PIDFD_INFO_EXIT,
    "PIDFD_INFO_SIZE_VER0": registry._PIDFD_INFO.size,
    "offsetof(struct pidfd_info, exit_code)": 60,
}
HEADERS = "ethtool falloc if inet_diag inotify netlink pidfd prctl rtnetlink sock_diag sockios tcp"


def find_offset(form: struct.Struct, index: int) -> int:
    """Return the offset of one value: the first byte that changes with it."""
    zeros = form.unpack(bytes(form.size))
    changed = list(zeros)
    changed[index] = b"\1" if isinstance(zeros[index], bytes) else 1
    return next(at for at, byte in enumerate(form.pack(*changed)) if byte)


def check_with_compiler(numbers: Mapping[str, int], condition: str = "1") -> str:
    """Return what a C compiler finds wrong with these values; "" = nothing.

    `CC` may name a compiler for another machine, such as aarch64-linux-gnu-gcc.
    """
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if shutil.which(compiler[0]) is None:
        pytest.skip("needs a C compiler")
    lines = [f"#include <linux/{name}.h>" for name in HEADERS.split()]
    if subprocess.run(
        [*compiler, "-E", "-xc", "-"], input=lines[0], text=True, capture_output=True
    ).returncode:
        pytest.skip("needs the headers of the kernel")
    lines += ["#include <stddef.h>", f"#if {condition}"]
    lines += [f'_Static_assert({name} == {value}u, "");' for name, value in numbers.items()]
    lines.append("#endif")
    done = subprocess.run(
        [*compiler, "-fsyntax-only", "-xc", "-"],
        input="\n".join(lines) + "\n",
        text=True,
        capture_output=True,
    )
    return done.stderr


def test_the_structures_of_the_kernel_are_those_of_its_headers() -> None:
    offsets = {
        f"offsetof(struct {name}, {field})": find_offset(form, index) - before
        for name, form, before, fields in KERNEL_FIELDS
        for index, field in enumerate(fields.split())
    }
    assert offsets["offsetof(struct tcp_info, tcpi_delivered_ce)"] == 196
    assert check_with_compiler(offsets | KERNEL_NUMBERS) == ""


def test_the_structures_of_new_kernels_are_those_of_their_headers() -> None:
    assert check_with_compiler(NEW_KERNEL_NUMBERS, "defined PIDFD_INFO_EXIT") == ""


def test_a_wrong_offset_is_noticed() -> None:
    assert "assert" in check_with_compiler({"offsetof(struct tcp_info, tcpi_rtt)": 72})

"""`nvidia-smi -q -x`: a document per sweep; a log of them is one behind the other.

Documents may name a DTD, which is not read; one that declares an entity is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from xml.parsers import expat

from clusterprof.importers.base import CannotImportError, Source
from clusterprof.importers.nvidia_smi.names import CLOCK_REASONS, PROCESSES, THROTTLE, XML
from clusterprof.importers.nvidia_smi.readings import Devices, quantity
from clusterprof.importers.telemetry.gathered import Meaning
from clusterprof.importers.telemetry.times import LATEST_NS, time_ns

_END = b"</nvidia_smi_log>"
_ROOT = "nvidia_smi_log"
_DEPTH_AT_MOST = 32
_TEXT_AT_MOST = 512
_TAG_AT_MOST = 128
_DOCUMENT_BYTES_AT_MOST = 8 << 20
_FIELDS_AT_MOST = 8192
_MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]


def is_xml(head: bytes) -> bool:
    """Say whether a file begins with such a document."""
    return b"<nvidia_smi_log" in head[:4096]


def read_xml(source: Source, devices: Devices) -> None:
    """Read all documents. Raises CannotImportError for one that declares an entity."""
    account = devices.account
    for document in _documents(source):
        if devices.sweep or account.read["documents"]:
            devices.new_sweep()
        reader = _Document(devices)
        try:
            reader.parse(document)
        except (expat.ExpatError, ValueError, LookupError) as error:
            account.cut = account.cut or f"damaged or cut off within a document ({error})"
            continue
        account.read["documents"] += 1


def _documents(source: Source) -> Iterator[bytes]:
    """The bytes of one document after the other; of what holds no end 8 MiB at most."""
    rest = b""
    for block in source.blocks(1 << 20):
        *whole, rest = (rest + block).split(_END)
        for document in whole:
            yield document.strip() + _END
        if len(rest) > _DOCUMENT_BYTES_AT_MOST:
            break
    if rest.strip():
        yield rest.strip()


class _Document:
    """The fields of each GPU, by path."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self._path: list[str] = []
        self._text = ""
        self._gpu: dict[str, str] | None = None
        self._bus = ""
        self._when: tuple[int, bool] | None = None
        self._processes = 0

    def parse(self, document: bytes) -> None:
        parser = expat.ParserCreate()
        parser.SetParamEntityParsing(expat.XML_PARAM_ENTITY_PARSING_NEVER)
        parser.EntityDeclHandler = _refuse
        parser.StartElementHandler = self._begin
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._characters
        parser.Parse(document, True)

    def _begin(self, tag: str, attributes: dict[str, str]) -> None:
        if len(self._path) >= _DEPTH_AT_MOST:
            raise ValueError("nested too deep")
        if len(tag) > _TAG_AT_MOST:
            raise ValueError("a tag of a length that none has")
        self._path.append(tag)
        self._text = ""
        if self._path == [_ROOT, "gpu"]:
            self._gpu, self._bus, self._processes = {}, attributes.get("id", ""), 0

    def _characters(self, text: str) -> None:
        if len(self._text) < _TEXT_AT_MOST:
            self._text += text

    def _end(self, tag: str) -> None:
        path, text = self._path, self._text.strip()
        if path == [_ROOT, "timestamp"]:
            self._when = _stamp(text)
        elif path == [_ROOT, "gpu"]:
            self._device()
        elif self._gpu is not None:
            self._processes += path[2:] == ["processes", "process_info"]
            if text and len(self._gpu) < _FIELDS_AT_MOST:
                self._gpu["/".join(path[2:])] = text
        path.pop()
        self._text = ""

    def _device(self) -> None:
        fields, self._gpu = self._gpu or {}, None
        if self._when is None and self._devices.sweep:
            self._devices.account.skipped["GPUs of documents without a time, but the first"] += 1
            return
        values: dict[Meaning, float] = {
            meaning: quantity(fields[path]) for path, meaning in XML.items() if path in fields
        }
        reasons = [path for path in CLOCK_REASONS if path in fields]
        if reasons:
            active = (CLOCK_REASONS[path] for path in reasons if fields[path] == "Active")
            values[THROTTLE] = float(sum(active))
        if "processes" in fields or self._processes:
            values[PROCESSES] = float(self._processes)
        t_ns, zoned = self._when or (0, False)
        uuid = fields.get("uuid", "")
        self._devices.row(
            uuid or self._bus or "gpu0", t_ns, values, zoned,
            name=fields.get("product_name", ""), uuid=uuid, pci_address=self._bus,
        )  # fmt: skip


def _refuse(*_: object) -> None:
    raise CannotImportError("the document declares an entity, which nvidia-smi never does", "")


def _stamp(text: str) -> tuple[int, bool] | None:
    """`Fri Aug  4 11:44:30 2023`, in a zone that nobody names."""
    words = text.split()
    if len(words) != 5 or words[1] not in _MONTHS or not words[2].isdecimal():
        return None
    month = _MONTHS.index(words[1]) + 1
    said = time_ns(f"{words[4]}-{month:02}-{int(words[2]):02}T{words[3]}")
    return said if said is not None and said[0] < LATEST_NS else None

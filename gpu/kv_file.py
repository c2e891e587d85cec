"""One block of keys and values as a file: a plain header and raw bytes, under a digest of both. Nothing that is read is
believed before it is checked. Thread: any.
"""

import hashlib
import json
import os
import stat
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from core.config import BLOCK_SIZE

SUFFIX = ".kv"
MAGIC = b"steploop kv 1\n"  # another format, another number
DIGEST_BYTES = 32  # SHA-256
LENGTH = struct.Struct("<I")  # of the header
MAX_HEADER_BYTES = 64 * 1024


class BadFile(Exception):
    """Not a whole file of this model's."""


@dataclass(frozen=True, slots=True)
class Header:
    """
    Args:
        name: of the file itself, without its suffix.
        parent: the name of the block before it; None: the first of its chain, which has a domain.
        content: its token ids, as in a BlockKey, in hexadecimal digits.
    """

    fingerprint: str
    name: str
    parent: str | None
    domain: tuple[str, str] | None
    content: str


def encode(header: Header, content: bytes) -> bytes:
    """The whole file, its digest last."""
    raw = encode_header(header) + content
    return raw + hashlib.sha256(raw).digest()


def encode_header(header: Header) -> bytes:
    """All that comes before the content."""
    head = json.dumps(asdict(header)).encode()
    return MAGIC + LENGTH.pack(len(head)) + head


def read_header(file: Path) -> tuple[Header, int]:
    """What a file says of itself, which its digest is yet to bear out, and when it was last used, in ns.

    Raises:
        OSError: it cannot be read.
        BadFile: it is no regular file, its header cannot be one, or it names another file.
    """
    with _open_regular(file) as reader:
        header = _decode_header(reader.read(len(MAGIC) + LENGTH.size + MAX_HEADER_BYTES))[0]
        used_ns = os.fstat(reader.fileno()).st_mtime_ns
    if f"{header.name}{SUFFIX}" != file.name:
        raise BadFile("it has another name than it claims")
    return header, used_ns


def read_content(file: Path, header: Header, block_bytes: int) -> bytes:
    """The keys and values behind a header that was read before.

    Raises:
        OSError: it cannot be read.
        BadFile: it is not whole, or not what its header has said before.
    """
    with _open_regular(file) as reader:
        raw = reader.read(len(MAGIC) + LENGTH.size + MAX_HEADER_BYTES + block_bytes + DIGEST_BYTES + 1)
    if hashlib.sha256(raw[:-DIGEST_BYTES]).digest() != raw[-DIGEST_BYTES:]:
        raise BadFile("its content has another digest than it claims")
    found, end = _decode_header(raw)
    content = raw[end:-DIGEST_BYTES]
    if found != header or len(content) != block_bytes:
        raise BadFile("it is not of this size, or has changed meanwhile")
    return content


def _open_regular(file: Path) -> BinaryIO:
    """
    Raises:
        OSError: it cannot be read.
        BadFile: it is a directory, a pipe or a device, which may block, or never end.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BadFile("it is not a regular file")
    return open(descriptor, "rb")


def _decode_header(raw: bytes) -> tuple[Header, int]:
    """The header that a file begins with, and where it ends.

    Raises:
        BadFile: there is none, or it says nothing that could be.
    """
    start = len(MAGIC) + LENGTH.size
    if not raw.startswith(MAGIC) or len(raw) < start:
        raise BadFile("it is of another format")
    end = start + LENGTH.unpack_from(raw, len(MAGIC))[0]
    try:
        header = _checked(json.loads(raw[start:end]))
    except (TypeError, ValueError, RecursionError) as error:
        raise BadFile("its header cannot be read") from error
    return header, end


def _checked(found: object) -> Header:
    """
    Raises:
        TypeError, ValueError: it is no header.
    """
    match found:
        case {
            "fingerprint": str(model),
            "name": str(name),
            "parent": parent,
            "domain": domain,
            "content": str(content),
            **more,
        } if not more:
            tokens = bytes.fromhex(content)
        case _:
            raise TypeError("a field is missing, too many, or of another type")
    match parent, domain:
        case None, [str(tenant), str(salt)]:
            header = Header(model, name, None, (tenant, salt), content)
        case str(), None:
            header = Header(model, name, parent, None, content)
        case _:
            raise TypeError("it begins a chain and goes on from another block, or neither")
    if len(tokens) != 4 * BLOCK_SIZE:
        raise ValueError("not the tokens of a block")
    return header

"""What RFC 7541 demands of a server's header compression, as a table. Section numbers are its own."""

import hpack
from h2.errors import ErrorCodes

from server.wire.http2_frames import HEADERS
from tests.server.http2_cases.case import Case, answers, case, ends, resets
from tests.server.raw_http2 import (
    TABLE_SIZE,
    Frame,
    Seen,
    block,
    get,
    headers,
    indexed,
    integer,
    literal,
    settings,
    table_size,
    text,
)

COMPRESSION = ErrorCodes.COMPRESSION_ERROR  # RFC 9113 §4.3: for all that cannot be decoded
FIRST_DYNAMIC = 62  # §2.3.3
TABLE_BYTES = 4096
OVERHEAD = 32  # §4.1
INDEXING = 0x40
HUFFMAN = 0x80
CONTENT_LENGTH_NEVER_INDEXED = integer(28, 4, 0x10)

# §A: :method GET, :scheme http, :path /, :authority by name
STATIC = indexed(2) + indexed(6) + indexed(4) + b"\x41" + text(b"a")


def request(*parts: bytes, stream: int = 1) -> Frame:
    """A request with these bytes at the end of its header block."""
    return headers(block() + b"".join(parts), stream=stream)


def broken(section: str, name: str, *parts: bytes) -> Case:
    """What stands behind a right header block cannot be decoded."""
    return case(section, name, request(*parts), ends(COMPRESSION))


def entry(size: int) -> bytes:
    """A field that takes so much of the dynamic table."""
    return literal(b"x", b"y" * (size - OVERHEAD - 1), INDEXING)


def huffman(octets: bytes) -> bytes:
    """A field whose value is these octets, said to be Huffman-coded."""
    return b"\x10" + text(b"x") + integer(len(octets), 7, HUFFMAN) + octets


def response_block(seen: Seen, stream: int) -> bytes:
    (frame,) = seen.of(HEADERS, stream)
    return frame.content


def needs_no_table(seen: Seen, stream: int) -> bool:
    """The stream's response can be decoded without a dynamic table."""
    decoder = hpack.Decoder()
    decoder.header_table_size = 0
    return bool(decoder.decode(response_block(seen, stream)))


TABLES = (
    case("2.1", "fields keep their order", headers(block((b"cookie", b"b=2"), (b"cookie", b"a=1"))), answers()),
    case("2.3.1", "static table", headers(STATIC), answers()),
    case(
        "2.3.2",
        "dynamic table, last in first",
        request(indexed(FIRST_DYNAMIC), indexed(FIRST_DYNAMIC + 1), stream=3),
        answers(stream=3),
        (request(literal(b"x", b"1", INDEXING), literal(b"y", b"2", INDEXING)),),
    ),
    broken("2.3.3", "index past an empty dynamic table", indexed(FIRST_DYNAMIC)),
    broken("2.3.3", "name's index past an empty dynamic table", integer(FIRST_DYNAMIC, 6, INDEXING) + text(b"1")),
    broken("2.3.3", "name's index past it, not indexed", integer(FIRST_DYNAMIC, 4) + text(b"1")),
    broken("2.3.3", "name's index past it, never indexed", integer(FIRST_DYNAMIC, 4, 0x10) + text(b"1")),
    broken("2.3.3", "index past one entry", literal(b"x", b"1", INDEXING), indexed(FIRST_DYNAMIC + 1)),
    broken("2.3.3", "index of 2^28", indexed(2**28)),
    case(
        "4.1",
        "entry as large as the table",
        request(indexed(FIRST_DYNAMIC), stream=3),
        answers(stream=3),
        (request(entry(TABLE_BYTES)),),
    ),
    case(
        "4.4",
        "entry one larger than the table empties it",
        request(indexed(FIRST_DYNAMIC), stream=3),
        ends(COMPRESSION),
        (request(literal(b"x", b"1", INDEXING), entry(TABLE_BYTES + 1)),),
    ),
    case(
        "4.4",
        "entries are evicted for another",
        request(indexed(FIRST_DYNAMIC + 1), stream=3),
        ends(COMPRESSION),
        (request(entry(2048), entry(2049)),),
    ),
    case(
        "4.4",
        "entries that fit are kept",
        request(indexed(FIRST_DYNAMIC + 1), stream=3),
        answers(stream=3),
        (request(entry(2048), entry(2048)),),
    ),
)

SIZES = (
    case("4.2", "size update", headers(table_size(100) + block()), answers()),
    case("4.2", "size update to 0", headers(table_size(0) + block()), answers()),
    case("4.2", "size update to what SETTINGS allow", headers(table_size(TABLE_BYTES) + block()), answers()),
    case("4.2", "size update past that", headers(table_size(TABLE_BYTES + 1) + block()), ends(COMPRESSION)),
    case("4.2", "two size updates", headers(table_size(0) + table_size(TABLE_BYTES) + block()), answers()),
    case(
        "4.2",
        "three size updates",
        headers(table_size(0) + table_size(100) + table_size(TABLE_BYTES) + block()),
        ends(COMPRESSION),
    ),
    case("4.2", "three size updates, long", headers(table_size(4000) * 3 + block()), ends(COMPRESSION)),
    case("6.3", "second size update past the limit", headers(table_size(0) + table_size(5000)), ends(COMPRESSION)),
    case("6.3", "size update of 2^28", headers(table_size(2**28) + block()), ends(COMPRESSION)),
    broken("4.2", "size update at the end of a block", table_size(100)),
    case("4.2", "size update within a block", headers(indexed(2) + table_size(1) + block()), ends(COMPRESSION)),
    case("4.2", "size update alone", headers(table_size(100)), resets(ErrorCodes.PROTOCOL_ERROR)),
    case(
        "4.3",
        "size update evicts",
        headers(table_size(33) + block() + indexed(FIRST_DYNAMIC), stream=3),
        ends(COMPRESSION),
        (request(literal(b"x", b"1", INDEXING)),),
    ),
    case(
        "4.3",
        "size update keeps what fits",
        headers(table_size(34) + block() + indexed(FIRST_DYNAMIC), stream=3),
        answers(stream=3),
        (request(literal(b"x", b"1", INDEXING)),),
    ),
    case(
        "4.3",
        "size update to 0 and back evicts",
        headers(table_size(0) + table_size(TABLE_BYTES) + block() + indexed(FIRST_DYNAMIC), stream=3),
        ends(COMPRESSION),
        (request(literal(b"x", b"1", INDEXING)),),
    ),
    case(
        "4.2",
        "we signal the size that SETTINGS ask for",
        (settings((TABLE_SIZE, 0)), get(stream=3)),
        answers(stream=3),
        (get(),),
        lambda seen: response_block(seen, 3).startswith(table_size(0)),
    ),
    case(
        "4.2",
        "we signal the smallest size and the last",
        (settings((TABLE_SIZE, 100)), settings((TABLE_SIZE, 0)), settings((TABLE_SIZE, 200)), get(stream=3)),
        answers(stream=3),
        (get(),),
        lambda seen: response_block(seen, 3).startswith(table_size(0) + table_size(200)),
    ),
    case(
        "4.2",
        "we signal the smallest size and the last of one frame",
        (settings((TABLE_SIZE, 0), (TABLE_SIZE, 4096)), get(stream=3)),
        answers(stream=3),
        (get(),),
        lambda seen: response_block(seen, 3).startswith(table_size(0) + table_size(4096)),
    ),
    case(
        "4.2",
        "we use no entry that a size of 0 has evicted",
        (settings((TABLE_SIZE, 0)), get(stream=3), get(stream=5)),
        answers(stream=5),
        (get(),),
        lambda seen: needs_no_table(seen, 5),
    ),
)

INTEGERS = (
    case("5.1", "integer that fills its prefix", headers(STATIC + literal(b"x", b"y" * 126)), answers()),
    case("5.1", "integer one past its prefix", headers(STATIC + literal(b"x", b"y" * 127)), answers()),
    case(
        "5.1",
        "integer with needless octets",
        request(b"\x10" + text(b"x") + b"\x7f\x80\x80\x00" + b"y" * 127),
        answers(),
    ),
    broken("5.1", "integer past 32 bits", b"\xff\xff\xff\xff\xff\xff\x01"),
    broken("5.1", "integer of many octets", b"\x10\x7f" + b"\x80" * 20 + b"\x01"),
    broken("5.1", "integer that breaks off", b"\xff\x80"),
    broken("5.1", "integer that breaks off in its prefix", b"\x7f"),
    broken("5.2", "name longer than the block", b"\x10\x05abc"),
    broken("5.2", "value longer than the block", b"\x10\x01x\x05abc"),
    broken("5.2", "field without a value", b"\x10\x01x"),
    broken("5.2", "field without a name", b"\x10"),
    broken("5.2", "value of an indexed name that breaks off", b"\x41"),
)

STRINGS = (
    case("5.2", "Huffman", request(huffman(b"\xf1\xe3\xc2\xe5\xf2\x3a\x6b\xa0\xab\x90\xf4\xff")), answers()),  # §C.4.1
    case("5.2", "Huffman of nothing", request(huffman(b"")), answers()),
    case("5.2", "Huffman with padding of 7 bits", request(huffman(b"\x18\xc6\x31\xff")), answers()),
    case("5.2", "Huffman name", request(b"\x10\x88\x25\xa8\x49\xe9\x5b\xa9\x7d\x7f" + text(b"y")), answers()),
    broken("5.2", "Huffman with padding of 8 bits", huffman(b"\x18\xc6\x31\x8c\x63\xff")),
    broken("5.2", "Huffman with padding of zeros", huffman(b"\x18")),
    broken("5.2", "Huffman with the end-of-string symbol", huffman(b"\xff\xff\xff\xff")),
    broken("5.2", "Huffman with the symbol before its padding", huffman(b"\x1f\xff\xff\xff\xff")),
    broken("5.2", "Huffman name that is wrong", b"\x10\x81\x00\x01y"),
)

FORMS = (
    broken("6.1", "index 0", indexed(0)),
    case("6.2.1", "literal that is indexed", request(literal(b"x", b"1", INDEXING), indexed(FIRST_DYNAMIC)), answers()),
    case("6.2.1", "literal by name that is indexed", request(b"\x7a" + text(b"me"), indexed(62)), answers()),
    case("6.2.2", "literal that is not indexed", request(literal(b"x", b"1", 0x00)), answers()),
    broken("6.2.2", "literal that is not indexed has no index", literal(b"x", b"1", 0x00), indexed(FIRST_DYNAMIC)),
    broken("6.2.3", "literal that is never indexed has no index", literal(b"x", b"1", 0x10), indexed(FIRST_DYNAMIC)),
    case(
        "6.2.3",
        "what differs from answer to answer is never indexed",
        get(),
        answers(),
        check=lambda seen: CONTENT_LENGTH_NEVER_INDEXED in response_block(seen, 1),
    ),
)

CASES = (*TABLES, *SIZES, *INTEGERS, *STRINGS, *FORMS)

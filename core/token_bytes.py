"""The bytes of a vocabulary's tokens. Immutable but for what it remembers. Thread: any.

numpy is imported where it serves: command lines that load no model import this file.
"""

from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class TokenBytes(Sequence[bytes]):
    """The bytes of each id, end to end: 150,000 objects and their texts take 20 MiB.

    Args:
        lengths: of each id's.
    """

    def __init__(self, joined: bytes, lengths: Iterable[int]) -> None:
        self.joined = joined
        self.starts = array("I", accumulate(lengths, initial=0))  # and the last one's end
        self.known: list[bytes | None] = [None] * len(self)  # what tables have asked for: it is asked for again

    @classmethod
    def of(cls, token_bytes: Collection[bytes]) -> "TokenBytes":
        return token_bytes if isinstance(token_bytes, cls) else cls(b"".join(token_bytes), map(len, token_bytes))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, token_id: int) -> bytes:  # type: ignore[override]
        return self.joined[self.starts[token_id] : self.starts[token_id + 1]]

    def __iter__(self) -> Iterator[bytes]:
        return (self.joined[start:end] for start, end in pairwise(self.starts))

    @property
    def lengths(self) -> "npt.NDArray[np.int64]":
        """Of each id's."""
        import numpy as np

        starts = np.array(self.starts, np.int64)
        return starts[1:] - starts[:-1]

    def beginning_with(self, firsts: bytes) -> dict[int, bytes]:
        """Those that begin with one of these bytes, by id."""
        import numpy as np

        starts = np.array(self.starts[:-1], np.int64)[self.lengths > 0]
        found = np.isin(np.frombuffer(self.joined, np.uint8)[starts], [*firsts])
        ids = np.flatnonzero(self.lengths)[found].tolist()
        return {token_id: self[token_id] for token_id in ids}

    def containing(self, part: bytes) -> Iterator[int]:
        """The ids of those that have it in them."""
        place = self.joined.find(part)
        while place >= 0:
            token_id = self.at(place)
            end = self.starts[token_id + 1]
            if is_inside := place + len(part) <= end:
                yield token_id
            place = self.joined.find(part, end if is_inside else place + 1)

    def at(self, place: int) -> int:
        """The id that has this byte of them all."""
        return bisect_right(self.starts, place) - 1

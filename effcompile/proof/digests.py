"""Gradients by their hashes: for who only asks whether they are those of another day, none has to be kept."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter

from torch import Tensor

from effcompile.ir import content

_THREADS = 2  # hashing waits for no lock of Python's


class Digests(Mapping[str, Tensor | None]):
    """Hashes of tensors by name, taken as they are put; the tensors themselves are not there any more.

    Attributes:
        seconds: that waiting for hashes took, in all.
    """

    def __init__(self) -> None:
        self._of: dict[str, Future[bytes]] = {}
        self._threads = ThreadPoolExecutor(_THREADS, "effcompile-hash")  # they end with this
        self.seconds = 0.0

    def put(self, name: str, value: Tensor | None) -> None:
        """Hash a tensor that may be changed from here on; one of the same name is replaced."""
        began = perf_counter()
        self.put_kept(name, value)
        self._of[name].exception()
        self.seconds += perf_counter() - began

    def put_kept(self, name: str, value: Tensor | None) -> None:
        """Have a tensor hashed, beside others, that nobody changes."""
        self._of[name] = self._threads.submit(digest, value)

    def in_order(self) -> list[tuple[str, bytes]]:
        """Name and hash of each, by name.

        Raises:
            content.UNREADABLE: a tensor had no bytes to hash.
        """
        return [(name, self._of[name].result()) for name in sorted(self._of)]

    def __getitem__(self, name: str) -> Tensor | None:
        raise TypeError(f"of {name!r} nothing but its hash was kept")

    def __contains__(self, name: object) -> bool:
        return name in self._of

    def __iter__(self) -> Iterator[str]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)


def digest(part: object) -> bytes:
    """The hash of a part's content. Raises as `content.add`."""
    found = hashlib.sha256()
    content.add(found, part)
    return found.digest()


def digests(parts: Iterable[object]) -> list[bytes]:
    """The hash of each part, several at a time. Raises as `content.add`."""
    with ThreadPoolExecutor(_THREADS, "effcompile-hash") as threads:
        return list(threads.map(digest, parts))

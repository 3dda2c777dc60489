"""Merkle trees: one digest over the contents of shards in a fixed order, whichever process has read which of them.

A leaf is over the rows of a shard: of each its name, its label and the sha256 of its content. A node is over its two
children, a tree of n leaves is split at the largest power of two below n, and leaves and nodes begin with another byte,
so that neither can stand for the other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

LEAF, NODE = b"\x00", b"\x01"


class Leaf:
    """The digest of a shard, made row by row."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256(LEAF)

    def add(self, name: str, label: str, content: bytes) -> None:
        """Add a row: its name, its label, and the sha256 of its content."""
        for part in (name.encode(errors="surrogateescape"), label.encode(errors="surrogateescape"), content):
            self._hash.update(len(part).to_bytes(8, "little"))
            self._hash.update(part)

    def hexdigest(self) -> str:
        """Return the digest of the rows added so far."""
        return self._hash.hexdigest()


def root(leaves: Sequence[str]) -> str:
    """Return the root over leaves (hexadecimal), in order; no leaves have the root of an empty text.

    >>> root(["00" * 32]) == "00" * 32, root(["00" * 32, "11" * 32]) == root(["11" * 32, "00" * 32])
    (True, False)
    """
    peaks: list[tuple[int, bytes]] = []  # whole subtrees from left to right, with their heights
    for leaf in leaves:
        height, digest = 0, bytes.fromhex(leaf)
        while peaks and peaks[-1][0] == height:
            digest = _node(peaks.pop()[1], digest)
            height += 1
        peaks.append((height, digest))
    if not peaks:
        return hashlib.sha256(b"").hexdigest()
    whole = peaks.pop()[1]
    while peaks:
        whole = _node(peaks.pop()[1], whole)
    return whole.hex()


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(NODE + left + right).digest()

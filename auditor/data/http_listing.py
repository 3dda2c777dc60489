"""HTTP listings: files below a page of links, as nginx, Apache and Python's own server write them."""

from __future__ import annotations

import html
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from auditor.data.store import READERS, FarStore, Stored, mark_of
from auditor.errors import DataError

MOST_PAGES = 100_000
DEEPEST = 16
LARGEST_WITHOUT_PARTS = 2**30  # bytes of a file whose server sends nothing but all of it


class HttpStore(FarStore):
    """Files that a web server lists. Their sizes and marks are asked for one by one, by HEAD."""

    def __init__(self, address: str, spec: str) -> None:
        parts = urlsplit(address)
        if parts.username or parts.password:
            raise DataError(
                "data: an address with a password in it would be stored with what is made of the data; put name and "
                "password into ~/.netrc, or give the server's address without."
            )
        super().__init__(address, spec)
        self._sent: dict[str, bytes] = {}

    @property
    def lists_cheaply(self) -> bool:
        """Return False: each file is asked for."""
        return False

    def walk(self) -> Iterator[Stored]:
        """Yield the files of the listing and of those below it; links that lead elsewhere are not followed."""
        base = self.address + "/"
        pages, visited, files = [base], {base}, []
        while pages:
            page = pages.pop(0)
            ask = partial(self.system.ls, page, detail=False)
            links = self.patiently(ask, unquote(page[len(base) :]) or "the listing")
            for link in sorted({html.unescape(link) for link in links}):
                if not link.startswith(base) or "?" in link or "#" in link or "/../" in link or link in visited:
                    continue
                visited.add(link)
                if not link.endswith("/"):
                    files.append(link)
                elif link.count("/") - base.count("/") < DEEPEST:
                    pages.append(link)
            if len(visited) > MOST_PAGES * 100 or len(pages) > MOST_PAGES:
                raise DataError(f"data {self.spec}: its listing does not end; give a folder below it.")
        with ThreadPoolExecutor(READERS, thread_name_prefix="auditor-head") as pool:
            yield from pool.map(self.stat, sorted(unquote(link[len(base) :]) for link in files))

    def stat(self, name: str) -> Stored:
        """Return what is known of one file; a server that does not say its size sends it once."""
        path = self._path(name)
        entry: dict[str, Any] = self.patiently(lambda: self.system.info(path), name)
        size = entry.get("size")
        if size is None:
            size = len(self.patiently(lambda: self.system.cat_file(path), name))
        return Stored(name, int(size), mark_of(entry))

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return the bytes from start to stop; a file of a server without ranges is fetched once and kept."""
        if name in self._sent:
            return self._sent[name][start:stop]
        return super().read(name, start, stop)

    def taken_whole(self, name: str, content: bytes, start: int, stop: int) -> bytes:
        """Keep a file that came whole though a part was asked for."""
        if len(content) > LARGEST_WITHOUT_PARTS:
            raise DataError(
                f"data {self.spec}: {name} has {len(content) / 2**30:.1f} GB and its server sends no parts of it; use "
                "a server with ranges, as nginx, or copy the file here."
            )
        self._sent = {name: content}  # one at a time
        return content[start:stop]

    def _path(self, name: str) -> str:
        return f"{self.address}/{quote(name)}" if name else self.address

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_sent": {}}

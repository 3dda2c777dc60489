"""``--cluster``: where the parts of a command run, for all commands that have parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

CLUSTER = click.option(
    "--cluster",
    envvar="AUDITOR_CLUSTER",
    metavar="ADDRESS",
    help="Run on a Ray cluster: auto (that of RAY_ADDRESS or of this machine), local (a new one here), or "
    "ray://HOST:10001. Default: in this process.  [env: AUDITOR_CLUSTER]",
)


def say_workers(work: Mapping[str, Any]) -> None:
    """Print how fast the work went, in all and per worker, where there was any."""
    from auditor.commands.terminal import say

    if not work["images"]:
        return
    rate = work["images_per_second"]
    say(f"{work['images']} images in {work['seconds']:.0f} s ({rate:.1f} a second), {work['bytes_read']:,} bytes read")
    if len(work["workers"]) > 1:
        each = ", ".join(f"{name} {share['images']}" for name, share in work["workers"].items())
        lost = f"; lost: {', '.join(work['lost'])}" if work["lost"] else ""
        say(f"images by worker: {each}{lost}")

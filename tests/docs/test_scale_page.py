"""The page about scale has the numbers of the stored results."""

import json

from tests.benchmarks.scale_page import PAGE, RESULTS, page_with, tables


def test_numbers_are_those_of_the_stored_results():
    text, stored = PAGE.read_text(encoding="utf-8"), json.loads(RESULTS.read_text())
    assert text == page_with(text, stored), "run: python tests/benchmarks/scale_page.py"


def test_arithmetic():
    shards = {
        "open_seconds_per_million_images": 36.0, "source_bytes_per_image": 50, "tree_seconds_per_million_shards": 1.0,
    }  # fmt: skip
    reductions = [{"what": "a pass", "bytes_per_shard": 2000, "driver_s_per_shard": 0.1}]
    explain = [{"who": "1", "explain_all": 10.0}]
    stored = {
        "tables": [
            {"title": title, "rows": rows}
            for title, rows in (("shards", [shards]), ("reductions", reductions), ("explain", explain))
        ]
    }
    text = tables(stored)
    assert "| a pass | 2 kB | 100 ms |" in text
    assert "10.0 images per second each | 28 h |" in text  # 1e9 / 1000 / 10 s
    assert "| 10 h | 50 GB of names and places |" in text
    assert "a pass: take in 3.9 million shards, in the driver | 5 days | 7.81 GB |" in text

"""The decoder pool: pixels as in one process; bombs, deaths and stalls are a 4xx, and the next image is answered."""

import asyncio
import io
import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from auditor.service import json_bodies
from auditor.service.decoder_pool import DecoderPool
from auditor.service.image_decoding import decode_pixels
from auditor.service.problems import Problem
from auditor.service.settings import Settings
from auditor.subject.preprocessing import Preprocessing, from_pil
from tests.service.test_image_decoding import PIXELS, file_of

GREY = Preprocessing.of((1, 5, 7), None, None, "stretch")
COLOUR = Preprocessing.of((3, 9, 4), None, None, "crop")


def with_pool(story, **settings):
    """Run a story with a pool and stop the pool after it."""

    async def run():
        pool = DecoderPool(Settings(**settings))
        await pool.start()
        try:
            return await story(pool)
        finally:
            await pool.stop()
            assert all(decoder.process.returncode is not None for decoder in pool._all)

    return asyncio.run(run())


def bomb(side: int = 6320) -> bytes:
    """Return a file of a few bytes that decodes to side x side pixels."""
    with io.BytesIO() as stream:
        Image.new("RGB", (side, side)).save(stream, "WEBP", lossless=True, method=0)
        return stream.getvalue()


@pytest.mark.parametrize("pre", [GREY, COLOUR], ids=["grey", "colour"])
def test_pixels_are_those_of_one_process_in_the_order_of_the_files(pre):
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 256, (11 + i, 13, 3), dtype=np.uint8) for i in range(5)]
    files = [file_of(array) for array in arrays]

    async def story(pool):
        return await pool.pixels([*files[:2], b"no image", *files[2:]], pre)

    answers = with_pool(story)
    assert isinstance(answers.pop(2), Problem)
    for x, array in zip(answers, arrays, strict=True):
        torch.testing.assert_close(x, torch.from_numpy(from_pil(Image.fromarray(array), pre)), rtol=0, atol=0)


def test_the_event_loop_is_free_while_bombs_are_decoded():
    started = time.thread_time()
    decode_pixels(bomb(3000), (1, 5, 7), "stretch", 10**8)
    one_here = time.thread_time() - started

    async def story(pool):
        await pool.pixels([file_of(PIXELS)], GREY)
        started = time.thread_time()
        assert [x.shape for x in await pool.pixels([bomb(3000)] * 6, GREY)] == [(1, 5, 7)] * 6
        return time.thread_time() - started

    assert len(bomb(3000)) < 100
    assert with_pool(story) < one_here  # CPU time of this thread for all six, which no busy neighbour changes


@pytest.mark.parametrize(
    ("settings", "large", "code"),
    [
        ({"decode_memory_mb": 64}, file_of(np.zeros((6320, 6320), np.uint16), "PNG"), "too_much_memory"),
        ({"decode_timeout_s": 0.3}, bomb(), "decode_timeout"),
    ],
    ids=["memory", "time"],
)
def test_what_takes_too_much_is_a_413_and_the_pool_goes_on(settings, large, code):
    async def story(pool):
        first = await pool.pixels([file_of(PIXELS)] * 2, GREY)
        (problem,) = await pool.pixels([large], GREY)
        assert isinstance(problem, Problem)
        assert (problem.status, problem.code) == (413, code)
        after = [await pool.pixels([file_of(PIXELS)], GREY) for _ in range(4)]
        assert all(torch.equal(x, first[0]) for (x,) in after)

    with_pool(story, **settings)


def test_all_images_of_a_request_share_its_time():
    async def story(pool):
        await pool.pixels([file_of(PIXELS)] * 2, GREY)
        return await pool.pixels([bomb()] * 64, GREY)

    started = time.perf_counter()
    answers = with_pool(story, decode_timeout_s=1.0)
    assert {x.code for x in answers if isinstance(x, Problem)} == {"decode_timeout"}
    assert time.perf_counter() - started < 60  # 64 of them take minutes


def test_a_process_that_dies_while_it_decodes_is_a_400():
    async def story(pool):
        await pool.pixels([file_of(PIXELS)], GREY)
        (decoder,) = pool._all
        busy = asyncio.ensure_future(pool.pixels([bomb()], GREY))
        while pool._idle:
            await asyncio.sleep(0.001)
        os.kill(decoder.process.pid, signal.SIGKILL)
        ((problem,),) = await asyncio.gather(busy)
        assert (problem.status, problem.code) == (400, "bad_image")
        answers = await asyncio.gather(*(pool.pixels([file_of(PIXELS)], GREY) for _ in range(4)))
        assert all(isinstance(x, torch.Tensor) for (x,) in answers)

    with_pool(story, decoders=1)


def test_a_process_that_died_while_it_waited_harms_no_image():
    async def story(pool):
        await pool.pixels([file_of(PIXELS)], GREY)
        while len(pool._idle) < 2:
            await asyncio.sleep(0.01)
        for decoder in pool._all:
            os.kill(decoder.process.pid, signal.SIGKILL)
            decoder.process.wait()
        (x,) = await pool.pixels([file_of(PIXELS)], GREY)
        assert isinstance(x, torch.Tensor)

    with_pool(story)


def test_a_caller_who_goes_leaves_nothing_on_the_line():
    async def story(pool):
        await pool.pixels([file_of(PIXELS)], GREY)
        gone = asyncio.ensure_future(pool.pixels([bomb()], GREY))
        await asyncio.sleep(0.05)
        gone.cancel()
        waiting = [asyncio.ensure_future(pool.pixels([file_of(PIXELS)], GREY)) for _ in range(3)]
        waiting[1].cancel()
        answers = [await waiting[i] for i in (0, 2)]
        assert all(isinstance(x, torch.Tensor) for (x,) in answers)

    with_pool(story, decoders=1)


def test_one_request_leaves_a_process_to_the_others():
    async def story(pool):
        await pool.pixels([file_of(PIXELS)], GREY)
        large = asyncio.ensure_future(pool.pixels([bomb()] * 3, GREY))
        await asyncio.sleep(0.05)
        await pool.pixels([file_of(PIXELS)], GREY)
        assert not large.done()
        large.cancel()

    with_pool(story, decoders=2)


def test_more_than_may_wait_are_sent_away():
    async def story(pool):
        pool._idle.clear()  # nobody works: the processes are still starting
        waiting = [asyncio.ensure_future(pool._take()) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Problem) as caught:
            await pool._take()
        assert caught.value.status == 429
        for task in waiting:
            task.cancel()

    with_pool(story, queue=3)


def test_large_json_reads_as_small_json_does():
    numbers = np.random.default_rng(0).random((40, 50, 3)).round(3)
    body = json.dumps({"instances": [numbers.tolist(), {"b64": "aGk=", "seed": 4}], "parameters": {"seed": 1}}).encode()

    async def story(pool):
        return await pool.split_body(body, "instances")

    rest, parts = with_pool(story)
    expected, plain = json_bodies.split_body(body, "instances")
    assert rest == expected
    assert [(part.file, part.options) for part in parts] == [(part.file, part.options) for part in plain]
    np.testing.assert_array_equal(parts[0].numbers, plain[0].numbers)


def test_json_that_grows_beyond_the_memory_is_a_413():
    async def story(pool):
        with pytest.raises(Problem) as caught:
            await pool.split_body(b'{"instances": [[' + b"[0]," * 2_000_000 + b"[0]]]}", "instances")
        assert (caught.value.status, caught.value.code) == (413, "too_much_memory")
        with pytest.raises(Problem) as caught:
            await pool.split_body(b"{", "image")
        assert caught.value.status == 400

    with_pool(story, decode_memory_mb=64)


def test_the_process_knows_no_secret(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "a-secret")
    monkeypatch.setenv("AUDITOR_API_KEYS", "/keys")

    async def story(pool):
        await pool.pixels([file_of(PIXELS)], GREY)
        return [Path(f"/proc/{decoder.process.pid}/environ").read_bytes() for decoder in pool._all]

    for environment in with_pool(story):
        assert b"a-secret" not in environment
        assert b"AUDITOR" not in environment

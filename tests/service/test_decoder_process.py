"""The decoder process, one message at a time: what it answers, and what it gives up before it begins."""

import json
import socket
import subprocess
import sys
import threading

import numpy as np

from auditor.service.decoder_process import LENGTHS, answer, packed, serve
from auditor.service.json_bodies import MAX_REST
from tests.service.test_image_decoding import PIXELS, file_of

DECODE = {"do": "decode", "shape": [1, 5, 7], "resize": "stretch", "max_pixels": 35}


def unpacked(message: bytes):
    n_head, n_payload = LENGTHS.unpack(message[: LENGTHS.size])
    head, payload = message[LENGTHS.size :][:n_head], message[LENGTHS.size + n_head :]
    assert len(payload) == n_payload
    return json.loads(head), payload


def test_a_file_is_answered_with_its_pixels_and_a_bad_one_with_its_problem():
    header, payload = unpacked(answer(DECODE, file_of(PIXELS)))
    assert header == {"shape": [5, 7]}
    assert payload == PIXELS.tobytes()
    header, payload = unpacked(answer({**DECODE, "max_pixels": 34}, file_of(PIXELS)))
    assert header["problem"][0] == 413
    assert "7 x 5 pixels" in header["problem"][1]
    assert not payload


def test_json_is_answered_with_its_images_apart():
    body = {"instances": ["aGk=", [[0.5, 1.0]]], "parameters": {"seed": 1}}
    header, payload = unpacked(answer({"do": "json", "images": "instances"}, json.dumps(body).encode()))
    assert header["rest"] == {"instances": ["given", "given"], "parameters": {"seed": 1}}
    assert [part["bytes"] for part in header["parts"]] == [2, 8]
    assert payload == b"hi" + np.array([[0.5, 1]], np.float32).tobytes()


def test_what_is_large_beside_the_images_is_refused():
    body = json.dumps({"image": "aGk=", "explainers": ["x" * 60] * (MAX_REST // 60)}).encode()
    header, _ = unpacked(answer({"do": "json", "images": "image"}, body))
    assert header["problem"][0] == 422


def test_it_answers_until_the_line_ends():
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=_serve_quietly, args=(theirs,))
    thread.start()
    with ours:
        reader = ours.makefile("rb")
        for message in (b"", packed(DECODE, file_of(PIXELS)), packed(DECODE, b"no image")):
            ours.sendall(message)
            n_head, n_payload = LENGTHS.unpack(reader.read(LENGTHS.size))
            assert len(reader.read(n_head + n_payload)) == n_head + n_payload
        reader.close()
    thread.join(60)
    assert not thread.is_alive()


def _serve_quietly(line: socket.socket) -> None:
    with line:
        serve(line, 0)  # no alarm: this thread shares the process of the tests


def test_limits_hold_for_memory_files_and_core_dumps(tmp_path):
    code = f"""
import resource
from auditor.service.decoder_process import limit_process
limit_process(64 << 20)
try:
    bytearray(100 << 20)
except MemoryError:
    print("memory")
try:
    with open({str(tmp_path / "file")!r}, "wb", buffering=0) as file:
        import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        file.write(b"x")
except OSError:
    print("files")
print(resource.getrlimit(resource.RLIMIT_CORE)[0])
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["memory", "files", "0"]

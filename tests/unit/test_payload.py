"""The routes payload: what is written is read back, and anything else is refused."""

from __future__ import annotations

import json
import struct
import sys
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from moeref.replay import RouteError, Routes, join_turns, pad, read, routes, select_layers, to_tokens, write
from moeref.replay.payload import MAGIC
from tests.unit.routes import any_routes, random_routes


@given(made=any_routes(), zstd=st.booleans(), left=st.integers(0, 3))
def test_what_is_written_comes_back(made: Routes, zstd: bool, left: int) -> None:
    for one in (made, pad(made, left=left), to_tokens(made, made.tokens + 1, start=made.start)[0]):
        back = read(write(one, zstd=zstd))
        assert back.equals(one)
        assert back.idx_TLK.dtype == one.idx_TLK.dtype


def test_versions_come_back_row_by_row() -> None:
    later = random_routes(3, start=4)
    later.versions_T[:] = 8
    made = join_turns(random_routes(4), later)
    assert read(write(made)).versions_T.tolist() == [7] * 4 + [8] * 3


def test_rows_that_are_all_given_cost_their_indices_alone() -> None:
    made = random_routes(1000, layers=tuple(range(48)), experts=128, top_k=8)
    assert len(write(made)) < 1000 * 48 * 8 + 600
    assert not read(write(made)).idx_TLK.flags.writeable


@given(made=any_routes(least=1), at=st.integers(0, 10**6), bit=st.integers(0, 7), zstd=st.booleans())
def test_no_changed_bit_changes_routes(made: Routes, at: int, bit: int, zstd: bool) -> None:
    """A zstd frame has bits that its content does not depend on, such as some of its window's size."""
    content = bytearray(write(made, zstd=zstd))
    content[at % len(content)] ^= 1 << bit
    if not zstd:
        with pytest.raises(RouteError):
            read(bytes(content))
    else:
        with suppress(RouteError):
            assert read(bytes(content)).equals(made)


@given(made=any_routes(least=1), keep=st.integers(0, 10**6))
def test_no_cut_payload_is_read(made: Routes, keep: int) -> None:
    content = write(made)
    with pytest.raises(RouteError):
        read(content[: keep % len(content)])


@given(content=st.binary(max_size=200))
def test_garbage_is_refused_in_one_clear_error(content: bytes) -> None:
    with pytest.raises(RouteError):
        read(content)
    with pytest.raises(RouteError):
        read(MAGIC + content)


def _with_header(**changes: object) -> bytes:
    content = write(random_routes(2))
    (length,) = struct.unpack("<I", content[len(MAGIC) : len(MAGIC) + 4])
    begin = len(MAGIC) + 4
    header = json.loads(content[begin : begin + length]) | changes
    text = json.dumps(header).encode()
    body = content[begin + length + 8 :]
    checksum = struct.pack("<Q", xxhash.xxh3_64(text + body).intdigest())
    return MAGIC + struct.pack("<I", len(text)) + text + checksum + body


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokens": 10**12}, "bytes; the header says"),
        ({"tokens": -1}, "tokens is -1"),
        ({"tokens": True}, "tokens is True"),
        ({"dtype": "object"}, "dtype 'object'"),
        ({"experts": 2}, "expert"),
        ({"experts": 400}, "dtype 'uint8', but 400"),
        ({"layers": [0, 0, 1]}, "ascending"),
        ({"layers": ["a"]}, "numbers from 0"),
        ({"rows": "all"}, "rows 'all'"),
        ({"version": None}, "rows 'given' with version None"),
        ({"version": 2**40}, "32-bit"),
        ({"more": 1}, "expected"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_k": 12}, "top-k 12 of 11"),
        ({"tokens": 0, "top_k": 10**30}, "top_k is 1000000"),
        ({"tokens": 0, "start": 10**30}, "start is 1000000"),
        ({"tokens": 0, "layers": [10**30]}, "numbers from 0"),
        ({"tokens": 10**12, "layers": [], "bytes": 0}, "one or more"),
    ],
)
def test_a_header_that_lies_is_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(RouteError, match=says):
        read(_with_header(**changes))


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"tokens":' + b"9" * 5000 + b"}", b"\xff", b"[]"])
def test_a_header_that_no_parser_takes_is_refused(text: bytes) -> None:
    with pytest.raises(RouteError, match="header"):
        read(MAGIC + struct.pack("<I", len(text)) + text + bytes(8))


@pytest.mark.parametrize("payload", ["text", None, memoryview(b"abcdefgh")[::2]])
def test_what_is_not_bytes_is_refused(payload: Any) -> None:
    with pytest.raises(RouteError, match="is bytes, not"):
        read(payload)


def test_routes_of_no_layers_are_not_written() -> None:
    with pytest.raises(RouteError, match="no layers"):
        write(select_layers(random_routes(2), []))


def test_a_declared_size_over_the_limit_is_refused_before_it_is_read() -> None:
    content = write(random_routes(100))
    with pytest.raises(RouteError, match=r"100 are allowed"):
        read(content, limit=100)


def test_a_compressed_frame_longer_than_declared_is_refused() -> None:
    made = routes(np.zeros((5000, 1, 1), np.uint8), layers=[0], experts=1)
    content = write(made, zstd=True)
    assert len(content) < 1000
    shorter = content.replace(b'"tokens":5000', b'"tokens":4000').replace(b'"bytes":5000', b'"bytes":4000')
    with pytest.raises(RouteError, match="5000 bytes of routes, 4000 declared"):
        read(shorter)


def test_bytes_after_a_compressed_frame_are_refused() -> None:
    content = write(random_routes(40), zstd=True)
    read(content)
    for more in (b"\x00", content[-30:], zstandard.ZstdCompressor().compress(b"")):
        with pytest.raises(RouteError, match="not one zstd frame"):
            read(content + more)


def test_zstd_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    content = write(random_routes(4), zstd=True)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(RouteError, match=r"needs the package zstandard: pip install 'moeref\[zstd\]'"):
        read(content)
    with pytest.raises(RouteError, match="needs the package zstandard"):
        write(random_routes(4), zstd=True)


def test_an_expert_twice_is_not_read() -> None:
    made = random_routes(4)
    made.idx_TLK[2, 1] = 5
    content = write(made)
    with pytest.raises(RouteError, match=r"token 2, layer 2: expert 5 twice in \[5, 5, 5\]"):
        read(content)
    assert read(content, distinct=False).equals(made)


def test_holes_that_are_neither_0_nor_1_are_refused() -> None:
    made = routes([[[0, 1], [-1, -1]]], layers=[0, 1], experts=4)
    content = bytearray(write(made))
    assert content[-2:] == b"\x00\x01"
    content[-1] = 2
    text_end = content.index(b"}") + 1
    digest = xxhash.xxh3_64(content[len(MAGIC) + 4 : text_end] + content[text_end + 8 :]).intdigest()
    content[text_end : text_end + 8] = struct.pack("<Q", digest)
    with pytest.raises(RouteError, match="a hole of 2"):
        read(content)

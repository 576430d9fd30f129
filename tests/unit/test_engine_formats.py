"""The formats in which engines and frameworks send routes."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from moeref.replay import MISSING, RouteError, Spec, from_engine, write
from moeref.replay.routes import Routes
from tests.unit.routes import random_routes

MOE = (False, True, True, False, True)
WANT = random_routes(6, layers=(1, 2, 4), experts=11, top_k=3)
WANT_TWICE = replace(WANT, idx_TLK=np.ones_like(WANT.idx_TLK))
FULL = np.zeros((6, 5, 3), np.int32)
FULL[:, [1, 2, 4]] = WANT.idx_TLK


def npy(array: np.ndarray[Any, Any]) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def got(data: Any, **more: Any) -> Routes:
    spec = Spec(more.pop("moe_layers", MOE), more.pop("experts", 11), 3)
    return from_engine(data, spec, **{"version": 7, **more})


FORMATS = {
    "vLLM over HTTP: base64 of .npy": text(npy(FULL.astype(np.uint8))),
    "vLLM in the process": FULL.astype(np.uint8),
    "a tensor": torch.from_numpy(FULL).to(torch.int64),
    "SGLang: flat int32": text(FULL.astype("<i4").tobytes()),
    "ms-swift: data, shape, dtype": {"data": text(FULL.astype("<i2").tobytes()), "shape": [6, 5, 3], "dtype": "int16"},
    "torch's name of a type": {"data": text(FULL.astype("u1").tobytes()), "shape": (6, 5, 3), "dtype": "torch.uint8"},
    "NeMo-RL: nrlre1": "nrlre1:int32:6x5x3:" + text(FULL.tobytes()),
    "nested lists": FULL.tolist(),
    "layers and top-k in one axis": FULL.reshape(6, 15),
    ".npy bytes": npy(FULL.astype(np.int64)),
    "big-endian .npy": npy(FULL.astype(">i4")),
    "prime-rl: no dtype, bytes": {"data": FULL.astype("u1").tobytes(), "shape": [6, 5, 3]},
    "no dtype, two bytes a number": {"data": text(FULL.astype("<u2").tobytes()), "shape": [6, 5, 3]},
    "no dtype, four bytes a number": {"data": text(FULL.astype("<i4").tobytes()), "shape": [6, 5, 3], "start": 0},
    "flat text of one byte a number": text(FULL.astype("u1").tobytes()),
    "MoE layers alone": np.asarray(WANT.idx_TLK),
    "moeref's payload": write(WANT),
}


@pytest.mark.parametrize("form", FORMATS)
def test_every_form_gives_the_same_routes(form: str) -> None:
    assert got(FORMATS[form], tokens=6).equals(WANT)


def test_a_missing_row_among_dense_layers() -> None:
    data = FULL.copy()
    data[2] = -1
    found = got(data)
    assert found.kind_T.tolist() == [0, 0, MISSING, 0, 0, 0]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (None, "enable_return_routed_experts"),
        (3, "came as int"),
        ("?!", "not base64"),
        (text(b"abc"), "neither a .npy file nor flat"),
        (b"\x80\x04pickle", "neither a .npy file nor moeref's"),
        ({"data": "AAAA"}, "data, shape and dtype"),
        (
            {"data": "AAAA", "shape": [1, 1, 3], "dtype": "int8", "order": "F"},
            r"this one \['data', 'dtype', 'order', 'sha",
        ),
        ({"data": "AAAA", "shape": [True, 1, 3], "dtype": "int8"}, "shape of the routes"),
        ({"data": "AAAA", "shape": [1, 1, 3], "start": -1}, "start of the routes: -1"),
        ({"data": "AAAA", "shape": [1, 1, 3], "start": True}, "start of the routes: True"),
        ({"data": [1], "shape": [1, 1, 3]}, "base64 or bytes, not list"),
        ({"data": "AAAA", "shape": [2, 1, 3]}, "3 bytes of routes without dtype"),
        ({"data": "A" * 12, "shape": [1, 1, 3]}, "9 bytes of routes without dtype"),
        ("", r"empty routes \(''\); leave out a turn"),
        ([], r"empty routes \(\[\]\)"),
        (b"", "empty routes"),
        (torch.zeros(2, 3, 3, dtype=torch.bfloat16), "integers, not torch.bfloat16"),
        (
            torch.nested.nested_tensor([torch.zeros(2, 3, 3), torch.zeros(1, 3, 3)], layout=torch.jagged),
            "several samples",
        ),
        (torch.zeros(2, 3, 3, dtype=torch.bool), "not bool"),
        (text(np.full((2, 3, 3), 10, np.uint8).tobytes() + bytes(2)), "flat routes read as <i4 hold expert 168430090"),
        ({"data": "AAAA", "shape": [-1], "dtype": "int8"}, "shape of the routes"),
        ({"data": "AAAA", "shape": [1 << 40, 5, 3], "dtype": "int8"}, "3 bytes of routes, but"),
        ({"data": "AAAA", "shape": [1, 1, 3], "dtype": "object"}, "dtype 'object'"),
        ([[1], [2, 3]], "unequal length"),
        (FULL[:, :, :2], "top-2, the model's is 3"),
        (FULL[:, :4], "routes of 4 layers; the model has 5 decoder layers, of which 3 are MoE"),
        (FULL + 1, "layer 0 is dense but has routes"),
        (np.full((6, 3, 3), 255, np.uint8), "expert 255 is outside 0 to 10; was it cast"),
        (np.zeros((6, 3, 3), np.uint8), "expert 0 twice"),
        (np.zeros((1, 3, 3), object), "not object"),
        (npy(FULL)[:-10], "not a readable .npy"),
        (npy(np.zeros(1, object)), "not a readable .npy"),
        ("nrlre1:int32:" + "9" * 5000 + "x1x3:", "not base64"),
        ("nrlre1:int32:0x999999999999999x3:", "routes of 999999999999999 layers"),
        ({"data": "", "shape": [0, 10**30, 3], "dtype": "int8"}, "shape of the routes"),
        (npy(FULL[:0]).replace(b"(0, 5, 3)", b"(0,10**9)"), "not a readable .npy"),
        ([["a"]], "fit none"),
        ([[[None, 1, 2]] * 3], "not object"),
        ([[[0.0, 1.0, 2.0]] * 3], "not float64"),
        (np.zeros((2, 3, 3), bool), "not bool"),
        (write(WANT_TWICE), "expert 1 twice"),
    ],
)
def test_what_is_not_routes_is_refused(data: Any, says: str) -> None:
    with pytest.raises(RouteError, match=says):
        got(data)


def test_flat_data_that_fits_two_depths_needs_the_number_of_tokens() -> None:
    flat = np.tile(FULL.reshape(-1), 3)  # 18·5 rows and layers are also 30·3
    with pytest.raises(RouteError, match="fit 3 and 5 layers; say tokens="):
        got(flat)
    assert got(flat, tokens=18).tokens == 18
    with pytest.raises(RouteError, match="fit none"):
        got(flat, tokens=17)


def test_another_number_of_rows_than_expected_is_refused() -> None:
    with pytest.raises(RouteError, match="6 rows of routes, expected 7"):
        got(FULL, tokens=7)
    with pytest.raises(RouteError, match="6 rows of routes, expected 7"):
        got(write(WANT), tokens=7)


def test_a_type_too_narrow_for_the_experts_is_refused() -> None:
    with pytest.raises(RouteError, match="uint8, which does not hold 384 experts"):
        got(FULL.astype(np.uint8), experts=384)
    assert got(FULL.astype(np.int16), experts=384).idx_TLK.dtype == np.uint16


def test_a_header_that_declares_terabytes_is_refused() -> None:
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(out, {"descr": "|u1", "fortran_order": False, "shape": (10**12, 5, 3)})
    with pytest.raises(RouteError, match=r"\[1000000000000, 5, 3\] of uint8 declared, 0 bytes there"):
        got(out.getvalue())
    content = npy(FULL).replace(b"(6, 5, 3)", b"(9, 5, 3)")
    with pytest.raises(RouteError, match=r"\[9, 5, 3\] of int32 declared, 360 bytes there"):
        got(content)
    with pytest.raises(RouteError, match="over the limit"):
        got(text(npy(FULL)), limit=100)


def test_a_payload_of_another_model_is_refused() -> None:
    with pytest.raises(RouteError, match="the model has"):
        got(write(WANT), moe_layers=(True,) * 5)


def test_the_start_in_the_data_is_kept_and_another_is_refused() -> None:
    sent = {"data": text(FULL.astype("u1").tobytes()), "shape": [6, 5, 3], "dtype": "uint8", "start": 4}
    assert got(sent).start == 4
    assert got(sent, start=4, asked=2).start == 4
    assert got(FULL, asked=2).start == 2
    assert got(write(replace(WANT, start=3)), asked=2).start == 3
    with pytest.raises(RouteError, match="rows begin at token 4 by the data, at 0 by start="):
        got(sent, start=0)
    with pytest.raises(RouteError, match="rows begin at token 3 by the data, at 5 by start="):
        got(write(replace(WANT, start=3)), start=5)


def test_flat_text_whose_type_the_number_of_tokens_does_not_tell_is_refused() -> None:
    """Half of the layers are MoE: two bytes for these are one byte for all."""
    half = Spec((True, False), 11, 3)
    with pytest.raises(RouteError, match=r"12 bytes of flat routes fit numbers of \[1, 2\] bytes"):
        from_engine(text(bytes(12)), half, tokens=2)

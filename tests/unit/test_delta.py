"""Deltas: every bit arrives, and whatever is not a whole delta of the receiver's version is refused before a write."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeref import delta
from moeref.delta import Delta, DeltaError, File, Receiver, Sender, State, forms
from moeref.delta import encode as encoding
from moeref.delta.changes import Changes, between, find, joined, split
from moeref.delta.messages import FIELDS
from tests.unit import deltas
from tests.unit.deltas import Tensors, bits, changed, copy, messages, rewritten, same, versions

GOLDEN = Path(__file__).parents[1] / "golden" / "delta"
DTYPES = [torch.bfloat16, torch.float32, torch.float16, torch.float64, torch.float8_e4m3fn, torch.int8, torch.int64]


def applied(whole: list[bytes], base: Tensors) -> Tensors:
    """`base` after the delta."""
    held = copy(base)
    Receiver(1, held).apply(whole)
    return held


@pytest.mark.parametrize("zstd", [False, True])
@pytest.mark.parametrize("density", [0, 0.0001, 0.01, 0.05, 0.1, 0.3, 0.5, 0.9, 0.95, 0.99, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_density_and_dtype_arrives_bit_for_bit(dtype: torch.dtype, density: float, zstd: bool) -> None:
    base = {"w": deltas.random((70, 1013), dtype, 1)}
    new = {"w": changed(base["w"], density, 2)}
    assert same(applied(messages(base, new, zstd=zstd), base), new)


def test_nan_infinity_and_minus_zero_are_changes_like_others() -> None:
    """Patterns that compare as equal, or never as equal, are told apart by their bits alone."""
    patterns = torch.tensor([0, -(2**15), 0x7F80, -0x80, 0x7FC0, 0x7FC1, -0x40, 1], dtype=torch.int16)
    base = {"w": patterns.repeat_interleave(8).view(torch.bfloat16)}
    new = {"w": patterns.repeat(8).view(torch.bfloat16)}
    whole = messages(base, new)
    assert same(applied(whole, base), new)
    (span,) = _spans(whole)
    assert span["changed"] == 8 * 7
    assert len(messages(new, copy(new))) == 2  # NaN is not unequal to itself


@settings(deadline=None)
@given(
    mask=st.lists(st.booleans(), min_size=1, max_size=200).map(lambda some: np.array(some)),
    repeat=st.sampled_from([1, 7, 400]),
    apart=st.sampled_from([0, 1, 254, 255, 256, 511, 70_000]),
    width=st.sampled_from([1, 2, 4, 8]),
)
def test_every_form_gives_back_its_positions_and_values(mask: Any, repeat: int, apart: int, width: int) -> None:
    mask = np.concatenate([np.zeros(apart, bool), np.tile(mask, repeat), np.zeros(apart, bool), mask])
    count = int(mask.sum())
    if not count:
        return
    new = np.random.default_rng(0).integers(0, 60_000, mask.size).astype(f"i{width}")
    positions = find(mask, count)
    assert positions.tolist() == np.flatnonzero(mask).tolist()
    old = new.copy()
    old[mask] ^= 1
    changes = between(old, new)
    in_two = joined(new, [between(old[:apart], new[:apart]), between(old[apart:], new[apart:])])
    for one in (changes, in_two):
        assert (one.new.size, one.count) == (mask.size, count)
        assert one.values.tolist() == new[mask].tolist()
        assert (one.positions.tolist(), one.mask.tolist()) == (positions.tolist(), mask.tolist())
    sizes = [apart, mask.size - apart]
    for piece, part in zip(split(changes, sizes), np.split(mask, [apart]), strict=True):
        assert (piece.mask.tolist(), piece.count) == (part.tolist(), int(part.sum()))
        assert piece.values.tolist() == piece.new[part].tolist()
    for form in ("index", "gaps", "bitmask"):
        parts = [*forms._where(form, changes), forms._raw(new[mask])]
        found, values = forms.decode(form, parts, mask.size, new.dtype)
        assert found is not None
        assert found.tolist() == positions.tolist()
        assert values.tolist() == new[mask].tolist()
        bounds = forms.sizes(form, mask.size, width, count, False)
        assert all(low <= len(part) <= high for part, (low, high) in zip(parts, bounds, strict=True))


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_the_form_is_the_smallest_at_every_density(width: int) -> None:
    new = np.zeros(70_000, f"i{width}")
    for count in [1, *range(700, 70_001, 700)]:
        mask = np.arange(70_000) < count
        form, parts = forms.encode(Changes(new, flags=mask))
        sizes = {"full": new.nbytes}
        for other in ("index", "bitmask"):
            sizes[other] = sum(map(len, forms._where(other, Changes(new, flags=mask)))) + count * width
        assert sum(map(len, parts)) == min(sizes.values()) == sizes[form]


def test_forms_change_where_arithmetic_says() -> None:
    """bf16: index costs 4 bytes a change, a bitmask ⅛ byte an element and 2 a change, a full tensor 2 an element."""
    densities = {"a": 0.01, "b": 0.06, "c": 0.07, "d": 0.93, "e": 0.95, "f": 0.0}
    base, new = versions(densities)
    found = [s["form"] for s in _spans(messages(base, new))]
    assert found == ["index", "index", "bitmask", "bitmask", "full"]
    zstd = [s["form"] for s in _spans(messages(base, new, zstd=True))]
    assert (zstd[0], zstd[1], zstd[-1]) == ("gaps", "gaps", "bitmask")


def test_sizes_at_one_per_cent() -> None:
    base = {"w": torch.randn(1000, 3000, generator=torch.Generator().manual_seed(0)).bfloat16()}
    new = {"w": changed(base["w"], 0.01, 1)}
    fast, dense = (sum(map(len, messages(base, new, zstd=zstd))) for zstd in (False, True))
    assert base["w"].nbytes / fast >= 33
    assert base["w"].nbytes / dense >= 65


def _spans(whole: list[bytes]) -> list[dict[str, Any]]:
    reader = delta.Reader()
    return [span for message in whole for span in reader.open(message)[0].get("spans", [])]


# --- bounded memory, any iterators


@pytest.mark.parametrize("zstd", [False, True])
def test_any_bucket_size_gives_the_same_weights(zstd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    base, new = versions({"a": 0.01, "b": 1.0, "c": 0.3, "d": 0.0})
    whole = messages(base, new, zstd=zstd)
    monkeypatch.setattr(encoding, "SPAN", 1 << 14)
    monkeypatch.setattr(encoding, "SMALL", 0)
    for bucket in (1, 1000, 100_000):
        cut = messages(base, new, zstd=zstd, bucket=bucket)
        assert len(cut) > len(whole)
        # A message is a bucket and less than one more span, with descriptions of some 250 bytes a span.
        assert max(map(len, cut)) < bucket + 2 * (1 << 14) + 1000 + 250 * (1 + bucket // 64)
        assert same(applied(cut, base), new)


def test_both_sides_may_be_streams() -> None:
    base, new = versions({"a": 0.01, "b": 0.5})
    state = State.of(1, base.items())
    made = Delta(state, iter(base.items()), iter(new.items()), 2)
    with pytest.raises(DeltaError, match="iterate over all of it"):
        _ = made.state
    held = copy(base)
    assert Receiver(1, held).apply(iter(list(made))) == made.state == State.of(2, new.items())
    with pytest.raises(DeltaError, match="made once"):
        list(made)


@pytest.mark.parametrize("zstd", [False, True])
@pytest.mark.parametrize("bucket", [1, 20_000, 64 << 20])
def test_small_tensors_are_compared_together_and_come_out_as_if_each_alone(
    zstd: bool, bucket: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several dtypes and densities, with large ones between, from streams whose tensors all use the same memory."""
    sizes = [7, 40_000, 60_000, 1, 70_000, 300, 65_536]
    some = [(n, dtype, share) for share in (0.01, 0.0, 1.0, 0.4) for n in sizes for dtype in DTYPES[:3]]
    base = {f"w{i}": deltas.random((n,), dtype, i) for i, (n, dtype, _) in enumerate(some)}
    new = {f"w{i}": changed(base[f"w{i}"], share, i) for i, (*_, share) in enumerate(some)}

    def reused(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        memory = torch.empty(1 << 20, dtype=torch.uint8)
        for name, tensor in tensors.items():
            yield name, memory[: tensor.nbytes].view(tensor.dtype).copy_(tensor)

    state = State.of(1, base.items())
    together = list(Delta(state, reused(base), reused(new), 2, zstd=zstd, bucket=bucket))
    monkeypatch.setattr(encoding, "SMALL", -1)
    assert together == messages(base, new, zstd=zstd, bucket=bucket)
    assert same(applied(together, base), new)


def test_a_safetensors_folder_is_a_stream(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from moeref.bridge import Checkpoint

    base, new = versions({"a": 0.01, "b": 0.5})
    for name, tensors in (("old", base), ("new", new)):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    with Checkpoint(tmp_path / "old") as was, Checkpoint(tmp_path / "new") as now:
        whole = list(Delta(State.of(1, was.tensors()), was.tensors(), now.tensors(), 2))
    assert same(applied(whole, base), new)


@pytest.mark.parametrize(
    ("new", "says"),
    [
        ({"a": torch.ones(3)}, "1 tensors of the base are not in the stream, first b"),
        ({"a": torch.ones(3), "b": torch.ones(2), "c": torch.ones(1)}, "c is not in the base"),
        ({"a": torch.ones(3), "b": torch.ones(1, 2)}, r"b is float32 \[1, 2\], in version 1 float32 \[2\]"),
        ({"a": torch.ones(3), "b": torch.ones(2).half()}, r"b is float16 \[2\], in version 1 float32 \[2\]"),
    ],
)
def test_other_tensors_than_the_bases_are_refused(new: Tensors, says: str) -> None:
    base = {"a": torch.ones(3), "b": torch.ones(2)}
    with pytest.raises(DeltaError, match=says):
        messages(base, new)


def test_streams_in_other_orders_and_other_bases_are_refused() -> None:
    base, new = versions({"a": 0.01, "b": 0.5})
    state = State.of(1, base.items())
    with pytest.raises(DeltaError, match="a comes where the base has b: give both in one order, or base as a mapping"):
        list(Delta(state, reversed(base.items()), new.items(), 2))
    assert same(applied(list(Delta(state, base, reversed(new.items()), 2)), base), new)
    with pytest.raises(DeltaError, match="a: the base is not version 1: its bytes have another hash"):
        list(Delta(state, new, new.items(), 2))
    with pytest.raises(DeltaError, match="has to be an int later than its base, 1"):
        list(Delta(state, base, new.items(), 2.0))  # type: ignore[arg-type]
    with pytest.raises(DeltaError, match="has to be an int later than its base, 1"):
        Delta(state, base, new.items(), 1)
    with pytest.raises(DeltaError, match="a comes twice"):
        list(Delta(state, base, [*new.items(), ("a", new["a"])], 2))
    with pytest.raises(DeltaError, match="a comes twice"):
        State.of(1, [*base.items(), ("a", base["a"])])


# --- what a receiver refuses, and that it is left as it was


def refused(whole: Any, base: Tensors, says: str = "") -> None:
    """The delta is refused, and nothing was written."""
    held = copy(base)
    receiver = Receiver(1, held)
    with pytest.raises(DeltaError, match=says):
        receiver.apply(whole)
    assert same(held, base)
    assert receiver.state.version == 1


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "zstd"])
def made(request: pytest.FixtureRequest) -> tuple[Tensors, list[bytes]]:
    """A base, and a delta in several messages and all forms."""
    tiny = {name: tensor[:5, :131].contiguous() for name, tensor in versions({"a": 0, "b": 0, "c": 0})[0].items()}
    new = {name: changed(tiny[name], density, 3) for name, density in (("a", 0.03), ("b", 0.4), ("c", 1))}
    return tiny, messages(tiny, new, zstd=request.param, bucket=300)


def test_corrupted_deltas_are_refused(made: tuple[Tensors, list[bytes]]) -> None:
    """3,000 here, 100,000 in `nox -s bench`."""
    corrupt(*made, times=3000)


def corrupt(base: Tensors, whole: list[bytes], times: int) -> None:
    """Bits turned, runs overwritten, bytes lost or added, messages lost, doubled or exchanged: all refused."""
    rng, held = random.Random(0), copy(base)
    receiver = Receiver(1, held)
    for _ in range(times):
        broken = _broken(list(whole), rng)
        if broken != whole:
            with pytest.raises(DeltaError):
                receiver.apply(broken)
    assert same(held, base)
    receiver.apply(whole)


def _broken(whole: list[bytes], rng: random.Random) -> list[bytes]:
    at = rng.randrange(len(whole))
    message = bytearray(whole[at])
    place, length = rng.randrange(len(message)), rng.randrange(1, 20)
    match rng.randrange(8):
        case 0:
            message[place] ^= 1 << rng.randrange(8)
        case 1:
            message[place : place + length] = rng.randbytes(length)
        case 2:
            del message[place : place + length]
        case 3:
            message[place:place] = rng.randbytes(length)
        case 4:
            return whole[:at] + whole[at + 1 :]
        case 5:
            return [*whole[: at + 1], *whole[at:]]
        case 6:
            other = rng.randrange(len(whole))
            whole[at], whole[other] = whole[other], whole[at]
            return whole
        case 7:
            return whole[:at]
    whole[at] = bytes(message)
    return whole


def test_messages_of_another_delta_do_not_fit(made: tuple[Tensors, list[bytes]]) -> None:
    base, whole = made
    other = messages(base, {name: changed(tensor, 0.1, 7) for name, tensor in base.items()}, bucket=300)
    for number in range(min(len(whole), len(other))):
        if whole[number] != other[number]:
            refused([*whole[:number], other[number], *whole[number + 1 :]], base)


def test_cut_and_joined_files_are_refused(made: tuple[Tensors, list[bytes]], tmp_path: Path) -> None:
    base, whole = made
    path, content = tmp_path / "d", b"".join(whole)
    delta.save(path, whole)
    assert path.read_bytes() == content
    assert list(File(path)) == whole
    for end in range(0, len(content), 7):
        path.write_bytes(content[:end])
        refused(File(path), base)
    for more in (b"\0", content, content[:20], whole[-1]):
        path.write_bytes(content + more)
        refused(File(path), base)
    path.write_bytes(content)
    assert Receiver(1, copy(base)).apply(File(path)).version == 2


class Replaced:
    """Another delta from the second time on."""

    def __init__(self, *deltas: list[bytes]) -> None:
        self._deltas = list(deltas)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._deltas.pop(0) if len(self._deltas) > 1 else self._deltas[0])


def test_a_file_that_is_replaced_after_it_was_checked_is_not_written() -> None:
    base, new = versions({"a": 0.01, "b": 0.01})
    other = {name: changed(tensor, 0.02, 9) for name, tensor in base.items()}
    first, second = messages(base, new), messages(base, other)
    for instead in (second, first[:1], []):
        held = copy(base)
        receiver = Receiver(1, held)
        with pytest.raises(DeltaError, match="is not the delta that was checked"):
            receiver.apply(Replaced(first, instead), verify=False)
        assert same(held, base)
        receiver.apply(first)
        assert same(held, new)


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    def stream() -> Any:
        yield b"one"
        raise RuntimeError("the trainer died")

    with pytest.raises(RuntimeError):
        delta.save(tmp_path / "d", stream())
    assert list(tmp_path.iterdir()) == []


def test_another_base_is_refused() -> None:
    base, new = versions({"a": 0.01})
    whole = messages(base, new)
    refused(whole, {"a": new["a"]}, "the delta's base is version 1 .*, held is 1 ")
    held = copy(base)
    receiver = Receiver(7, held)
    with pytest.raises(DeltaError, match=r"base is version 1 \(.*\), held is 7"):
        receiver.apply(whole)
    assert same(held, base)


@pytest.mark.parametrize(
    ("held", "says"),
    [
        ({"b": torch.zeros(300, 700, dtype=torch.bfloat16)}, "a: the receiver has no such tensor"),
        ({"a": torch.zeros(700, 300, dtype=torch.bfloat16)}, r"a is bfloat16 \[300, 700\], .* \[700, 300\]"),
        ({"a": torch.zeros(300, 700, dtype=torch.float16)}, "a is bfloat16 .*, the receiver's is float16"),
    ],
)
def test_other_receivers_are_refused(held: Tensors, says: str) -> None:
    refused(messages(*versions({"a": 0.01})), held, says)


def test_a_tensor_without_elements_is_refused() -> None:
    with pytest.raises(DeltaError, match=r"w: .* has no elements to compare"):
        State.of(1, {"w": torch.empty(3, dtype=torch.complex128)}.items())


def test_a_tensor_that_cannot_be_written_in_place_is_refused() -> None:
    with pytest.raises(DeltaError, match="w is not contiguous"):
        Receiver(1, {"w": torch.zeros(4, 3).t()})


def _span(**changes: Any) -> deltas.Change:
    def change(number: int, fields: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        if number == 1:
            fields["spans"][0] |= changes
        return fields, body

    return change


def _fields(number: int, **changes: Any) -> deltas.Change:
    return lambda n, fields, body: (fields | changes if n == number else fields, body)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_fields(0, base=2), "base is version 2"),
        (_fields(0, format=2), "format 2; this reads 1"),
        (_fields(0, base_hash="0" * 32), "the delta's base is version 1"),
        (_fields(0, base_hash="x"), "32 hexadecimal digits"),
        (_fields(0, version=-1), "version=-1"),
        (_fields(0, version=True), "version=True"),
        (_fields(0, more=1), "expected kind, format, version"),
        (_fields(0, kind="end"), "a delta is a header, tensors and an end"),
        (_fields(1, kind="header"), "a delta is a header, tensors and an end"),
        (_fields(1, spans=[1]), "span has the fields 1"),
        (_fields(1, hashes={}), "a has changes but no hash"),
        (_fields(1, hashes={"a": "0" * 16, "b": "0" * 16}), "b has a hash but no changes"),
        (_fields(1, hashes={"a": "0" * 16}), "the end says"),
        (_fields(2, hash="0" * 32), "the end says 0000"),
        (_fields(2, messages=4), "3 messages, the end says 4"),
        (_span(name="b"), "b: the receiver has no such tensor"),
        (_span(shape=[700, 300]), r"a is bfloat16 \[700, 300\]"),
        (_span(shape=[-1]), "shape, bytes or form"),
        (_span(dtype="float16"), "a is float16"),
        (_span(start=1), "to 210001 of 210000 elements"),
        (_span(elements=210_001), "to 210001 of 210000 elements"),
        (_span(elements=1 << 40), "elements"),
        (_span(changed=0), "0 changes"),
        (_span(changed=2099), "a, from element 0: index of 2099 changes has parts"),
        (_span(form="bitmask"), "bitmask has 2 parts, not 3"),
        (_span(form="attic"), "form of a span"),
        (_span(bytes=[16, 4200, 4201]), "its bytes end at"),
        (_span(bytes=[16, 4200, 4199]), "belong to no span|parts of"),
        (lambda n, fields, body: None if n == 2 else (fields, body), "cut off after 2 messages"),
        (lambda n, fields, body: (fields, body + b"\0" if n == 1 else body), "1 bytes of a body belong to no span"),
        (lambda n, fields, body: (fields, body[:4] + body[:4] + body[8:] if n == 1 else body), "an index of"),
        (lambda n, fields, body: (fields, body[:18] + body[16:18] + body[20:] if n == 1 else body), "do not ascend"),
    ],
)
def test_what_an_encoder_does_not_write_is_refused_even_with_right_checksums(change: deltas.Change, says: str) -> None:
    base, new = versions({"a": 0.01})
    whole = messages(base, new)
    assert len(whole) == 3
    refused(rewritten(whole, change), base, says)
    assert same(applied(rewritten(whole, lambda n, fields, body: (fields, body)), base), new)


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize(
    ("at", "new", "says"),
    [
        (0, b"\x65\0\0\0", "an index of 1 blocks and 100 positions"),
        (2, b"\1\0", "an index of 1 blocks and 100 positions"),
        (4, b"\xff\xff", "do not ascend"),
        (202, b"\x10\x27", "index gives 100 positions for 100 changes of 10000 elements"),
    ],
)
def test_short_indices_are_refused_as_long_ones_are(which: int, at: int, new: bytes, says: str) -> None:
    """Each of three tensors of one block: they are checked together, and the error is of the right one."""
    base = {name: deltas.random((10_000,), torch.bfloat16, seed) for seed, name in enumerate("abc")}
    whole = messages(base, {name: changed(tensor, 0.01, 3) for name, tensor in base.items()})
    assert [span["bytes"] for span in _spans(whole)] == [[4, 200, 200]] * 3
    place = which * 404 + at

    def change(number: int, fields: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        return fields, body[:place] + new + body[place + len(new) :] if number == 1 else body

    refused(rewritten(whole, change), base, f"{'abc'[which]}, from element 0: .*{says}")


def test_short_indices_with_values_of_another_width_are_refused() -> None:
    base = {"a": torch.zeros(10_000)}
    whole = messages(base, {"a": changed(base["a"], 0.01, 3)})
    cut = rewritten(whole, lambda n, fields, body: (fields, body[:404] if n == 1 else body))
    refused(rewritten(cut, _span(bytes=[4, 200, 200])), base, "index of 100 changes has parts of")


def test_frames_of_zstd_are_measured_before_they_are_unpacked() -> None:
    import zstandard

    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    with pytest.raises(DeltaError, match="a zstd frame of 16777216 bytes, expected 3 to 3"):
        forms.decompress([bomb], [(3, 3)], 1)
    with pytest.raises(DeltaError, match="not one zstd frame"):
        forms.decompress([zstandard.ZstdCompressor().compress(b"abc") + b"x"], [(3, 3)], 1)


# --- twice, half, and what only the bytes after it show


def test_applying_twice_is_harmless() -> None:
    base, new = versions({"a": 0.01, "b": 0.5})
    whole, held = messages(base, new), copy(base)
    receiver = Receiver(1, held)
    assert receiver.apply(whole) == receiver.apply(whole)
    assert same(held, new)
    untouched = int((bits(base["b"]) == bits(new["b"])).nonzero()[0])
    bits(held["b"])[untouched] ^= 1
    with pytest.raises(DeltaError, match="b: after version 2 was written"):
        receiver.apply(whole)


@pytest.mark.parametrize("zstd", [False, True])
def test_several_threads_write_the_same(zstd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "SPAN", 1 << 14)
    monkeypatch.setattr(encoding, "SMALL", 0)
    base, new = versions({"a": 0.01, "b": 0.5, "c": 1.0})
    whole, held = messages(base, new, zstd=zstd), copy(base)
    receiver = Receiver(1, held)
    with pytest.raises(DeltaError):
        receiver.apply(whole[:-1], threads=4)
    assert same(held, base)
    assert receiver.apply(whole, threads=4) == State.of(2, new.items())
    assert same(held, new)
    bits(held["b"])[1] ^= 1
    with pytest.raises(DeltaError, match="after version 3 was written"):
        receiver.apply(list(Delta(State.of(2, new.items()), new, _later(new), 3)), threads=4)


def _later(tensors: Tensors) -> Any:
    return ((name, changed(tensor, 0.01, 5)) for name, tensor in tensors.items())


def test_half_applied_is_known_and_mended_by_the_same_delta(monkeypatch: pytest.MonkeyPatch) -> None:
    base, new = versions({"a": 0.01, "b": 0.5})
    whole, held = messages(base, new, bucket=1), copy(base)
    later = list(Delta(State.of(1, base.items()), base, base.items(), 3))
    receiver, write = Receiver(1, held), Receiver._write

    def dies(self: Receiver, span: Any) -> None:
        if span.fields["name"] == "b":
            raise MemoryError
        write(self, span)

    monkeypatch.setattr(Receiver, "_write", dies)
    with pytest.raises(MemoryError):
        receiver.apply(whole)
    monkeypatch.undo()
    with pytest.raises(DeltaError, match="between version 1 and 2"):
        _ = receiver.state
    with pytest.raises(DeltaError, match="version 2 is half applied"):
        receiver.apply(later)
    receiver.apply(whole)
    assert same(held, new)
    assert receiver.state.version == 2


def test_a_receiver_that_is_not_what_it_says_is_found_after_writing() -> None:
    """An element outside the delta was changed behind the receiver's back (slime#2209 passed its checksum)."""
    base, new = versions({"a": 0.01, "b": 0.5})
    held = copy(base)
    receiver = Receiver(1, held)
    untouched = int((bits(base["b"]) == bits(new["b"])).nonzero()[0])
    bits(held["b"])[untouched] ^= 1
    with pytest.raises(DeltaError, match="b: after version 2 was written its hash is"):
        receiver.apply(messages(base, new))
    with pytest.raises(DeltaError, match="between version 1 and 2"):
        _ = receiver.state


# --- versions that are skipped


def test_deltas_are_against_the_last_acknowledged_version() -> None:
    """Versions 2 and 4 are lost, 3 arrives late; only what was acknowledged becomes a base."""
    history = [versions({"a": 0.0, "b": 0.0})[0]]
    for step in range(1, 7):
        history.append({name: changed(tensor, 0.02, step) for name, tensor in history[-1].items()})
    sender, held = Sender(0, history[0].items()), copy(history[0])
    receiver = Receiver(0, held)
    made = {version: sender.delta(version, history[version].items()) for version in (1, 2, 3)}
    assert receiver.apply(made[1]).version == 1
    refused_state = receiver.state
    with pytest.raises(DeltaError, match="the delta's base is version 0"):
        receiver.apply(made[3])
    sender.acknowledge(1, refused_state.hash)
    sender.acknowledge(1, refused_state.hash)
    with pytest.raises(DeltaError, match="deltas that wait are none"):
        sender.acknowledge(3, refused_state.hash)
    sender.delta(4, history[4].items())
    state = receiver.apply(sender.delta(6, history[6].items(), zstd=True))
    with pytest.raises(DeltaError, match="6 has been made already"):
        sender.delta(6, history[6].items())
    with pytest.raises(DeltaError, match="send it whole"):
        sender.acknowledge(6, "0" * 32)
    sender.acknowledge(6, state.hash)
    assert same(held, history[6])
    assert sender.acknowledged == receiver.state


def test_the_sender_keeps_its_own_copy() -> None:
    base, new = versions({"a": 0.01})
    sender, held = Sender(1, base.items()), copy(base)
    for name, tensor in base.items():
        tensor.copy_(new[name])  # the trainer updates in place
    Receiver(1, held).apply(sender.delta(2, base.items()))
    assert same(held, new)


# --- the format, as others read it


def test_golden_files_are_read_as_on_the_day_they_were_written() -> None:
    """Files of format 1, which every later version reads. `tests/golden/delta/make.py` wrote them."""
    from tests.golden.delta.make import tensors

    base, new = tensors()
    files = sorted(GOLDEN.glob("*.delta"))
    assert [path.name for path in files] == ["plain.delta", "zstd.delta"]
    for path in files:
        found = {span["form"] for span in _spans(list(File(path)))}
        assert found == ({"index", "bitmask", "full"} if path.stem == "plain" else {"gaps", "bitmask", "full"})
        held = copy(base)
        assert Receiver(1, held).apply(File(path)) == State.of(2, new.items())
        assert same(held, new)
    assert b"".join(messages(base, new)) == (GOLDEN / "plain.delta").read_bytes()


def _fits(value: Any, schema: dict[str, Any], defs: dict[str, Any]) -> bool:
    """A value against the keywords of JSON Schema that schema.json uses."""
    if "$ref" in schema:
        schema = defs[schema["$ref"].rpartition("/")[2]]
    if "oneOf" in schema:
        return sum(_fits(value, one, defs) for one in schema["oneOf"]) == 1
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
    if "type" in schema and type(value) is not kinds[schema["type"]]:
        return False
    if ("const" in schema and value != schema["const"]) or ("enum" in schema and value not in schema["enum"]):
        return False
    if isinstance(value, dict):
        known, more = schema.get("properties", {}), schema["additionalProperties"]
        extra = [item for name, item in value.items() if name not in known]
        return (
            set(schema.get("required", [])) <= value.keys()
            and all(_fits(value[name], one, defs) for name, one in known.items() if name in value)
            and (not extra if more is False else all(_fits(item, more, defs) for item in extra))
        )
    if isinstance(value, list):
        return all(_fits(item, schema["items"], defs) for item in value)
    if isinstance(value, str):
        return re.search(schema.get("pattern", ""), value) is not None
    return schema.get("minimum", value) <= value <= schema.get("maximum", value)


def test_the_schema_describes_what_is_written_and_what_is_read() -> None:
    schema = json.loads((Path(delta.__file__).parent / "schema.json").read_text(encoding="utf-8"))
    defs = schema["$defs"]
    reader = delta.Reader()
    for message in File(GOLDEN / "zstd.delta"):
        fields, _ = reader.open(message)
        assert _fits(fields, schema, defs)
        for name in fields:
            assert not _fits({**fields, name: None}, schema, defs)
    for kind, fields in FIELDS.items():
        assert set(defs[kind]["required"]) == set(defs[kind]["properties"]) == fields.keys()
    assert defs["span"]["properties"]["form"]["enum"] == list(forms.FORMS)

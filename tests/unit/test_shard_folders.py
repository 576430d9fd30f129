"""Checkpoints by topology: shards on disk and back bit for bit, whole or not there, and continued after a kill."""

from __future__ import annotations

import json
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from moeref import cli, families
from moeref.bridge import BridgeError, ShardMap, hf_tensors, inventory, load
from moeref.families import SpecNames
from moeref.layout import Layout
from moeref.shards import ShardError, ShardFolder, join, save, split
from moeref.shards.join import write_index
from moeref.torch_dtypes import TORCH, bits_of
from tests.unit import shard_ranks
from tests.unit.models import CONFIGS
from tests.unit.test_loader import holder, write

pytestmark = pytest.mark.cpu
LAYOUTS = ("tp=2,pp=2,ep=2,etp=1", "pp=2,vpp=2", "tp=2,ep=2,etp=2,world=8", "ep=4,world=8", "world=1")


def source(folder: Path, family: str = "glm4_moe", **changes: object) -> Path:
    """A Hugging Face folder with random bits, NaN among them."""
    folder.mkdir(parents=True)
    config = {**CONFIGS[family], **changes}
    (folder / "config.json").write_text(json.dumps(config))
    shard_map = ShardMap(families.read(folder), Layout())
    torch.manual_seed(1)
    write(folder, {t.name: bits(t.shape, TORCH[t.dtype]) for t in hf_tensors(shard_map)})
    return folder


def bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    kind = torch.int16 if dtype.itemsize == 2 else torch.int32
    limits = torch.iinfo(kind)
    return torch.randint(limits.min, limits.max, shape, dtype=kind).view(dtype)


def tensors(folder: Path) -> dict[str, tuple[torch.dtype, bytes]]:
    found = {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}
    return {name: (tensor.dtype, bits_of(tensor).tobytes()) for name, tensor in found.items()}


def map_of(folder: Path, layout: str, **names: str) -> ShardMap:
    return ShardMap(families.read(folder), Layout.parse(layout), SpecNames(**names))  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "gpt_oss", "qwen3_next"])
def test_there_and_back_is_bit_for_bit(tmp_path: Path, family: str, layout: str) -> None:
    hf = source(tmp_path / "hf", family, dtype="bfloat16" if family == "qwen3_moe" else "float32")
    shards = split(map_of(hf, layout), hf, tmp_path / "shards")
    back = join(shards, tmp_path / "back", file_bytes=100_000)
    assert tensors(back) == tensors(hf)
    assert len(list(back.glob("*.safetensors"))) > 1
    assert json.loads((back / "config.json").read_text()) == json.loads((hf / "config.json").read_text())


@pytest.mark.parametrize("inside", [False, True])
def test_the_config_of_quantised_files_says_nothing_of_it_where_files_are_not(tmp_path: Path, inside: bool) -> None:
    plain = {"hidden_size": 8, "rope_scaling": None}
    given = {**plain, "quantization_config": {"quant_method": "fp8"}}
    want, given = ({"text_config": of, "a": 1} if inside else of for of in (plain, given))
    (tmp_path / "given.json").write_text(json.dumps(given))
    write_index(tmp_path, {}, tmp_path / "given.json")
    assert json.loads((tmp_path / "config.json").read_text()) == want


def test_the_folder_is_named_by_the_topology(tmp_path: Path) -> None:
    hf = source(tmp_path / "hf")
    shards = split(map_of(hf, LAYOUTS[0]), hf, tmp_path)
    assert shards == tmp_path / "tp2_pp2_ep2_etp1"
    assert sorted(path.name for path in shards.iterdir()) == [
        *("config.json", "moeref.json", "pp0-ep0-etp0.safetensors", "pp0-ep1-etp0.safetensors"),
        *("pp1-ep0-etp0.safetensors", "pp1-ep1-etp0.safetensors", "tp0-pp0.safetensors", "tp0-pp1.safetensors"),
        *("tp1-pp0.safetensors", "tp1-pp1.safetensors"),
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_reads_from_shards_what_it_reads_from_hugging_face(tmp_path: Path, layout: str) -> None:
    hf = source(tmp_path / "hf")
    shard_map = map_of(hf, layout)
    with ShardFolder(split(shard_map, hf, tmp_path)) as folder:
        for rank in range(shard_map.layout.world):
            mine, expected = holder(shard_map, rank), holder(shard_map, rank)
            folder.load(rank, mine, shard_map)
            load(shard_map, rank, expected, hf)
            want = {key: bits_of(tensor).tobytes() for key, tensor in inventory(expected).items()}
            assert {key: bits_of(tensor).tobytes() for key, tensor in inventory(mine).items()} == want


def test_a_live_model_is_saved_as_split_writes_it(tmp_path: Path) -> None:
    hf = source(tmp_path / "hf")
    shard_map = map_of(hf, "world=1")
    chunks = holder(shard_map, 0)
    load(shard_map, 0, chunks, hf)
    saved = save(shard_map, 0, chunks, tmp_path / "live", hf / "config.json")
    other = split(shard_map, hf, tmp_path / "split")
    files = {path.name: path.read_bytes() for path in other.iterdir()}
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == files
    with pytest.raises(ShardError, match="exists"):
        save(shard_map, 0, chunks, tmp_path / "live", hf / "config.json")


def test_a_folder_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    hf = source(tmp_path / "hf")
    shards = split(map_of(hf, LAYOUTS[0]), hf, tmp_path)
    (shards / "tp1-pp0.safetensors").rename(tmp_path / "kept")
    with pytest.raises(ShardError, match=r"tp1-pp0.safetensors: missing, the manifest says \d+ bytes"):
        join(shards, tmp_path / "back")
    (shards / "tp1-pp0.safetensors").write_bytes((tmp_path / "kept").read_bytes()[:-1])
    with pytest.raises(ShardError, match="the manifest says"):
        join(shards, tmp_path / "back")
    for text, said in (("[1]", "format None; this reads 1"), ("{", "not a manifest .*; convert it again")):
        (shards / "moeref.json").write_text(text)
        with pytest.raises(ShardError, match=said):
            ShardFolder(shards)
    with pytest.raises(ShardError, match="no whole folder of shards"):
        ShardFolder(hf)
    assert not (tmp_path / "back").exists()
    assert not (tmp_path / "back.part").exists()


def test_bad_input_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    hf = source(tmp_path / "hf")
    other = source(tmp_path / "other", num_hidden_layers=2)
    with pytest.raises(BridgeError, match="does not fit the model"):
        split(map_of(other, "world=1"), hf, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    split(map_of(hf, "world=1"), hf, tmp_path / "out")
    with pytest.raises(ShardError, match="exists; remove it"):
        split(map_of(hf, "world=1"), hf, tmp_path / "out")


def test_what_was_begun_from_another_source_is_not_continued(tmp_path: Path) -> None:
    hf = source(tmp_path / "hf")
    shards = split(map_of(hf, "pp=2"), hf, tmp_path / "out")
    part = shards.rename(f"{shards}.part")
    (part / "source.json").write_text(json.dumps({"source": "another"}))
    with pytest.raises(ShardError, match="begun from another source"):
        split(map_of(hf, "pp=2"), hf, tmp_path / "out")


def test_files_of_a_folder_that_says_no_source_are_not_taken_up(tmp_path: Path) -> None:
    """A run that ends just before its folder gets its name leaves no word of the source."""
    hf = source(tmp_path / "hf")
    shards = split(map_of(hf, "pp=2"), hf, tmp_path / "out")
    part = shards.rename(f"{shards}.part")
    with pytest.raises(ShardError, match=r"pp2_ep1_etp1\.part has files, and does not say of which source; remove it"):
        split(map_of(hf, "pp=2"), hf, tmp_path / "out")
    (part / "source.json").write_text("{")
    with pytest.raises(ShardError, match="does not say of which source"):
        split(map_of(hf, "pp=2"), hf, tmp_path / "out")


CONVERT = "import sys; from moeref.cli import main; print('go', flush=True); sys.exit(main(sys.argv[1:]))"


def test_a_conversion_that_is_killed_is_never_taken_for_whole_and_goes_on(tmp_path: Path) -> None:
    hf = source(tmp_path / "hf", num_hidden_layers=8)
    shards = split(map_of(hf, LAYOUTS[0]), hf, tmp_path / "whole")
    expected = {path.name: path.read_bytes() for path in shards.iterdir()}
    pause, killed, kept = random.Random(7), 0, False
    arguments = [sys.executable, "-W", "ignore", "-c", CONVERT, "convert", str(hf), str(tmp_path / "out"), "--layout"]
    for _ in range(3):
        with subprocess.Popen([*arguments, LAYOUTS[0]], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout
            assert process.stdout.readline() == "go\n"
            part = tmp_path / "out" / "tp2_pp2_ep2_etp1.part"
            while process.poll() is None and not list(part.glob("*.tmp")):
                time.sleep(0.001)
            time.sleep(pause.random() * 0.01)
            process.send_signal(signal.SIGKILL)
        if (tmp_path / "out" / "tp2_pp2_ep2_etp1").exists():
            break
        killed += 1
        kept = kept or bool(list(part.glob("*.safetensors")))
        with pytest.raises(ShardError, match="no whole folder"):
            ShardFolder(part)
        for file in part.glob("*.safetensors"):
            assert file.read_bytes() == expected[file.name]
    assert killed
    if part.exists():
        assert split(map_of(hf, LAYOUTS[0]), hf, tmp_path / "out").is_dir()
    assert {p.name: p.read_bytes() for p in (tmp_path / "out" / "tp2_pp2_ep2_etp1").iterdir()} == expected


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf, out = source(tmp_path / "hf"), tmp_path / "out"
    assert cli.main(["convert", str(hf), str(out), "--layout", LAYOUTS[0], "--dry-run"]) == 0
    assert "would write 8 files" in capsys.readouterr().out
    assert not out.exists()
    assert cli.main(["convert", str(hf), str(out), "--layout", LAYOUTS[0]]) == 0
    shards = out / "tp2_pp2_ep2_etp1"
    assert capsys.readouterr().out == f"written: {shards}\n"
    assert cli.main(["convert", str(shards), str(tmp_path / "back"), "--dry-run"]) == 0
    assert "would write" in capsys.readouterr().out
    assert cli.main(["convert", str(shards), str(tmp_path / "back")]) == 0
    assert tensors(tmp_path / "back") == tensors(hf)
    for arguments, said in (
        ([str(hf), str(out)], "give --layout"),
        ([str(out), str(tmp_path / "again")], f"{out} holds folders of shards; name one: {shards}\n"),
        ([str(hf), str(out), "--layout", LAYOUTS[0]], "exists"),
        ([str(shards), str(out / "b"), "--layout", "tp=2"], "whose layout is known"),
        ([str(shards), str(out / "b"), "--norms", "fused", "--divisible-by", "64"], "drop --norms, --divisible-by: "),
        ([str(hf), str(out / "b"), "--layout", "tp=2", "--config", str(hf)], "drop --config: the source has its own"),
        ([str(hf), str(out / "c"), "--layout", "tp=7"], "7"),
        ([str(tmp_path), str(out / "d"), "--layout", "tp=2"], "config.json: No such file or directory\n"),
        ([str(tmp_path / "no"), str(out / "d"), "--layout", "tp=2"], "no: there is no such folder\n"),
    ):
        assert cli.main(["convert", *arguments]) == 2
        assert said in capsys.readouterr().err


def test_the_commands_of_the_how_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source(tmp_path / "checkpoints" / "published", dtype="bfloat16")
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "convert-checkpoints.md").read_text(encoding="utf-8")
    commands = [line for line in page.splitlines() if line.startswith("moeref ")]
    assert [cli.main(shlex.split(line)[1:]) for line in commands] == [0] * 7


@pytest.mark.ranks
@pytest.mark.parametrize("broken", [False, True])
def test_ranks_write_one_folder_or_none(tmp_path: Path, broken: bool) -> None:
    hf = source(tmp_path / "hf")
    torch.multiprocessing.spawn(shard_ranks.rank, (str(tmp_path), broken), nprocs=2)
    target = tmp_path / "live" / "tp1_pp2_ep1_etp1"
    if broken:
        assert not target.exists()
    else:
        expected = split(map_of(hf, "pp=2"), hf, tmp_path / "split")
        assert {p.name: p.read_bytes() for p in target.iterdir()} == {
            p.name: p.read_bytes() for p in expected.iterdir()
        }


def test_a_file_is_what_safetensors_reads(tmp_path: Path) -> None:
    hf = source(tmp_path / "hf")
    shards = split(map_of(hf, "world=1"), hf, tmp_path)
    with safe_open(shards / "tp0-pp0.safetensors", framework="pt") as file:
        assert "0:embedding.word_embeddings.weight" in file.keys()  # noqa: SIM118

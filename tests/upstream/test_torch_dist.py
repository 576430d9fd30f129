"""Megatron's distributed checkpoint, written and read by the installed megatron-core on a CPU."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from megatron.core.transformer import multi_latent_attention

from moeref.megatron import convert as distributed
from moeref.megatron import torch_dist
from moeref.record import installed_core
from moeref.shards.files import begin
from tests import warm
from tests.unit.test_shard_folders import source, tensors

pytestmark = [pytest.mark.cpu, pytest.mark.ranks]
ROOT = Path(__file__).parents[2]
#: In which ranks end with an error, models of this size and a busy machine included.
SECONDS = 60
BF16 = {"dtype": "bfloat16"}


@pytest.fixture(scope="module")
def prepared() -> Iterator[warm.Prepared]:
    """A process that has imported megatron-core, in which the kit has replaced nothing."""
    program = "import moeref.cli, moeref.megatron.convert"
    with warm.prepare(program, cwd=ROOT, path=[str(ROOT)], forget=["megatron", "moeref"]) as process:
        yield process


def convert(prepared: warm.Prepared, *arguments: object, ranks: int = 1, before: str = "") -> list[warm.Done]:
    """`moeref convert` in each of `ranks` processes, as torchrun starts them, after the program `before`."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    return prepared.run_all(
        [_program(arguments, world | {"RANK": str(rank)}, before) for rank in range(ranks)], cwd=ROOT
    )


def _program(arguments: tuple[object, ...], world: dict[str, str], before: str) -> str:
    argv = ["convert", *map(str, arguments)]
    return (
        f"import os\nos.environ.update({world})\n{before}\nfrom moeref.cli import main\nraise SystemExit(main({argv}))"
    )


def done(results: list[warm.Done]) -> str:
    """What rank 0 printed, if all ranks ended well; the other ranks print nothing."""
    assert [one.returncode for one in results] == [0] * len(results), "\n".join(one.stderr for one in results)
    assert {one.stdout for one in results[1:]} <= {""}
    return results[0].stdout


@pytest.mark.parametrize(
    ("family", "written", "ranks", "read", "readers"),
    [
        ("qwen3_moe", "world=1", 1, "tp=2,pp=2,ep=2,etp=1", 4),
        ("qwen3_moe", "tp=2,pp=2,ep=2,etp=1", 4, "pp=2,vpp=2", 2),
        ("glm4_moe", "tp=2,ep=2,etp=1", 2, "pp=2", 2),
        ("deepseek_v3", "tp=2", 2, "ep=2,world=2", 2),
        ("gpt_oss", "pp=2", 2, "tp=2,ep=2,etp=1", 2),
        ("qwen3_next", "tp=2,ep=2,etp=1", 2, "pp=2", 2),
    ],
)
def test_a_model_written_under_one_layout_is_read_under_another(
    prepared: warm.Prepared, tmp_path: Path, family: str, written: str, ranks: int, read: str, readers: int
) -> None:
    hf = source(tmp_path / "hf", family, **BF16)
    skip_latent_attention(prepared, hf, family)
    done(convert(prepared, hf, tmp_path / "dist", "--format=torch_dist", f"--layout={written}", ranks=ranks))
    done(convert(prepared, tmp_path / "dist", tmp_path / "again", f"--layout={read}", ranks=readers))
    assert tensors(tmp_path / "again") == tensors(hf)


def skip_latent_attention(prepared: warm.Prepared, hf: Path, family: str) -> None:
    """Where megatron-core builds none: 0.16.1 without Transformer Engine. It has to be refused there."""
    if family != "deepseek_v3" or isinstance(multi_latent_attention.TELinear, type | None):
        return
    assert installed_core().startswith("0.16.")
    said = refused(prepared, hf, hf.with_name("dist"), "--format=torch_dist")
    assert "builds latent attention only where Transformer Engine is installed" in said
    assert list(hf.parent.iterdir()) == [hf]
    pytest.skip("megatron-core 0.16.1 builds no latent attention without Transformer Engine, and moeref says so")


def folder_of(prepared: warm.Prepared, tmp_path: Path) -> tuple[Path, Path]:
    """A Hugging Face folder, and the distributed checkpoint of it."""
    hf = source(tmp_path / "hf", "mixtral", **BF16)
    done(convert(prepared, hf, tmp_path / "dist", "--format=torch_dist"))
    return hf, tmp_path / "dist"


def refused(prepared: warm.Prepared, *arguments: object) -> str:
    """What `moeref convert` says, which writes nothing."""
    (result,) = convert(prepared, *arguments)
    assert result.returncode == 2, result.stdout + result.stderr
    assert result.stderr.startswith("moeref: "), result.stderr
    return result.stderr


def test_bad_input_is_refused_before_anything_is_written(prepared: warm.Prepared, tmp_path: Path) -> None:
    hf, dist = folder_of(prepared, tmp_path)
    before = sorted(tmp_path.iterdir())
    new = tmp_path / "new"
    assert "exists; remove it" in refused(prepared, hf, dist, "--format=torch_dist")
    assert "torchrun --nproc-per-node 2" in refused(prepared, hf, new, "--format=torch_dist", "--layout=tp=2")
    assert "drop --experts: a distributed checkpoint" in refused(prepared, dist, new, "--experts=grouped")
    assert "none: there is no such folder" in refused(prepared, tmp_path / "none", new, "--format=torch_dist")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "not the note of a conversion"), ("[]", "not the note"), ('{"expert_format": "x"}', "'x' is none of per_")],
)
def test_a_note_that_does_not_say_the_expert_format_is_refused(text: str, said: str, tmp_path: Path) -> None:
    assert torch_dist.expert_format(tmp_path) == "per_expert"
    (tmp_path / "moeref.json").write_text(text)
    with pytest.raises(torch_dist.TorchDistError, match=said):
        torch_dist.expert_format(tmp_path)


def test_a_folder_of_another_model_is_refused(prepared: warm.Prepared, tmp_path: Path) -> None:
    hf, dist = folder_of(prepared, tmp_path)
    config = json.loads((hf / "config.json").read_text())
    other = tmp_path / "other"
    other.mkdir()

    def with_config(**changes: object) -> str:
        (other / "config.json").write_text(json.dumps({**config, **changes}))
        said = refused(prepared, dist, tmp_path / "again", "--config", other)
        assert not (tmp_path / "again").exists()
        return said

    layers = config["num_hidden_layers"]
    assert f"decoder.layers.{layers}." in with_config(num_hidden_layers=layers + 1)
    assert "that the model does not: decoder.layers." in with_config(num_hidden_layers=layers - 1)
    assert ", the model holds [" in with_config(hidden_size=2 * config["hidden_size"])


def test_a_folder_that_is_not_whole_is_refused(prepared: warm.Prepared, tmp_path: Path) -> None:
    _, dist = folder_of(prepared, tmp_path)
    part = dist.rename(tmp_path / "dist.part")
    assert "is still written" in refused(prepared, part, tmp_path / "again")
    dist = part.rename(tmp_path / "dist")
    (dist / "__0_0.distcp").unlink()
    assert "__0_0.distcp" in refused(prepared, dist, tmp_path / "again")
    assert not (tmp_path / "again").exists()


OF_TRANSFORMER_ENGINE = """
import sys
from pathlib import Path
from moeref_conformance import authors
authors.megatron_on_cpu(plain_te=True)
import torch
import torch.distributed as dist
from moeref import megatron
from moeref.check import check
from moeref.config import MoEConfig
from moeref.exporter import Plan, export
from moeref.megatron import torch_dist
from moeref.record import installed_core
from moeref_conformance.targets.peers import te_modules
from safetensors.torch import load_file

# What megatron-core asks of a grouped linear's quantisation state when it is not quantised.
grouped = te_modules.GroupedLinear
grouped.fp8_meta, grouped.fp8, grouped.fp8_calibration = {"fp8_checkpoint": False}, False, False
grouped.get_extra_state = lambda self: torch.empty(0, dtype=torch.uint8)
grouped.set_extra_state = lambda self, state: None

hf, folder = sys.argv[1:]
asked = MoEConfig(transformer_config_kwargs={"moe_grouped_gemm": True})
report = check(hf, "world=1", asked=asked, kernels="te", dispatcher="allgather", core=installed_core(), verify=False)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
megatron.initialise(report.record.layout)
built = megatron.build(report.record, 0)
assert any(type(m).__name__ == "TEGroupedMLP" for m in built.chunks[0].modules())
torch_dist.load(built.shard_map, 0, built.chunks, folder)
want = {name: full for file in Path(hf).glob("*.safetensors") for name, full in load_file(file).items()}
for tensor, full in export(Plan(built.shard_map), 0, built.chunks):
    assert torch.equal(full.view(torch.uint8), want.pop(tensor.name).view(torch.uint8)), tensor.name
assert not want
"""


@pytest.mark.parametrize("family", ["mixtral", "glm4_moe", "deepseek_v3"])
def test_a_model_of_transformer_engines_modules_reads_it(prepared: warm.Prepared, tmp_path: Path, family: str) -> None:
    """Megatron's own specs, whose parameters have other names than plain torch modules have."""
    hf = source(tmp_path / "hf", family, **BF16)
    skip_latent_attention(prepared, hf, family)
    done(convert(prepared, hf, tmp_path / "dist", "--format=torch_dist"))
    program = f"import sys\nsys.argv[1:] = {[str(hf), str(tmp_path / 'dist')]}\n{OF_TRANSFORMER_ENGINE}"
    path = [str(ROOT), str(ROOT / "conformance")]
    result = warm.run(program, cwd=ROOT, path=path, forget=["megatron", "moeref", "moeref_conformance"])
    assert result.returncode == 0, result.stderr


FP32 = """
import sys
from pathlib import Path
from megatron.core import dist_checkpointing
from moeref.bridge import load
from moeref.megatron import convert, torch_dist
hf, target = map(Path, sys.argv[1:])
with convert._model(convert._record(hf, "world=1", 128)) as (built, rank):
    load(built.shard_map, rank, built.chunks, hf)
    target.mkdir()
    sharded = torch_dist._sharded(built.shard_map, [chunk.float() for chunk in built.chunks], None)
    planned = torch_dist._Planned()
    dist_checkpointing.save(sharded, str(target), planned, async_sharded_save=True)
    torch_dist._write(planned, target, lambda done, total: None)
"""


def test_a_folder_in_another_dtype_is_refused(prepared: warm.Prepared, tmp_path: Path) -> None:
    """megatron-core alone would round while it reads."""
    hf = source(tmp_path / "hf", "mixtral", **BF16)
    program = f"import sys\nsys.argv[1:] = {[str(hf), str(tmp_path / 'dist')]}\n{FP32}"
    assert prepared.run(program, cwd=ROOT).returncode == 0
    assert "has no config.json: give the folder" in refused(prepared, tmp_path / "dist", tmp_path / "again")
    said = refused(prepared, tmp_path / "dist", tmp_path / "again", "--config", hf)
    assert "is torch.float32, the model holds torch.bfloat16" in said


RANK = """
import os, sys
from pathlib import Path
import torch.distributed as dist
from moeref.bridge import load
from moeref.megatron import convert, torch_dist
hf, target, port, rank = sys.argv[1:]
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE="2", RANK=rank)
with convert._model(convert._record(Path(hf), "tp=2", 128)) as (built, number):
    load(built.shard_map, number, built.chunks, hf)
    try:
        torch_dist.save(built.shard_map, number, built.chunks, target, hf + "/config.json")
    except torch_dist.TorchDistError as error:
        print(error)
    else:
        raise SystemExit("written")
"""


def test_all_ranks_raise_if_one_cannot_write(prepared: warm.Prepared, tmp_path: Path) -> None:
    hf = source(tmp_path / "hf", "mixtral", **BF16)
    (tmp_path / "file").touch()
    targets = tmp_path / "dist", tmp_path / "file" / "dist"  # rank 1 cannot make a folder in a file
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    programs = [
        f"import sys\nsys.argv[1:] = {[str(hf), str(target), str(port), str(rank)]}\n{RANK}"
        for rank, target in enumerate(targets)
    ]
    for result in prepared.run_all(programs, cwd=ROOT):
        assert result.returncode == 0, result.stderr
        assert "dist" in result.stdout
    assert not (tmp_path / "dist").exists()


NO_SPACE = """
import os, sys
failing = {failing!r}
def no_space(event, arguments):
    if event == "open" and os.path.basename(str(arguments[0])).startswith(failing):
        raise OSError(28, "No space left on device", failing)
if os.environ["RANK"] == {rank!r}:
    sys.addaudithook(no_space)
"""


@pytest.mark.parametrize(
    ("failing", "rank"),
    [("metadata.json", 0), (".metadata.tmp", 0), ("moeref.json", 0), ("__0_0.distcp", 0), ("__1_0.distcp", 1)],
)
def test_all_ranks_end_if_a_disk_fills(prepared: warm.Prepared, tmp_path: Path, failing: str, rank: int) -> None:
    """On one rank one file cannot be opened: whoever waits for that rank would wait for the group's time-out."""
    hf = source(tmp_path / "hf", "mixtral", **BF16)
    before = NO_SPACE.format(failing=failing, rank=str(rank))
    options = (hf, tmp_path / "dist", "--format=torch_dist", "--layout=tp=2")
    began = time.monotonic()
    for result in convert(prepared, *options, ranks=2, before=before):
        assert result.returncode == 2, result.stderr
        assert result.stderr.splitlines()[-1].startswith("moeref: "), result.stderr
    assert time.monotonic() - began < SECONDS
    assert not (tmp_path / "dist").exists()
    done(convert(prepared, *options, ranks=2))


@pytest.mark.parametrize("failing", ["metadata.json", ".metadata", "__0_0.distcp"])
def test_all_ranks_end_if_one_cannot_read(prepared: warm.Prepared, tmp_path: Path, failing: str) -> None:
    _, dist = folder_of(prepared, tmp_path)
    before = NO_SPACE.format(failing=failing, rank="1")
    began = time.monotonic()
    for result in convert(prepared, dist, tmp_path / "again", "--layout=pp=2", ranks=2, before=before):
        assert result.returncode == 2, result.stderr
    assert time.monotonic() - began < SECONDS
    assert not (tmp_path / "again").exists()


def test_what_another_conversion_has_begun_is_kept(prepared: warm.Prepared, tmp_path: Path) -> None:
    hf, dist = folder_of(prepared, tmp_path)
    begun = begin(tmp_path / "new", {"of": "another"})
    assert "new.part was begun by another conversion" in refused(prepared, hf, tmp_path / "new", "--format=torch_dist")
    assert "was begun from another source" in refused(prepared, dist, tmp_path / "new")
    assert [path.name for path in begun.iterdir()] == ["source.json"]


def test_a_checkpoint_that_was_half_written_is_written_anew(prepared: warm.Prepared, tmp_path: Path) -> None:
    hf = source(tmp_path / "hf", "mixtral", **BF16)
    half = tmp_path / "dist.part"
    half.mkdir()
    (half / "__7_0.distcp").write_bytes(b"half")
    done(convert(prepared, hf, tmp_path / "dist", "--format=torch_dist"))
    assert not half.exists()
    assert not (tmp_path / "dist" / "__7_0.distcp").exists()


def test_a_conversion_back_goes_on_where_it_stopped(prepared: warm.Prepared, tmp_path: Path) -> None:
    """Files that have their names are whole, and not written again."""
    hf, dist = folder_of(prepared, tmp_path)
    small = "from moeref.shards.join import checkpoint_files\ncheckpoint_files.__defaults__ = (100_000,)\n"
    before = small + NO_SPACE.format(failing="model-00003-of", rank="0")
    (result,) = convert(prepared, dist, tmp_path / "again", before=before)
    assert (result.returncode, "No space left" in result.stderr) == (2, True), result.stderr
    first, second = sorted((tmp_path / "again.part").glob("*.safetensors"))
    whole = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in (first, second)}
    done(convert(prepared, dist, tmp_path / "again", before=small))
    for name, stat in whole.items():
        again = (tmp_path / "again" / name).stat()
        assert (again.st_ino, again.st_mtime_ns) == stat
    assert tensors(tmp_path / "again") == tensors(hf)
    os.utime(dist / "__0_0.distcp")
    convert(prepared, dist, tmp_path / "third", before=before)
    os.utime(dist / "__0_0.distcp")
    assert "was begun from another source" in refused(prepared, dist, tmp_path / "third")


def test_a_bar_shows_bytes_of_the_weights(prepared: warm.Prepared, tmp_path: Path) -> None:
    """All of them at its end; the distributed checkpoint has those of the padded vocabulary too."""
    hf, dist = folder_of(prepared, tmp_path)
    nbytes = sum(len(raw) for _, raw in tensors(hf).values())
    for arguments in ((hf, tmp_path / "new", "--format=torch_dist"), (dist, tmp_path / "again")):
        (result,) = convert(prepared, *arguments, before="import os\nos.environ['TTY_COMPATIBLE'] = '1'\n")
        assert result.returncode == 0, result.stderr
        assert (last := re.findall(r"([0-9.]+)/\1 kB", result.stderr)), result.stderr
        assert 0 <= float(last[-1]) - nbytes / 1000 < 0.1 * nbytes / 1000
    assert float(last[-1]) == round(nbytes / 1000, 1)


def test_megatrons_own_writer_needs_cuda(prepared: warm.Prepared) -> None:
    """Why torch's writer is used: before megatron-core's own writes, it waits for a GPU, if there is one or not."""
    program = (
        "from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync\n"
        "FileSystemWriterAsync.preload_tensors([])\n"
    )
    if not torch.cuda.is_available():
        result = prepared.run(program, cwd=ROOT)
        assert result.returncode == 1
        assert "cuda" in result.stderr.lower()


def test_latent_attention_that_cannot_be_built_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core 0.16.1 has a mock in place of a class that only Transformer Engine gives it."""
    hf = source(tmp_path / "hf", "deepseek_v3", **BF16)
    monkeypatch.setattr(multi_latent_attention, "TELinear", MagicMock())
    with pytest.raises(torch_dist.TorchDistError, match="builds latent attention only where Transformer Engine is"):
        distributed._record(hf, "world=1", 128)

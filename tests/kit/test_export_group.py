"""An export inside a group: where engines share the world with trainers, layout ranks are not global ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import warm

pytestmark = [pytest.mark.cpu, pytest.mark.ranks]
RUN = """
import sys
import torch, torch.distributed as dist
from moeref.bridge import ShardMap
from moeref.exporter import Plan, export
from moeref.layout import Layout
from tests.unit.models import model
from tests.unit.test_loader import holder

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=3)
trainers = dist.new_group([1, 2])
if rank:
    table = ShardMap(model("qwen3_moe", num_hidden_layers=2), Layout.parse("pp=2"))
    mine = dist.get_rank(trainers)
    chunks = holder(table, mine, value=float(rank))
    seen = {t.name: full for t, full in export(Plan(table), mine, chunks, trainers)}
    if mine == 0:
        assert (seen["model.layers.0.self_attn.q_proj.weight"] == 1).all()
        assert (seen["model.layers.1.self_attn.q_proj.weight"] == 2).all()
        assert None not in seen.values()
    else:
        assert set(seen.values()) == {None}
dist.barrier()
"""


#: What one of two ranks does otherwise must end as an error on both, before anything is sent or written.
DISAGREE = """
import datetime, json, sys
import pathlib
import torch, torch.distributed as dist
from moeref.bridge import BridgeError, ShardMap, hf_tensors, inventory, load
from moeref.exporter import ExportError, Plan, export
from moeref.layout import Layout
from tests.unit.models import model
from tests.unit.test_loader import holder, write

rank, store = int(sys.argv[1]), pathlib.Path(sys.argv[2])
soon = datetime.timedelta(seconds=60)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=soon)
said = {}

def ask(name, what):
    try:
        what()
        said[name] = "nothing"
    except Exception as error:
        said[name] = f"{type(error).__name__}: {error}"
    dist.barrier()

tp2 = Layout.parse("tp=2")
right = ShardMap(model("glm4_moe", num_hidden_layers=2, num_nextn_predict_layers=1), tp2)
wrong = ShardMap(right.model, tp2, divisible_by=1)
chunks = holder(right, rank)
mine = wrong if rank else right
ask("padding", lambda: list(export(Plan(mine), rank, holder(mine, rank))))
lone = ShardMap(right.model, Layout()) if rank else right
ask("layout", lambda: list(export(Plan(lone), rank, holder(lone, 0))))
ask("place", lambda: list(export(Plan(right), 0, chunks)))
ask("unbound", lambda: list(export(Plan(right), rank, holder(mine, rank))))

torch.manual_seed(0)
tensors = {t.name: torch.randn(t.shape) for t in hf_tensors(right)}
alias = "model.layers.2.embed_tokens.weight"
tensors[alias] = tensors["model.embed_tokens.weight"].clone()
tensors["model.layers.2.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
folder = store.with_name(f"own{rank}")
write(folder, {name: t for name, t in tensors.items() if rank == 0 or name != "model.norm.weight"})
ask("absent", lambda: load(right, rank, chunks, folder))
said["written"] = sum(int((t != 7).any()) for t in inventory(chunks).values())
ask("other model", lambda: load(mine, rank, holder(mine, rank), store.with_name("own0")))
tensors[alias][0] += 1
write(store.with_name(f"alias{rank}"), tensors)
ask("alias", lambda: load(right, rank, chunks, store.with_name(f"alias{rank}")))
tensors[alias] = tensors["model.embed_tokens.weight"].clone()
write(store.with_name(f"good{rank}"), tensors)
ask("good", lambda: load(right, rank, chunks, store.with_name(f"good{rank}")))
store.with_name(f"said{rank}.json").write_text(json.dumps(said))
"""


def test_what_one_rank_does_otherwise_fails_on_all(tmp_path: Path) -> None:
    done = warm.run_all(warm.of_ranks(DISAGREE, 2, str(tmp_path / "store")), cwd=tmp_path)
    assert [rank.returncode for rank in done] == [0, 0], [rank.stderr[-2000:] for rank in done]
    one, other = (json.loads((tmp_path / f"said{r}.json").read_text()) for r in range(2))
    not_sent, not_written = "; nothing was sent", "; nothing was written"
    refused = "refused (their own error says why)"
    for name in ("padding", "layout"):
        assert one[name].startswith("ExportError: glm4_moe, rank 0: ranks [1] "), one
    assert (one["padding"], other["padding"]) == (
        f"ExportError: glm4_moe, rank 0: ranks [1] plan otherwise{not_sent}",
        f"ExportError: glm4_moe, rank 1: ranks [0] plan otherwise{not_sent}",
    )
    assert one["layout"].endswith(f"{refused}{not_sent}")
    assert other["layout"].startswith(
        "BridgeError: rank 1 of tp=1,pp=1,vpp=1,ep=1,etp=1,cp=1,world=1, which has 1 ranks"
    )
    assert one["place"] == f"ExportError: glm4_moe, rank 0: ranks [1] {refused}{not_sent}"
    assert "this process is rank 1 of a group of 2" in other["place"]
    assert one["unbound"] == f"ExportError: glm4_moe, rank 0: ranks [1] {refused}{not_sent}"
    assert other["unbound"].startswith("BridgeError: glm4_moe, rank 1 ")
    assert one["absent"] == f"BridgeError: glm4_moe, rank 0: ranks [1] {refused}{not_written}"
    assert "1 tensors of the model are missing: model.norm.weight" in other["absent"]
    assert (one["written"], other["written"]) == (0, 0)
    assert one["other model"] == f"BridgeError: glm4_moe, rank 0: ranks [1] plan otherwise{not_written}"
    assert "model.layers.2.embed_tokens.weight differs from model.embed_tokens.weight" in one["alias"]
    assert other["alias"] == f"BridgeError: glm4_moe, rank 1: ranks [0] {refused}; the model is loaded in part"
    assert (one["good"], other["good"]) == ("nothing", "nothing")


def test_layout_ranks_are_ranks_of_the_group(tmp_path: Path) -> None:
    done = warm.run_all(warm.of_ranks(RUN, 3, str(tmp_path / "store")), cwd=tmp_path)
    assert [rank.returncode for rank in done] == [0, 0, 0], [rank.stderr[-2000:] for rank in done]

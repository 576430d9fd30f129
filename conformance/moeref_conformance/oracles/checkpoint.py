"""The expected model: a tiny Hugging Face checkpoint and its logits, both made by transformers itself.

All values are random, distinct and seeded; `recipes` has the sizes. Nothing here knows Megatron or a target.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from moeref_conformance.contract.api import Cell
from moeref_conformance.contract.backends import ENGINE
from moeref_conformance.contract.hf_files import INDEX
from moeref_conformance.contract.published_models import TINY, TINY_SEED
from moeref_conformance.contract.requests import int4 as int4_request
from moeref_conformance.contract.requests import mxfp4 as mxfp4_request
from moeref_conformance.contract.requests import quantised as request
from moeref_conformance.oracles import (
    beside_vision,
    expert_tensors,
    int4,
    mtp_names,
    mxfp4,
    published,
    quantised,
    recipes,
    routed,
    spoiled,
)
from moeref_conformance.oracles.dialect import as_published, of_5
from moeref_conformance.oracles.expected import LEFT_OVER, Expected, read_checkpoint
from moeref_conformance.oracles.shares import ROUTERS

#: Other weights of the same model, by their folder, and what they are drawn from, where an engine is updated.
OTHERS = {"second": 97, "third": 95}
#: What engines read of a generation_config.json, besides where samples end: with each of these samples differ.
SAMPLING = {
    "do_sample": True,
    "temperature": 0.1,
    "top_k": 1,
    "top_p": 0.5,
    "min_p": 0.5,
    "repetition_penalty": 4.0,
    "max_new_tokens": 3,
}
SINGLE = "model.safetensors"
#: For every token and layer the scores of the last chosen and the first unchosen expert differ by more than this, so
#: that a sum in another order cannot change a route.
MARGIN = 1e-5
#: Of what a loader puts together, the parts that are in another file than the others.
_APART = (".k_proj.", ".up_proj.", ".w3.", ".in_proj_ba.", ".in_proj_z.", ".gate_up_proj_bias")
_BIAS = "e_score_correction_bias"
_TO_LATENTS = ("q_a_proj.weight", "kv_a_proj_with_mqa.weight")
#: Where the experts' biases lie: about where DeepSeek-V3's do, where bf16 has steps of 1/16, and most tokens take other
#: experts by a rounded bias; and near the scores.
FAR, NEAR = 8.0, 0.3


@dataclass(frozen=True)
class _Answers:
    """What is expected of a variant and is in none of its files, where a rank might come across it."""

    logits_BSV: torch.Tensor
    missing: str
    extra: str
    unlike: str
    left_out: tuple[str, ...]
    plain: Mapping[str, torch.Tensor] | None = None


#: By the folder of a variant.
_ANSWERS: dict[Path, _Answers] = {}


def expected(cell: Cell, workdir: Path) -> Expected:
    """The expected checkpoint of the cell's variant, made on first use and cached in `workdir/<variant>/`.

    The files there are inputs. Answers stay in memory: a process that finds the files of another makes them again.
    Raises ValueError for a family or expert_format without a recipe.
    """
    if cell.size != TINY:
        return published.expected(cell, workdir)
    final = workdir / (f"{cell.variant}+engine" if cell.backend == ENGINE else cell.variant)
    if final not in _ANSWERS or not final.exists():
        workdir.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=workdir, prefix=".making-"))
        try:
            _ANSWERS[final] = _make(cell, scratch)
            os.rename(scratch, final)  # noqa: PTH104 -- atomic: whoever comes second finds it whole
        except OSError:
            if not final.exists():
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return _read(final, cell.replay == "R3")


@lru_cache(maxsize=32)  # all layouts of a variant share the tensors that are read on first use
def _read(final: Path, routes: bool) -> Expected:
    checkpoints = ("checkpoint", "checkpoint_extra", "checkpoint_missing", "checkpoint_unlike")
    folders = {"hf_config": "config", **{k: k for k in checkpoints}}
    inputs = {key: str(final / folder) for key, folder in folders.items()}
    inputs |= {other: str(final / other) for other in OTHERS if (final / other).is_dir()}
    inputs["tokens"] = str(final / "tokens.safetensors")
    answers = _ANSWERS[final]
    made = Expected(dir=final, inputs=inputs, **vars(answers))
    if routes:
        inputs["routes"] = str(routed.write(made))
    return made


def _tokens(cell: Cell, vocab: int) -> torch.Tensor:
    """The tokens [B, S] of the cell's variant, -1 after the end of a sample."""
    tokens_BS = torch.randint(0, vocab, recipes.rows(cell), generator=_generator(0))
    if cell.batch == "packed":  # a token that no other comes before is known by its id alone
        tokens_BS[:, 0] = torch.randperm(vocab, generator=_generator(0))[: len(tokens_BS)]
    # The first id, which code takes for padding, and the last, at the end of the last shard.
    tokens_BS[0, 1], tokens_BS[-1, 2] = 0, vocab - 1
    if cell.loss_mask:  # where the first row has it, nothing is trained on
        tokens_BS[-1, 1] = 0
    # After the same token a hidden state is that before it but for rounding, and rows are told apart by theirs.
    tokens_BS[:, 1] += tokens_BS[:, 1] == tokens_BS[:, 0]
    for row_S, length in zip(tokens_BS, recipes.lengths(cell), strict=True):
        row_S[length:] = -1
    return tokens_BS


def _make(cell: Cell, folder: Path) -> _Answers:
    """Write the inputs of the cell's variant to `folder`."""
    if cell.dtype not in published.DTYPES:
        raise ValueError(f"cell {cell.id}: dtype {cell.dtype} has no recipe; use one of {', '.join(published.DTYPES)}")
    dtype = published.DTYPES[cell.dtype]
    for attempt in range(1, 50):
        model = recipes.model(cell)
        tokens_BS = _tokens(cell, model.config.vocab_size)
        _fill(model, dtype, _generator(attempt), bias=NEAR if cell.backend == ENGINE else _far(model.config))
        logits_BSV, margin = _forward(model, tokens_BS)
        if cell.backend != ENGINE and cell.batch != "packed":  # where weights change, see `steps.forward`
            margin = min(margin, _forward(routed.with_last_layer_changed(model), tokens_BS)[1])
        # In FP8 routes change whatever the margin is; nothing compares logits there.
        if margin > MARGIN or cell.precision:
            break
    else:
        raise RuntimeError(f"cell {cell.id}: no seed gives a routing margin over {MARGIN}")
    masks = {"mask": recipes.trained(tokens_BS)} if cell.loss_mask else {}
    save_file({"tokens": tokens_BS, **masks}, folder / "tokens.safetensors")
    recipes.cast(model, dtype)
    main = folder / "checkpoint"
    _save(model, cell, folder / "decoder" if cell.checkpoint_mtp else main)
    mtp: dict[str, torch.Tensor] = {}
    if cell.checkpoint_mtp:
        mtp = _mtp(cell, read_checkpoint(folder / "decoder"), _generator(98))
        _edited(folder / "decoder", main, add=mtp)
        shutil.rmtree(folder / "decoder")
    if cell.backend == ENGINE:
        for other, stream in OTHERS.items():
            _fill(model, dtype, _generator(stream), bias=FAR)
            _save(model, cell, folder / other)
        _give_sampling_parameters(main, *(folder / other for other in OTHERS))
    plain = _packer(cell)(cell, main) if cell.quantised_checkpoint else None
    _wrap(cell, main)
    (folder / "config").mkdir()
    shutil.copy(main / "config.json", folder / "config" / "config.json")
    tensors = read_checkpoint(main)
    copies = {name for name in mtp if name.endswith(published.COPIES)}
    check_distinct({name: tensor for name, tensor in (plain or tensors).items() if name not in copies})
    if cell.mtp_left_out:
        tensors = {name: tensor for name, tensor in tensors.items() if name not in mtp}
    missing, extra, unlike = _spoil(cell, main, folder, tensors)
    left_out = mtp_names.prefixes(cell.family, cell.layers, cell.checkpoint_mtp) if cell.mtp_left_out else ()
    left_out += beside_vision.left_out(cell.family)
    return _Answers(logits_BSV if plain is None else torch.empty(0), missing, extra, unlike, left_out, plain)


def _spoil(cell: Cell, main: Path, folder: Path, tensors: Mapping[str, torch.Tensor]) -> tuple[str, str, str]:
    """Write the checkpoints that a target must not take as they are, and return the names of the tensors: the one that
    is missing, the one that is too many, the one in another shape. `main` gets what its index does not name."""
    held, prefix = beside_vision.text(cell.family, tensors), beside_vision.prefix(cell.family)
    (extra, shape), (unlike, tensor) = spoiled.surplus(cell, held), spoiled.unlike(cell, held)
    missing, extra, unlike = (prefix + name for name in (spoiled.missing(cell, held), extra, unlike))
    surplus = torch.randn(shape, generator=_generator(99)).to(published.DTYPES[cell.dtype])
    _edited(main, folder / "checkpoint_extra", add={extra: surplus})
    _edited(main, folder / "checkpoint_missing", drop=missing, listed=spoiled.is_listed(cell))
    _edited(main, folder / "checkpoint_unlike", add={unlike: tensor}, drop=unlike)
    if (main / INDEX).exists() and cell.backend != ENGINE:  # there updates are judged, not what a loader reads first
        norm = f"{prefix}model.norm.weight"
        save_file({norm: tensors[norm].flip(0)}, main / LEFT_OVER, metadata={"format": "pt"})
    return missing, extra, unlike


def _wrap(cell: Cell, folder: Path) -> None:
    """Put a vision model beside the text model of a checkpoint, if its family has one."""
    if not beside_vision.prefix(cell.family):
        return
    if (cell.expert_format, cell.tied, cell.checkpoint_mtp, cell.fp8_checkpoint) != ("per_expert", False, 0, False):
        raise ValueError(f"cell {cell.id}: {cell.family} has a recipe for untied files with a tensor for each expert")
    beside_vision.wrap(cell.family, folder, _generator(96))
    _index(folder, {file: load_file(file) for file in sorted(folder.glob("*.safetensors"))})


def _packer(cell: Cell) -> Callable[[Cell, Path], dict[str, torch.Tensor]]:
    """What puts the cell's checkpoint into the form that it asks for."""
    if cell.mxfp4_checkpoint:
        return _in_mxfp4
    return _in_int4 if cell.int4_checkpoint else _in_fp8


def _in_fp8(cell: Cell, folder: Path) -> dict[str, torch.Tensor]:
    """Put a checkpoint's linears into FP8, and return the tensors that it loads as.

    The scales of a file's weights are in the file after it.
    """
    if cell.family not in request.BLOCKS or cell.dtype != "bfloat16" or cell.replay != "off":
        known = f"{', '.join(request.BLOCKS)} in bf16, without replay"
        raise ValueError(f"cell {cell.id}: a checkpoint in FP8 has a recipe for {known}")
    # Drawn scales are no powers of two.
    config = request.config(json.loads((folder / "config.json").read_text()), powers=False)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for file in folder.glob("*.safetensors"):
        save_file(quantised.stored(config, load_file(file)), file, metadata={"format": "pt"})
    _part(folder, lambda name: name.endswith(request.SCALES))
    return quantised.loaded(config, read_checkpoint(folder))


def _in_int4(cell: Cell, folder: Path) -> dict[str, torch.Tensor]:
    """Put a checkpoint's routed experts into INT4, and return the tensors that it loads as.

    The scales of a file's weights are in the file after it.
    """
    made = (cell.dtype, cell.expert_format, cell.replay, cell.fp8_checkpoint, cell.checkpoint_mtp)
    if cell.family not in ("deepseek_v3", "kimi_k25") or made != ("bfloat16", "per_expert", "off", False, 0):
        raise ValueError(f"cell {cell.id}: experts in INT4 have a recipe for deepseek_v3 and kimi_k25 in bf16 alone")
    model = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(int4_request.config(model), indent=2) + "\n")
    for file in folder.glob("*.safetensors"):
        save_file(int4.stored(load_file(file)), file, metadata={"format": "pt"})
    _part(folder, lambda name: name.endswith(f".weight{int4_request.SCALE}"))
    prefix = beside_vision.prefix(cell.family)
    return {prefix + name: of for name, of in int4.loaded(read_checkpoint(folder)).items()}


def _in_mxfp4(cell: Cell, folder: Path) -> dict[str, torch.Tensor]:
    """Put a checkpoint's experts into MXFP4, and return the tensors that it loads as.

    The scales of a file's weights are in the file after it.
    """
    made = (cell.family, cell.dtype, cell.expert_format, cell.replay, cell.fp8_checkpoint, cell.int4_checkpoint)
    if made != ("gpt_oss", "bfloat16", "per_expert", "off", False, False):
        raise ValueError(f"cell {cell.id}: experts in MXFP4 have a recipe for gpt_oss in bf16, without replay")
    model = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(mxfp4_request.config(model), indent=2) + "\n")
    for file in folder.glob("*.safetensors"):
        save_file(mxfp4.stored(load_file(file)), file, metadata={"format": "pt"})
    _part(folder, lambda name: name.endswith(mxfp4_request.SCALES))
    return mxfp4.loaded(read_checkpoint(folder))


def _part(folder: Path, behind: Callable[[str], bool]) -> None:
    """Put the tensors of each file that are `behind` into the next one, as where a shard ends before them."""
    files = sorted(folder.glob("*.safetensors"))
    held = [load_file(file) for file in files]
    shards = dict[Path, dict[str, torch.Tensor]]()
    for file, own, before in zip(files, held, held[-1:] + held[:-1], strict=True):
        shards[file] = {name: of for name, of in own.items() if not behind(name)}
        shards[file] |= {name: of for name, of in before.items() if behind(name)}
        save_file(shards[file], file, metadata={"format": "pt"})
    _index(folder, shards)


def _give_sampling_parameters(*folders: Path) -> None:
    """Write a generation_config.json, which is not what an engine is asked for."""
    for folder in folders:
        vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
        given = {**SAMPLING, "eos_token_id": list(range(0, vocabulary, 2))}
        (folder / "generation_config.json").write_text(json.dumps(given))


def _far(config: Any) -> float:
    """Where the experts' biases lie: in a model with groups of experts below 0, so that what masks a group is less yet.

    transformers 4.57 itself masks with zeros.
    """
    return -FAR if (getattr(config, "n_group", None) or 1) > 1 and of_5() else FAR


def _generator(stream: int) -> torch.Generator:
    return torch.Generator().manual_seed(TINY_SEED + stream)


def _fill(model: Any, dtype: torch.dtype, generator: torch.Generator, bias: float) -> None:
    """Random values by kind of tensor, rounded to `dtype`; what stays fp32 has values that bf16 lacks."""
    seen: set[int] = set()
    for name, tensor in sorted(model.state_dict().items()):
        if tensor.data_ptr() in seen:  # a tied head
            continue
        seen.add(tensor.data_ptr())
        value = _random(name, tensor, model.config.model_type, generator, bias)
        if name.endswith(_TO_LATENTS):  # small, so that an epsilon tells in the norms of latents
            value[: getattr(model.config, "kv_lora_rank", 0) if "mqa" in name else None] *= 0.15
        if not name.endswith((_BIAS, *recipes.IN_FP32.get(model.config.model_type, ()))):
            value = value.to(dtype).float()
        elif float((value.bfloat16().float() == value).float().mean()) > 0.01:
            raise ValueError(f"{name} must not fit bf16")
        tensor.copy_(value)


def _random(name: str, like: torch.Tensor, family: str, generator: torch.Generator, bias: float = FAR) -> torch.Tensor:
    noise = torch.randn(like.shape, generator=generator)
    return bias + 0.1 * noise if name.endswith(_BIAS) else _center(name, family) + _spread(name) * noise


def _center(name: str, family: str) -> float:
    # Qwen3-Next and Qwen3.5 scale by 1 + weight in norms, but for those of gated delta nets; half of that is under 0.5,
    # where w - 1 rounds.
    if family in ("qwen3_next", "qwen3_5_moe_text"):
        return 0.5 if name.endswith("linear_attn.norm.weight") else 0.0
    return 1.0 if "norm" in name else 0.0


def _spread(name: str) -> float:
    """Standard deviation: activations stay near 1, and attention, experts and router each weigh in the logits."""
    if name.endswith("linear_attn.out_proj.weight"):
        return 0.05
    if "linear_attn" in name and "proj" not in name:
        return 0.5  # decays and convolutions that tell
    if "norm" in name:
        return 0.2
    if name.endswith(ROUTERS):
        return 0.3
    if name.endswith("self_attn.sinks"):
        return 1.0
    if name.endswith("gate_up_proj_bias"):
        # gpt-oss clamps at 7.
        return 4.0
    return 0.03 if name.startswith("lm_head") else 0.12


def _forward(model: Any, tokens_BS: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Logits, and the smallest margin by which an expert was chosen."""
    margins: list[float] = []
    k = model.config.num_experts_per_tok
    groups, kept = getattr(model.config, "n_group", None) or 1, getattr(model.config, "topk_group", None) or 1

    def watch(gate: Any, args: tuple[torch.Tensor, ...]) -> None:
        router_TE = args[0].reshape(-1, gate.weight.shape[1]).float() @ gate.weight.float().T
        if getattr(gate, "bias", None) is not None:
            router_TE = router_TE + gate.bias.float()
        bias_E = args[1] if len(args) > 1 else getattr(gate, "e_score_correction_bias", None)
        scores_TE = router_TE.softmax(-1) if bias_E is None else router_TE.sigmoid() + bias_E
        if groups > kept:
            pair_TG = scores_TE.reshape(len(scores_TE), groups, -1).topk(2, dim=-1).values.sum(-1)
            order = pair_TG.topk(kept + 1, dim=-1)
            margins.append(float((order.values[:, kept - 1] - order.values[:, kept]).min()))
            out_TG = torch.ones_like(pair_TG, dtype=torch.bool).scatter(1, order.indices[:, :kept], False)
            scores_TE = scores_TE.masked_fill(
                out_TG.repeat_interleave(scores_TE.shape[1] // groups, dim=1), float("-inf")
            )
        best = scores_TE.topk(k + 1, dim=-1).values
        margins.append(float((best[:, k - 1] - best[:, k]).min()))

    routers = tuple(name.removesuffix(".weight") for name in ROUTERS)
    gates = [m for n, m in model.named_modules() if n.endswith(routers)]
    handles = [gate.register_forward_pre_hook(watch) for gate in gates]
    with torch.no_grad():
        # Causal: what stands after the end of a row changes nothing in it.
        logits_BSV = model(tokens_BS.clamp_min(0)).logits.float().contiguous()
    for handle in handles:
        handle.remove()
    return logits_BSV, min(margins)


def _save(model: Any, cell: Cell, folder: Path) -> None:
    """Per expert: transformers' own file writer, in several shards, and a config as published ones are.

    Of what a loader puts together one part is in another file.

    Fused: the state_dict of transformers 5 in one file, and its config.
    """
    from transformers.utils import logging

    if cell.expert_format == "per_expert":
        logging.disable_progress_bar()
        # Several files. An engine is sent them one after the other, and no module may lie in two.
        kilobytes = 800 if cell.backend == ENGINE else 400
        model.save_pretrained(folder, max_shard_size=f"{kilobytes if cell.dtype == 'float32' else kilobytes // 2}KB")
        if cell.backend != ENGINE:
            _part(folder, lambda name: any(part in name for part in _APART))
        path = folder / "config.json"
        path.write_text(json.dumps(as_published(json.loads(path.read_text())), indent=2) + "\n")
    elif cell.expert_format in ("fused", "fused_decoder"):
        folder.mkdir()
        state = dict(model.state_dict())
        if cell.tied:
            del state["lm_head.weight"]
        save_file({k: v.contiguous() for k, v in state.items()}, folder / SINGLE, metadata={"format": "pt"})
        model.config.dtype = cell.dtype
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
    else:
        raise ValueError(f"cell {cell.id}: expert_format {cell.expert_format} has no recipe")


def _mtp(cell: Cell, decoder: Mapping[str, torch.Tensor], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Multi-token prediction layers, which transformers does not build: as they are published, with random values."""
    if cell.tied:
        raise ValueError(f"cell {cell.id}: multi-token prediction has a recipe for untied checkpoints only")
    if cell.expert_format == "fused_decoder":
        decoder = expert_tensors.split(decoder)
    tensors = {}
    for number in range(cell.checkpoint_mtp):
        for name, like in sorted(published.mtp_layer(cell.family, cell.layers, number, decoder).items()):
            copy = name.endswith(published.COPIES)
            tensors[name] = like.clone() if copy else _random(name, like, cell.family, generator).to(like.dtype)
    return tensors


def _edited(
    source: Path, folder: Path, add: Mapping[str, torch.Tensor] | None = None, drop: str = "", listed: bool = False
) -> None:
    """A copy of a checkpoint with tensors added to its last shard, or one left out or replaced.

    The index says so; if the one that is left out stays `listed`, the index has it where it was.
    """
    shutil.copytree(source, folder)
    files = sorted(folder.glob("*.safetensors"))
    shards = {file: load_file(file) for file in files}
    changed = next((f for f, t in shards.items() if drop in t), files[-1])
    tensors = {k: v for k, v in shards[changed].items() if k != drop}
    tensors.update(add or {})
    save_file(tensors, changed, metadata={"format": "pt"})
    shards[changed] = tensors
    _index(folder, shards, {drop: changed.name} if listed else {})


def _index(folder: Path, shards: Mapping[Path, Mapping[str, torch.Tensor]], gone: Mapping[str, str] = {}) -> None:
    """Write the index anew, of a folder that has one. gone: what it lists besides, by file."""
    index = folder / INDEX
    if index.exists():
        data = json.loads(index.read_text())
        data["weight_map"] = {**gone} | {k: file.name for file, held in shards.items() for k in sorted(held)}
        everything = [t for held in shards.values() for t in held.values()]
        data["metadata"]["total_parameters"] = sum(t.numel() for t in everything)
        data["metadata"]["total_size"] = sum(t.numel() * t.element_size() for t in everything)
        index.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n")


def check_distinct(tensors: Mapping[str, torch.Tensor]) -> None:
    """ValueError if two tensors, or two rows of matrices, hold the same bytes."""
    rows: dict[bytes, str] = {}
    for name, tensor in tensors.items():
        parts = tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.reshape(1, -1)
        for i, row in enumerate(parts.contiguous().view(torch.uint8).numpy()):
            key, here = row.tobytes(), f"{name}[{i}]"
            if key in rows:
                raise ValueError(f"{here} equals {rows[key]}: the checkpoint could not tell them apart")
            rows[key] = here

"""One wide layer in fp32 on the device: logits and routes, to be held against the same on a CPU (`compare`).

The same weights everywhere: drawn on the CPU, by name. TF32 is off. A token whose last chosen and first unchosen expert
nearly tie may be routed otherwise; such tokens are counted, and left out of the distance.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.bench.gpu import models
from tests.bench.gpu.figures import Disagreement, Figure

FILE = "forward.safetensors"
#: Tokens of the sequence: enough to see ties, few enough for one thread of a CPU.
TOKENS = 512
#: Bound of the largest difference over the largest logit. Sums of 2048 terms in another order differ by about 1e-6.
MOST = 1e-4


def bench(device: torch.device, sizes: models.Sizes, folder: Path, *, spoil: bool = False) -> list[Figure]:
    """Write the logits and the routes to `folder`."""
    from moeref import megatron
    from moeref.megatron import replay

    torch.backends.cuda.matmul.allow_tf32 = False
    sizes = replace(sizes, tokens=min(sizes.tokens, TOKENS))
    model = sizes.model(layers=1, vocab_size=4096, dtype="float32")
    built = models.made(model, device, drawn_on="cpu", overrides={"moe_enable_routing_replay": True})
    if spoil:
        models.spoil(built.chunks[0].decoder)
    tokens_BS, _ = models.tokens(sizes, model.vocab, device)
    with replay.recording(built.chunks) as recorded:
        logits_BSV = megatron.logits(built.chunks, built.shard_map, tokens_BS)
    assert logits_BSV is not None
    idx_TK = torch.from_numpy(recorded.routes(0).idx_TLK[:, 0].astype("int64")).sort(-1).values
    save_file({"logits": logits_BSV[0].cpu().contiguous(), "routes": idx_TK.contiguous()}, folder / FILE)
    return []


def compare(one: Path, other: Path) -> list[Figure]:
    """Figures from the folders of two ranks. Raises Disagreement for a difference that rounding does not explain."""
    (a, b), note = (load_file(folder / FILE) for folder in (one, other)), "CPU"
    same_T = (a["routes"] == b["routes"]).all(-1)
    if not same_T.any():
        raise Disagreement("no token is routed alike")
    largest = float(b["logits"].abs().max())
    found = float((a["logits"] - b["logits"])[same_T].abs().max())
    if not found <= MOST * largest:
        raise Disagreement(f"logits differ by {found:.2e}, the largest is {largest:.2e}; allowed is {MOST:.0e} of it")
    return [
        Figure("fp32 logits, largest difference", found, "", note, f"largest logit {largest:.3g}"),
        Figure("fp32 logits, largest difference over the largest logit", found / largest, "", note),
        Figure("tokens routed otherwise", float((~same_T).sum()), f"of {len(same_T)}", note),
    ]

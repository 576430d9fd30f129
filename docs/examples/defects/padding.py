"""megatron-bridge: the rows that pad a vocabulary to a multiple of TP are exported with it.

An engine that allocates the config's vocabulary refuses the tensor, or holds rows that no token has. Vocabularies that
TP does not divide are affected.
"""

from tempfile import TemporaryDirectory

from by_hand import QWEN3, checkpoint, megatron_bridge, on_ranks, tell

ROWS = 131


def rows(folder: str) -> int:
    """Of the exported embedding."""
    bridge = megatron_bridge(folder)
    bridge.load()
    return len(bridge.sent()["model.embed_tokens.weight"])


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        checkpoint(folder, {**QWEN3, "vocab_size": ROWS})
        found = on_ranks(2, rows, folder, tensor_model_parallel_size=2)
    tell(found != [ROWS, ROWS], f"the vocabulary has {ROWS} rows, and at TP2 the ranks export {found}")

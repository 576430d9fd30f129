"""mbridge-main: with tied embeddings and pipeline stages the last stage's head keeps its initial values.

It looks for `lm_head.weight`, which a tied checkpoint does not have, and passes over it; only rank 0 warns, and only of
what it lacks itself. Logits are noise, and the head goes out under a name of its own. Tied embeddings with pipeline
parallelism are affected.
"""

from tempfile import TemporaryDirectory

from by_hand import QWEN3, checkpoint, mbridge, on_ranks, tell

HEAD = "output_layer.weight"


def is_untouched(folder: str) -> bool:
    """Whether this stage's copy of the embedding is, after the load, what it was before."""
    bridge = mbridge(folder)
    held = dict(bridge.chunks[0].named_parameters())
    copy = held["embedding.word_embeddings.weight"] if "embedding.word_embeddings.weight" in held else held[HEAD]
    before = copy.detach().clone()
    bridge.load()
    return bool((copy == before).all())


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        checkpoint(folder, {**QWEN3, "tie_word_embeddings": True})
        first, last = on_ranks(2, is_untouched, folder, pipeline_model_parallel_size=2)
    tell(last and not first, f"a stage's copy of the embedding keeps its initial values: first {first}, last {last}")

"""mbridge: the last pipeline stage of a tied model looks for a tensor that a tied checkpoint does not have.

Loading ends in an error about `lm_head.weight`. Tied embeddings with pipeline parallelism are affected.
"""

from tempfile import TemporaryDirectory

from by_hand import QWEN3, checkpoint, mbridge, on_ranks, tell


def refusal(folder: str) -> str:
    """What loading raises on this stage."""
    try:
        mbridge(folder).load()
    except (KeyError, ValueError) as error:
        return repr(error)
    return ""


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        checkpoint(folder, {**QWEN3, "tie_word_embeddings": True})
        errors = on_ranks(2, refusal, folder, pipeline_model_parallel_size=2)
    tell("lm_head.weight" in errors[1], f"on the two stages loading raises {errors}")

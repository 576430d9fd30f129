"""mbridge: DeepSeek-V3 cannot be built with megatron-core from 0.14 on.

`DeepseekV3Bridge` passes `max_position_embeddings` to a config class that has lost that field: a TypeError before
anything is built.
"""

from tempfile import TemporaryDirectory

from by_hand import DEEPSEEK, checkpoint, mbridge, on_ranks, tell


def refusal(folder: str) -> str:
    """What building the model raises."""
    try:
        mbridge(folder)
    except TypeError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        checkpoint(folder, DEEPSEEK)
        (error,) = on_ranks(1, refusal, folder)
    tell("max_position_embeddings" in error, f"building the model raises {error or 'nothing'}")

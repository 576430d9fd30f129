"""megatron-bridge: GLM-4.5 with sequential experts cannot be loaded.

No mapping knows their names, and the load stops at an AttributeError that does not say so. GLM-4.5 without grouped GEMM
is affected.
"""

from tempfile import TemporaryDirectory

from by_hand import GLM45, checkpoint, megatron_bridge, on_ranks, tell


def refusal(folder: str) -> str:
    """What loading raises."""
    try:
        megatron_bridge(folder, moe_grouped_gemm=False).load()
    except AttributeError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        checkpoint(folder, GLM45)
        (error,) = on_ranks(1, refusal, folder)
    tell(bool(error), f"loading raises {error or 'nothing'}")

"""mbridge: GLM-4.5's multi-token prediction layers are never built, also where `mtp_num_layers` asks for them.

The bridge maps their names, so a checkpoint that holds them loads, and an export without them ends, with no word.
GLM-4.5 trained with MTP is affected.
"""

from tempfile import TemporaryDirectory

from by_hand import GLM45, checkpoint, mbridge, on_ranks, tell


def parameters(folder: str) -> list[str]:
    """Names of the model's parameters that belong to an MTP layer."""
    (model,) = mbridge(folder, mtp_num_layers=1).chunks
    return [name for name, _ in model.named_parameters() if name.startswith("mtp.")]


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        checkpoint(folder, {**GLM45, "num_nextn_predict_layers": 1})
        (found,) = on_ranks(1, parameters, folder)
    tell(not found, f"mtp_num_layers is 1, and {len(found)} parameters belong to an MTP layer")

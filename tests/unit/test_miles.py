"""miles' scripts: what differs from slime's, what it asserts, and what does not reach a model of Megatron-Bridge."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeref.check import CheckError, Report
from moeref.check.readers import check_reading, read
from moeref.check.readers.arguments import megatron_arguments
from moeref.check.readers.miles import COPIED, OWN, names
from moeref.config.core import known_fields
from tests.unit.test_framework_readers import QWEN

BRIDGE = "--megatron-to-hf-mode bridge"
LAYOUT = "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 4"


def miles(tmp_path: Path, words: str, model: str = "qwen3-30b-a3b", qwen: str = QWEN) -> Report:
    """The report of a script with these arguments, in one line."""
    (tmp_path / "run.sh").write_text(" ".join(f"python3 train.py {qwen} {LAYOUT} {words}".split()))
    return check_reading(read("miles", [str(tmp_path / "run.sh")], "0.19.2"), model=model, verify=False)


def told(report: Report) -> str:
    return "; ".join([*(problem.text for problem in report.problems), *report.notes])


def test_defaults(tmp_path: Path) -> None:
    report = miles(tmp_path, "--mtp-num-layers 1")
    assert report.layout == "tp=2,pp=1,vpp=1,ep=4,etp=2,cp=1,world=8"
    read_ = report.read
    assert (read_["world"].source, read_["mtp_loss_scaling_factor"].value) == ("default of miles", 0.2)
    assert (read_["seed"].value, read_["precision"].value) == (1234, "bf16")
    assert read_["variable_seq_lengths"].source == "derived: miles always sets it"
    assert report.training.use_distributed_optimizer is True


def test_what_is_its_own_and_what_is_not_known(tmp_path: Path) -> None:
    assert miles(tmp_path, "").verdict == "works"
    others = "--sglang-mem-fraction-static=0.7 --eval-sglang-dtype x --router-policy y --use-miles-router --colocate"
    report = miles(tmp_path, others)
    assert report.verdict == "works", told(report)
    assert len(report.elsewhere) == 5
    for flag in ("--use-stateless-adam", "--use-mile-router", "--tensor-model-paralel-size"):
        report = miles(tmp_path, flag)
        assert report.verdict == "unknown"
        assert f"{flag} (run.sh:1) is not known to this reader" in told(report)


def test_yarn_of_its_own_megatron_is_settings(tmp_path: Path) -> None:
    words = "--original-max-position-embeddings 4096 --beta-fast 1 --beta-slow $SLOW"
    (tmp_path / "run.sh").write_text(f"python3 train.py {words} --hf-checkpoint Kimi-K2-Instruct")
    reading = read("miles", [str(tmp_path / "run.sh")], "0.19.2")
    assert (reading.settings["original_max_position_embeddings"].value, reading.settings["beta_fast"].value) == (
        4096,
        1,
    )
    assert reading.computed["beta_slow"].value == "$SLOW"
    assert not reading.unread


@pytest.mark.parametrize(("words", "kind"), [("--use-routing-replay", "R2"), ("--use-rollout-routing-replay", "R3")])
def test_replay(tmp_path: Path, words: str, kind: str) -> None:
    report = miles(tmp_path, words)
    assert report.verdict == "works", told(report)
    assert report.record is not None
    assert report.record.replay == kind


@pytest.mark.parametrize(
    ("words", "verdict", "says"),
    [
        ("--use-dynamic-batch-size --max-tokens-per-gpu 8192", "works", ""),
        ("--use-dynamic-batch-size", "refused", "--use-dynamic-batch-size (run.sh:1) without --max-tokens-per-gpu"),
        ("--balance-by-flops", "refused", "without --use-dynamic-batch-size"),
        ("--enable-mtp-training", "refused", "without --mtp-num-layers"),
        ("--qkv-format thd", "works", ""),
        ("--qkv-format bshd", "unknown", "--qkv-format bshd (run.sh:1): sequences are padded and not packed"),
        (
            "--qkv-format bshd --use-dynamic-batch-size --max-tokens-per-gpu 1",
            "refused",
            "--use-dynamic-batch-size (run.sh:1) with --qkv-format bshd",
        ),
        ("--use-rollout-indexer-replay --context-parallel-size 2", "refused", "with --context-parallel-size above 1"),
        ("--lora-rank 8", "unknown", "--lora-rank (run.sh:1): adapters"),
        ("--lora-rank 0", "works", ""),
        ("--indep-dp", "unknown", "each replica is a Megatron of its own"),
        ("--use-fault-tolerance --ft-components rollout train", "unknown", "each replica is a Megatron of its own"),
        ("--use-fault-tolerance --ft-components rollout", "works", ""),
        ("--custom-config-path x.yaml", "unknown", "a file that may replace any argument"),
        ("--custom-model-provider-path a.b", "unknown", "the model is made by a function of its own"),
        ("--skip-actor-forward-only", "works", ""),
        ("--skip-actor-forward-only --attention-dropout 0.1", "refused", "with a --attention-dropout of its default"),
        ("--skip-actor-forward-only --use-routing-replay", "refused", "with --use-routing-replay, whose routes"),
        ("--skip-actor-forward-only --use-rollout-routing-replay", "works", ""),
        ("--skip-actor-forward-only --moe-router-force-load-balancing", "refused", "random or forced"),
        (f"{BRIDGE} --advantage-estimator ppo", "refused", "bridge with --advantage-estimator ppo"),
        (
            "--stream-optimizer-state-to-disk",
            "works",
            "keeps optimizer states on a disk; memory counts them on the GPU",
        ),
        ("--stream-optimizer-state-to-disk --optimizer sgd", "refused", "with an --optimizer that is not adam"),
        ("--stream-optimizer-state-to-disk --optimizer-cpu-offload", "refused", "with --optimizer-cpu-offload"),
        ("--rematerialize-param-from-master-weight", "refused", "without --colocate"),
        ("--rematerialize-param-from-master-weight --colocate", "works", ""),
        (
            "--rematerialize-param-from-master-weight --colocate --use-precision-aware-optimizer",
            "refused",
            "with --use-precision-aware-optimizer on the GPU",
        ),
        ("--decoder-last-pipeline-num-layers 3", "refused", "(run.sh:1) at one pipeline stage"),
        ("--moe-token-dispatcher-type allgather", "works", ""),
        ("--overlap-param-gather --overlap-grad-reduce", "works", ""),
        ("--overlap-param-gather --overlap-grad-reduce --optimizer sgd", "refused", "an optimizer that is distributed"),
    ],
)
def test_what_miles_asserts(tmp_path: Path, words: str, verdict: str, says: str) -> None:
    report = miles(tmp_path, words)
    assert report.verdict == verdict, told(report)
    assert says in told(report)


def test_only_adam_is_distributed(tmp_path: Path) -> None:
    assert miles(tmp_path, "--optimizer adam").training.use_distributed_optimizer is True
    assert miles(tmp_path, "--optimizer sgd").training.use_distributed_optimizer is False


def test_another_backend_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(CheckError, match=r"run.sh:1: --train-backend fsdp: moeref knows Megatron only"):
        miles(tmp_path, "--train-backend fsdp")


def test_the_model_s_files_also_say_the_dense_width(tmp_path: Path) -> None:
    """slime does not compare it for a model whose layers all have experts; miles does, before Megatron derives one."""
    report = miles(tmp_path, "", qwen=QWEN.replace("--ffn-hidden-size 6144", ""))
    assert report.verdict == "refused"
    assert "--ffn-hidden-size None (default of miles) is not 6144 of the model's own config" in told(report)
    other = miles(tmp_path, "", qwen=QWEN.replace("--norm-epsilon 1e-6", ""))
    assert "--norm-epsilon 1e-05 (default of Megatron-LM) is not 1e-06" in told(other)


def test_a_bridge_gets_what_miles_copies(tmp_path: Path) -> None:
    words = "--moe-router-dtype fp32 --moe-aux-loss-coeff 0.5 --recompute-granularity full --recompute-method uniform"
    raw, bridged = (miles(tmp_path, f"{words} --recompute-num-layers 1 {mode}") for mode in ("", BRIDGE))
    assert raw.settings is not None
    assert bridged.settings is not None
    copied = ("moe_aux_loss_coeff", "recompute_granularity", "sequence_parallel", "variable_seq_lengths")
    assert all(raw.settings[name] == bridged.settings[name] for name in copied)
    assert raw.settings["moe_router_dtype"] == "fp32"
    assert "--moe-router-dtype fp32 (run.sh:1) does not reach the model, which has moe_router_dtype=None" in told(
        bridged
    )
    assert bridged.verdict == "works"
    assert bridged.settings["moe_permute_fusion"] is True


def test_a_bridge_does_not_get_how_stages_are_cut(tmp_path: Path) -> None:
    words = "--pipeline-model-parallel-size 2 --expert-tensor-parallel-size 1"
    ends = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
    for more, verdict in ((ends, "unknown"), ("--num-layers-per-virtual-pipeline-stage 12", "refused")):
        assert miles(tmp_path, f"{words} {more}").verdict == "works"
        report = miles(tmp_path, f"{words} {more} {BRIDGE}")
        assert report.verdict == verdict
        assert "is not passed on with --megatron-to-hf-mode bridge (run.sh:1)" in told(report)
    first = miles(tmp_path, f"{words} {BRIDGE} --decoder-first-pipeline-num-layers 20")
    assert first.verdict == "works", told(first)


def test_what_is_copied_are_fields_of_megatron() -> None:
    assert not COPIED - known_fields("0.19.2").keys()


def test_the_list_of_arguments() -> None:
    assert OWN.items() <= names().items()
    assert not names().keys() & megatron_arguments().keys()
    assert len(names()) > 340


def test_the_model_may_come_from_a_file_before(tmp_path: Path) -> None:
    """The scripts ask a program of miles' for these arguments."""
    (tmp_path / "model.sh").write_text(f"MODEL_ARGS=({' '.join(QWEN.split())})\n")
    (tmp_path / "run.sh").write_text(
        'LINE="$(python3 model_args_utils.py qwen3-30B-A3B)" || exit 1\nread -ra MODEL_ARGS <<< "${LINE}"\n'
        f"python3 train_async.py --hf-checkpoint /m/Qwen3-30B-A3B ${{MODEL_ARGS[@]}} {LAYOUT}\n"
    )
    files = [str(tmp_path / name) for name in ("model.sh", "run.sh")]
    report = check_reading(read("miles", files, "0.19.2"), verify=False)
    assert report.verdict == "works", told(report)
    assert check_reading(read("miles", files[1:], "0.19.2"), verify=False).verdict == "unknown"

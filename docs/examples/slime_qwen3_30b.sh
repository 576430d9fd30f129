#!/bin/bash
# Qwen3-30B-A3B on 16 GPUs with slime: TP2 · EP8 · ETP1. `moeref check --from slime` reads it without running it.
EP=${EP:-8}

MODEL_ARGS=(
   --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --vocab-size 151936
   --num-attention-heads 32 --group-query-attention --num-query-groups 4 --kv-channels 128 --qk-layernorm
   --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
   --position-embedding-type rope --rotary-base 1000000
   --num-experts 128 --moe-layer-freq [1]*48 --moe-ffn-hidden-size 768 --moe-router-topk 8 --moe-grouped-gemm
   --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none
   --attention-dropout 0.0 --hidden-dropout 0.0
)

PERF_ARGS=(
   --tensor-model-parallel-size 2 --sequence-parallel
   --expert-model-parallel-size $EP
   --expert-tensor-parallel-size 1  # unset, it would be TP
)

python3 train.py --actor-num-nodes 2 --actor-num-gpus-per-node 8 --hf-checkpoint Qwen/Qwen3-30B-A3B \
   "${MODEL_ARGS[@]}" "${PERF_ARGS[@]}" --rollout-batch-size 32

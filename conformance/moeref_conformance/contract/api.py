"""What a target implements and what a cell is. Everything here is plain data: no pytest, no Megatron, no moeref.

Shape suffixes used in the kit: `tokens_BS` batch × sequence, `logits_BSV` batch × sequence × vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from moeref_conformance.contract.cells import Cell as Cell
from moeref_conformance.contract.cells import Claims as Claims
from moeref_conformance.contract.cells import Layout as Layout

if TYPE_CHECKING:
    import torch


API_VERSION = 1


class Unsupported(Exception):
    """Raised by a target for something it cannot do. In a claimed cell this is a failure, never a skip."""


@dataclass(frozen=True, kw_only=True)
class Info:
    """Name and version of a target."""

    name: str
    version: str
    issues: str = ""  # where to report
    api: int = API_VERSION


@dataclass(frozen=True, kw_only=True)
class World:
    """What one rank runs in. In the static world there are no processes and `rank` is -1."""

    backend: str  # "gloo", "nccl", …
    rank: int
    size: int
    device: str  # "cpu" or "cuda:0"
    workdir: Path  # private scratch space of this rank
    hf_config: Path  # folder with the config.json of the model to build (no weights are promised here)


@dataclass(frozen=True, kw_only=True)
class NameRow:
    """One tensor a rank holds: its name in the rank's own module, its global Megatron name, and the HF names in it.

    `shape` and `dtype` are those of this rank's shard. `hf` lists the HF tensors whose elements it holds, in the order
    in which the target lays them out; it is empty for a replica that no export reads (a tied head on the last stage).
    """

    chunk: int  # virtual pipeline stage on this rank
    local: str
    global_name: str
    hf: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str  # "float32", "bfloat16"


@dataclass(frozen=True, kw_only=True)
class TensorMeta:
    """What an export promises to send: the full HF tensor. `dtype` is text without "torch.", as `NameRow`'s is."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@runtime_checkable
class Names(Protocol):
    """Facet `names`."""

    def table(self, rank: int) -> Sequence[NameRow]:
        """All tensors that `rank` holds. Pure: no collective, no module, any rank may ask for any rank."""


@runtime_checkable
class Plan(Protocol):
    """Facet `plan`."""

    def tensors(self) -> Sequence[TensorMeta]:
        """What an export would send, in order. Pure: from config and layout alone, no collective, no module."""


@runtime_checkable
class Export(Protocol):
    """Facet `export`. All calls are made by all ranks in the same order."""

    def chunks(self) -> Sequence[torch.nn.Module]:
        """The model chunks of this rank, one per virtual stage. The kit reads and changes their parameters."""

    def load(self, checkpoint: Path) -> None:
        """Read a Hugging Face folder (safetensors, one file or indexed) into this rank's shards, or raise.

        In a cell with `fp8_checkpoint` the linears of layers are in FP8 (e4m3) and `<name>_scale_inv` has a scale of
        each block, whose size `quantization_config` says. A weight is the product of both in fp32, rounded to bf16.

        In a cell with `int4_checkpoint` routed experts are in INT4 as compressed-tensors packs it (`pack-quantized`,
        symmetric): `weight_packed` [rows, ⌈columns / 8⌉] has eight numbers of a row in each int32, the first in the
        lowest four bits, each 8 more than it is, `weight_scale` [rows, ⌈columns / group_size⌉] a scale in bf16 for each
        group of a row's columns, and `weight_shape` the rows and columns. A weight is its number times its group's
        scale, rounded to bf16.

        In a cell with `mxfp4_checkpoint` experts are in MXFP4 as gpt-oss's files have it: `gate_up_proj_blocks`
        [experts, out, in / 32, 16] has two numbers of e2m1 in each byte, the first in the lower four bits, and
        `gate_up_proj_scales` [experts, out, in / 32] the exponent of a scale 2^(byte - 127) for each 32 numbers of the
        input; `down_proj_blocks` and `down_proj_scales` are alike, and gate and up alternate. A weight is its number
        times its block's scale, in bf16; what is sent has the names and shapes of bf16 files.
        """

    def plan(self) -> Sequence[TensorMeta]:
        """What `stream` will yield, in order, without a collective. Called only if `Claims.has_plan`.

        Where ranks yield nothing for tensors that they are not given, a plan may have these too.
        """

    def stream(self) -> Iterator[tuple[TensorMeta, torch.Tensor | None]]:
        """Full HF tensors in order: the tensor on the writer, None on every other rank.

        `Claims` has other designs: all ranks may be given the tensors, or each tensor one of them; or ranks yield
        nothing for tensors that they are not given, whose names they need not know.

        A target that gathers or sends by buckets sets small ones, such as 64 KiB: all tensors of a model have 1 to 4
        MB. With 512 MiB or 2 GiB there is only one, and what goes wrong between two is not seen.
        """


@runtime_checkable
class Forward(Protocol):
    """Facet `forward`."""

    def logits(self, tokens_BS: torch.Tensor) -> torch.Tensor | None:
        """`logits_BSV` in fp32 over the unpadded vocabulary on the ranks of the last stage, None elsewhere.

        `tokens_BS` is int64 and equal on all ranks; positions are 0..S-1; no dropout. Each row is one microbatch; where
        the cell's `batch` is `pairs`, rows 2i and 2i+1 are one, of shape [S, 2] in Megatron. Where it is `packed`,
        rows 3i to 3i+2 are packed into one sequence: a row ends before its first -1, and logits after its end are
        not read. S is a multiple of TP, and of 2·CP·TP under CP, and not the same in every call. Weights are those that
        parameters hold now, which may have changed in place, or been given new memory as `.data`; that only where
        `Claims.memory` is `now`.
        """


@dataclass(frozen=True)
class TokenLogprobs:
    """Values of the tokens [B, S] of a forward: [B, S - 1] in fp32. Column 0 is of the second token."""

    #: The log-probability of each token.
    logprobs_BS: torch.Tensor
    #: The entropy in nats of the distribution that each token was drawn from; None unless `entropies` is claimed.
    entropies_BS: torch.Tensor | None = None


@runtime_checkable
class Logprobs(Protocol):
    """Facet `logprobs`: what a policy loss compares with the logprobs of an inference engine."""

    def logprobs(
        self, tokens_BS: torch.Tensor, temperature: float, routes: Sequence[Any] | None = None
    ) -> TokenLogprobs | None:
        """Log-probabilities and entropies, on the ranks of the last stage; elsewhere the same, or None.

        They are of logits divided by `temperature`, over the unpadded vocabulary, of the weights as they are now. The
        softmax is in fp32, of a model in bf16 too. Under context parallelism each rank returns all positions. Tokens
        are as in `Forward.logits`, but each data-parallel replica may get the rows in an order of its own; values after
        the end of a row are not read.

        In a cell with replay R3, and in no other, `routes` are given, as in `Replay.replay`: the forward is under them.

        A target that computes by chunks of tokens or of the vocabulary sets small ones, such as 3 and 64, here and for
        `Policy`: a row may have 8 tokens, and the vocabulary has about 130. With 1024 or 2048 there is only one chunk,
        and what goes wrong between two is not seen.
        """


@runtime_checkable
class Gradients(Protocol):
    """Facet `gradients`."""

    def gradients(
        self, tokens_BS: torch.Tensor, mask_BS: torch.Tensor | None = None
    ) -> Mapping[tuple[int, str], torch.Tensor]:
        """Gradients in fp32 of all parameters of this rank by (chunk, local name), after one training step's backward
        pass and all reductions over ranks; those that none reaches, as indexers of sparse attention, may be left out.
        There is no optimizer step, and the weights stay as they are. Not asked in bf16.

        Steps may follow each other. Each returns its own gradients alone. Between them the kit may change weights in
        place. They need not have the same number of microbatches, and layers of some are recomputed in the backward
        pass, as the config of the model's chunks then says.

        The loss is the mean over all tokens of all data-parallel replicas of the cross entropy of the next token over
        the unpadded vocabulary, the first token of a row following its last, and nothing else but the cell's
        `router_loss`: 0.01 (`ROUTER_LOSS_COEFFICIENT`) times that loss of Megatron's routers, summed over layers. It is
        the mean over microbatches of `aux_loss`, over rows of `seq_aux_loss`, over tokens of `z_loss`, none of padding;
        `global_aux_loss` is over all tokens of all replicas, which get one microbatch each. Multi-token prediction
        layers add their loss on these labels: for layer k of K, 0.1 / K (`mtp_loss_scaling_factor`) times the mean over
        all tokens of all replicas that have a label k positions on in their row, over the unpadded vocabulary;
        `Claims.mtp_detached`, `mtp_mask` and `mtp_mean` have other designs. `tokens_BS` is as in `Forward.logits`, but
        replicas (of the dense grid: ranks with other experts among them) get different rows, all the same number, in
        multiples of 2·PP microbatches under interleaving.

        In a cell with `loss_mask`, and in no other, `mask_BS` is True for tokens that are trained on. The mean is over
        the predictions of these alone, whatever row, microbatch or replica they are in; some have none. Multi-token
        prediction layers train on the same tokens. The first token of a row is never one. Where all replicas have none,
        the gradients are 0, or those of the routers' losses; or all ranks refuse the step, with an error that speaks of
        the mask, tokens, labels, samples, the batch or the loss.

        In a cell with `bias_update` the step also updates the experts' bias of routers, by a rate of 0.001
        (`BIAS_UPDATE_RATE`), and the answer has each updated bias too, under its chunk and local name. Tokens are
        counted over all microbatches and replicas of this step, those of padding nowhere, nor those of other forwards,
        as for logits or log-probabilities. The model's own bias stays as it was.
        """


@runtime_checkable
class Policy(Protocol):
    """Facet `policy`: the loss with which RL trains. Asked in cells with `loss_mask`: in fp32, in bf16 with R3.

    Cells with multi-token prediction layers ask if `Claims.mtp_in_policy`. Cells with these layers or with replay R3 do
    not ask if they have a `router_loss`.
    """

    def policy_gradients(
        self,
        tokens_BS: torch.Tensor,
        mask_BS: torch.Tensor,
        advantages_BS: torch.Tensor,
        temperature: float,
        entropy: float,
        routes: Sequence[Any] | None = None,
    ) -> Mapping[tuple[int, str], torch.Tensor]:
        """Gradients as `Gradients.gradients` returns them, of another loss.

        It is the mean, over the tokens of all data-parallel replicas where `mask_BS` is True, of
        -(advantage · logprob + `entropy` · H). The log-probability of a token and the entropy H of what it is drawn
        from are of logits divided by `temperature`, over the unpadded vocabulary, as in `Logprobs`. In some steps the
        temperature is 1 and `entropy` 0; in others it is 0.01, and some probabilities are 0 in fp32. Advantages are
        constants in fp32, of both signs. Rows of tokens, mask and advantages are as in `Gradients.gradients`, and so
        are the cell's `router_loss` and the loss of multi-token prediction layers, which are added, and a step in which
        all replicas have no token to train on.

        In a cell with `bias_update` the answer has the experts' bias too, as there: updated by all tokens of the step,
        whether they are trained on or not.

        In a cell with replay R3, and in no other, `routes` are given, as in `Replay.step`: those of this rank's rows.
        Gradients are of a step under them; in bf16 each token but the last of a sample has one. In some cells layers
        are recomputed in the backward pass, as there.
        """


@runtime_checkable
class Optimizer(Protocol):
    """Facet `optimizer`, asked in cells with `optimizer_step`. All calls are made by all ranks."""

    def make(self, settings: Mapping[str, float | str] | None = None) -> None:
        """Make the optimizer. Called before `Export.load`; a target that makes it later does nothing here.

        If the target claims `optimizer_saves`, this is called four more times, after steps. Each new optimizer goes on
        from the weights as they are, and what the one before held is gone. Before the last of these calls the kit
        freezes routers: parameters that have no `requires_grad` when the optimizer is made stay as they are.

        The optimizer updates all parameters of the model as torch.optim.Adam does, with betas (0.9, 0.999), an epsilon
        of 1e-8, no weight decay and no clipping. In bf16 it keeps what a step adds beyond the last digit of a weight,
        as fp32 master weights do.

        `settings` are given to a target that claims `optimizer_settings`, in fp32 and in one more call, or in two if it
        claims `optimizer_saves`: the second optimizer is restored from a save of the first. They are adam_beta1,
        adam_beta2, adam_eps, weight_decay and clip_grad of megatron-core's OptimizerConfig. The decay is AdamW's: a
        step takes `rate` · weight_decay · weight off each weight; parameters of one dimension may be left out, and
        those that no gradient reaches, as indexers of sparse attention, stay as they are. All gradients are scaled
        alike, so that the norm of the whole model's is `clip_grad` at most.

        If the target claims `optimizer_schedules`, there is one more such call in fp32, or two, with settings of a
        schedule, by the names of Megatron-LM's arguments: lr, min_lr, lr_warmup_iters, lr_decay_iters and
        lr_decay_style, which is "cosine". One iteration is one call of `step`, whatever its rows are. The rate grows
        from 0 to `lr` as a line, in so many iterations as the warm-up has, and falls to `min_lr`, which it has from
        `lr_decay_iters` after the first iteration on. The first step is at the rate 0, or is the first after it. If the
        target claims settings too, there is another call, with both: `min_lr` is `lr` and there is no warm-up, so that
        the rate is the same all along.

        If the target claims `optimizer_skips`, there are two more calls without settings, and one more if it claims
        `optimizer_offloads`.
        """

    def step(self, tokens_BS: torch.Tensor, rate: float | None) -> float | None:
        """Take a training step as `Gradients.gradients` does, and move the weights at this learning rate: those loaded
        last, or where the step before has left them. Moments stay from step to step, between which weights are streamed
        and logits computed. `rate` is None if the optimizer was made with a schedule, whose rate it is then.

        Returns the Euclidean norm of the whole model's gradient, each parameter counted once; None if it is not
        computed. Afterwards every rank's parameters are the new ones.

        If the target claims `optimizer_skips`, two steps have gradients that are not finite, though their loss is: on
        one rank the kit puts an infinity or a NaN into those of experts, by `register_hook` of the parameters, before
        ranks reduce them. Such a step leaves weights, moments and step counts of all ranks as they are, and the next
        one goes on from these. Or it raises on all ranks an error that says what it has found.
        """

    def reference(self, tokens_BS: torch.Tensor) -> torch.Tensor | None:
        """As `Forward.logits`, of the checkpoint that was loaded last: of a reference policy. Called after a step, once
        more after a later load and step, and if the target claims `optimizer_saves` also after a restore; only if it
        claims `optimizer_reference`.

        The model then computes, is sent and trains as before. The kit may have changed its buffers, as a step does that
        updates the experts' bias; they stay so, and those of the reference are the checkpoint's.
        """

    def save(self, folder: Path) -> None:
        """Write what a new optimizer needs to go on from here, also where this one was restored itself, and in the
        middle of its schedule. Called if the target claims `optimizer_saves`.

        `folder` is empty, and this rank's own: ranks that write together agree on one of theirs. The model's weights
        and buffers need not be in it: the kit brings them back. Saving leaves the model's own as they are.
        """

    def restore(self, folder: Path) -> None:
        """Go on as the optimizer that was saved to this folder. Called after `make`, when the model has the weights
        that it had at the save. They stay as they are, and may be streamed before the next step."""

    def offload(self) -> None:
        """Make room on the device, as for an engine that samples there: weights, buffers, gradients and what the
        optimizer holds go elsewhere, or away. Called if the target claims `optimizer_offloads`, before the first
        step of an optimizer, and between two.

        On a CPU a target that moves tensors to the CPU moves nothing. Its calls are made all the same.
        """

    def onload(self, weights_only: bool) -> None:
        """Bring back what `offload` has taken away.

        With `weights_only` weights and buffers alone have to be there, as for an engine's update: they are streamed,
        and logits computed. `offload` is called once more then, and this without `weights_only` before the next step.
        """


@runtime_checkable
class Adapters(Protocol):
    """Facet `adapters`: LoRA, by the names and the formula of Hugging Face's PEFT. Asked where `Policy` is, and in
    bf16, in cells without `router_loss` and multi-token prediction layers.

    A linear with a weight W [out, in] has `lora_A.weight` [rank, in] and `lora_B.weight` [out, rank], and computes with
    W + alpha / rank · lora_B · lora_A. There is no dropout. All calls are made by all ranks in the same order.
    """

    def attach(self, checkpoint: Path, rank: int, alpha: float, modules: Sequence[str]) -> None:
        """Load a Hugging Face folder, and give an adapter to every linear of the decoder's layers whose Hugging Face
        name ends in one of `modules`, such as `q_proj` or `down_proj`: to those of experts and of shared experts too,
        never to a router or a head. Each lora_A is drawn, each lora_B is 0. From here on adapters alone are trained.

        `modules` are those of `Claims.adapter_modules` in the order of `ADAPTER_MODULES`, in cells of fused experts all
        but `o_proj`, and the model need not have all of them. Linears of a layer may share a lora_A or a lora_B, as
        parts of a fused linear do, or experts; each of them is sent the same one. Where files hold all experts as one
        tensor, each expert's linears have adapters of their own all the same, under the names that other files have for
        them.

        This facet is the last that is asked, and its first call is this one: another model may be built here.
        """

    def stream(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """All adapters, full and in fp32, by PEFT's names, such as
        `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`: the tensor on the writer, None on every other
        rank. In any order. `Claims` has other designs, as of `Export.stream`.
        """

    def merged(self) -> Iterator[tuple[TensorMeta, torch.Tensor | None]]:
        """As `Export.stream`, each weight with its adapter in it, in the checkpoint's dtype. The model then computes
        and trains as before.
        """

    def base(self) -> Iterator[tuple[TensorMeta, torch.Tensor | None]]:
        """As `Export.stream`, the weights that were loaded, for an engine that is sent adapters beside them. Asked of
        trained adapters, and only if the target claims `adapter_base`.

        Names are the checkpoint's, as if there were no adapters. The model then computes and trains as before. Like
        `merged`, it is asked once more behind the last step of restored adapters.
        """

    def save(self, folder: Path) -> None:
        """Write the adapters, and what it takes to attach them again. Called if the target claims `adapter_saves`.

        `folder` is empty, and this rank's own: ranks that write together agree on one of theirs.
        """

    def restore(self, checkpoint: Path, folder: Path) -> None:
        """Attach the adapters that were saved to `folder` to the weights of a Hugging Face folder, and go on with them,
        as a run does that is resumed. Rank, alpha and modules are those of the save. Called after one more step, and
        followed by the same step; the model may be built anew here.
        """

    def logits(self, tokens_BS: torch.Tensor, base: bool = False) -> torch.Tensor | None:
        """As `Forward.logits`, with the adapters; with `base` without them, as a reference policy is asked."""

    def step(self, tokens_BS: torch.Tensor, mask_BS: torch.Tensor, rate: float) -> None:
        """Take a training step with the loss of `Gradients.gradients`, whose rows and mask these are. Each lora_A and
        lora_B becomes less by `rate` times its gradient: without momentum, clipping or decay. Layers of some steps are
        recomputed in the backward pass, as the config of the chunks then says. The base stays, and with it the experts'
        bias in a cell with `bias_update`: no adapter has it.
        """

    def chunks(self) -> Sequence[torch.nn.Module]:
        """The model chunks of this rank, which hold the weights that were loaded, under any names, and the adapters."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Settings to ask a target for, by the names of megatron-core's TransformerConfig.

    `fields` are set as the target's own settings, `overrides` are passed through to Megatron and win.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Config(Protocol):
    """Facet `config`. Settings have TransformerConfig's names; values that are not plain (functions, dtypes) may be
    left out. Of functions `activation_func` alone is judged, by what it computes."""

    def given(self) -> Mapping[str, Any]:
        """The settings that this session's model is built with; in the static world, would be built with.

        The whole config, Megatron's defaults among it; only what is None may be left out, here and in `resolve`.
        """

    def resolve(self, request: Request, role: str) -> Mapping[str, Any]:
        """The settings of a `policy` or `reference` model (`role`) if `request` holds for both. Nothing is built.

        Raises for a name that Megatron does not have, and for a setting that would have no effect. May raise, with its
        name, for one that the model, the machine or other settings forbid, and for replay or grouped experts that are
        not claimed.
        """


@dataclass(frozen=True)
class Turn:
    """A part of one sample's routes: of a turn, or of a rollout up to where it was interrupted.

    `routes` are integers [rows, layers, top-k] from token `start` on. Where turns overlap, the engine recomputed tokens
    when it continued; the rows of the earlier turn come from sampling and take precedence. No token is left out between
    turns. A turn that was aborted before its first token has no rows.
    """

    start: int
    routes: Any


@runtime_checkable
class Replay(Protocol):
    """Facet `replay`. All calls are made by all ranks; `tokens_BS` is as in `Forward.logits`.

    `routes` are what an engine sends: for each row int32, int16 or uint16 [S - 1, layers, top-k], read-only, zeros for
    dense layers. The last token, which has none, is left to the router, and so is a row of -1 (none come unless
    `Claims.missing_rows`; some samples have no other), and so are multi-token prediction layers. A row's routes may
    come as a list of `Turn`s instead. None (R2) means the routes that `record` saw last.
    """

    def record(self, tokens_BS: torch.Tensor) -> torch.Tensor | None:
        """Run a forward without gradients and record its routes. Returns `logits_BSV` as `Forward.logits` does."""

    def replay(self, tokens_BS: torch.Tensor, routes: Sequence[Any] | None) -> torch.Tensor | None:
        """Run a forward without gradients under `routes`; logits as in `record`. Raises for routes that do not fit."""

    def step(self, tokens_BS: torch.Tensor, routes: Sequence[Any] | None) -> Mapping[tuple[int, str], torch.Tensor]:
        """Take a training step under `routes`. Returns gradients as `Gradients.gradients` does.

        Data-parallel replicas get different rows with their own routes, and in R2 also in `record` and `replay`.
        Raises for routes that do not fit.

        In a cell with `bias_update` the answer has the experts' bias too, as in `Gradients.gradients`: updated by the
        experts that tokens took, their routes', or all of it as it was, since no router chose these.
        """


@runtime_checkable
class Seeds(Protocol):
    """Facet `seeds`. Generators are `python`, `numpy`, `torch`, `cuda`, and Megatron's trackers `tp` and `expert`."""

    def planned(self, rank: int, seed: int, per_dp: bool) -> Mapping[str, int]:
        """Each generator's seed on `rank`; with `per_dp` replicas get different ones. Pure; raises for a bad seed."""

    def install(self, seed: int, per_dp: bool) -> None:
        """Seed this process's generators; called after model-parallel initialisation. Raises for a bad seed."""

    def save(self) -> Any:
        """The states of all generators, for a checkpoint."""

    def restore(self, states: Any) -> None:
        """Restore what `save` returned; the same states may be restored more than once."""


@dataclass(frozen=True, kw_only=True)
class PadRequest:
    """Packed sequences of several ranks of one etp·ep group: the lengths of the samples that each rank holds."""

    lengths: tuple[tuple[int, ...], ...]
    precision: str = "bf16"  # or a recipe that quantises: tensorwise, delayed, mxfp8, blockwise, nvfp4
    dispatcher: str = "alltoall"  # alltoall | allgather | flex-deepep | flex-hybridep


@dataclass(frozen=True, kw_only=True)
class Padding:
    """Padded lengths of every sample, and of every rank's packed sequence before CP and TP split it.

    A total may exceed the sum of its samples: the rest is padding at the end, split as one more sample.
    """

    samples: tuple[tuple[int, ...], ...]
    totals: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class DispatcherRequest:
    """A request for a dispatcher by name, for training in `precision`, on a machine with `gpu` and `packages`.

    `equal_rows`: all ranks of an etp·ep group dispatch the same number of rows. `packages`: which of deep_ep,
    hybrid_ep and transformer_engine can be imported.
    """

    dispatcher: str
    precision: str = "bf16"  # or fp32
    equal_rows: bool = True
    gpu: bool = False
    packages: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class RoutedRows:
    """Rows of this rank and their experts: T rows of width H, K experts for each row, `experts` in all.

    Rows and weights are float64, and travel and come back so, as do their gradients: Megatron's fp32 for the weights of
    a router is too narrow here. Weights and experts, slices of wider tensors, and the gradient of the outputs need not
    be contiguous. Padding rows (`padding_T`) have arbitrary weights and experts, as a router gives them.
    """

    x_TH: torch.Tensor
    weights_TK: torch.Tensor
    experts_TK: torch.Tensor  # int64
    padding_T: torch.Tensor  # bool
    experts: int


@dataclass(frozen=True, kw_only=True)
class RoundTrip:
    """The outputs [T, H] of this rank's rows, and how many of the rows count for each expert in statistics [E]."""

    y_TH: torch.Tensor
    counts_E: torch.Tensor


@runtime_checkable
class Dispatch(Protocol):
    """Facet `dispatch`. Sequence parallelism is on wherever TP exceeds 1, and CP splits samples into 2·CP chunks."""

    def padded(self, request: PadRequest) -> Padding:
        """What the samples and packed sequences are padded to. Pure."""

    def settings(self, request: DispatcherRequest) -> Mapping[str, Any]:
        """Megatron's settings for it: `moe_token_dispatcher_type` and `moe_flex_dispatcher_backend`. Pure.

        A backend that is left out is Megatron's default, `deepep`; under flex None is none. Raises for a dispatcher
        that cannot work here.
        """

    def round_trip(self, rows: RoutedRows, expert: Callable[[int, torch.Tensor], torch.Tensor]) -> RoundTrip:
        """Send rows to their experts by the cell's dispatcher, and the weighted outputs back; differentiable.

        Called by all ranks, not in the static world. `expert(number, rows_RH)` computes one of this rank's experts
        (numbered globally), or its share of one under ETP, and is called for each of them. Raises for a row of
        this rank that names an expert twice or one that does not exist.
        """


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """What an engine sampled after one prompt: its tokens, and of each the logprob and the version of the weights.

    Logprobs are natural logarithms of the probability over the unpadded vocabulary: of the model's logits, or of these
    divided by the temperature, as `Claims.engine_logprobs` says. `routes` are those of prompt and sample: of every
    token but the last, which was not run, the experts in each MoE layer, in any order. A target that claims
    `engine_routes` gives them of every sample that no update has met. Of one that an update has met there may be none;
    where there are, they are those with which its tokens were sampled, though a prefix be computed again.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    routes: tuple[tuple[tuple[int, ...], ...], ...] | None = None


@runtime_checkable
class Engine(Protocol):
    """An inference engine that serves, in fp32. It starts with version 0, and every update has a greater number.

    One that has lost its weights is dead: every call raises, and says why.
    """

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        during: Callable[[], None] | None = None,
        temperature: float = 1.0,
    ) -> Sequence[Sampled]:
        """Sample so many tokens after each prompt, from a cache of prefixes if it has one.

        At this temperature and of the whole vocabulary; each prompt for itself, also where one comes twice, in one call
        or in two. Temperature 0 takes the likeliest token. What ends a sequence elsewhere is a token like others, as
        likely as the model has it, and ends none.

        The folder has a `generation_config.json`, of which nothing applies: temperature, cuts of the vocabulary,
        penalties, numbers of tokens, ends. A target tells an engine that reads it, where it opens it or in each
        request: vLLM takes `generation_config="vllm"` and `ignore_eos`, SGLang `sampling_defaults="openai"` and
        `ignore_eos`.

        `during` is called in this thread once each prompt has a token and none has all. It may update the weights; then
        the pause mode `abort` leaves fewer tokens. Another thread may call this amid an update: it is refused, waits,
        or gets tokens of the old or the new weights.
        """

    def update(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Serve these weights, under their Hugging Face names, as `version`. Returns when they are served.

        `tensors` is iterated once, in this thread. They come in any order in which the tensors of an attention follow
        one another, and so do those of an MLP, and those of all experts of a layer. They may be views of one buffer
        with any strides (not contiguous, as of a matrix that is held transposed), are read and never written, and may
        change in place once this returns. Raises if anything fails, `tensors` itself included; then the engine serves
        the weights and the version that it had, by which it labels tokens, and takes an update of this version again,
        or is dead.
        Samples that were under way go on with these weights, or end: with fewer tokens, or `sample` raises.

        Tensors go in several buckets, where a target has these: it sets small ones, as for `Export.stream`.
        """

    def version(self) -> int:
        """The version that is served."""

    def pids(self) -> Sequence[int]:
        """The processes that run the model, on this machine."""


@runtime_checkable
class Sync(Protocol):
    """Facet `sync`, asked in cells of backend `engine`. They have one rank, which is the trainer's writer."""

    def modes(self) -> Sequence[str]:
        """The pause modes that an engine can be opened with, by the engine's names for them; the default first.

        One that ends samples which are under way is named `abort`.
        """

    def open(self, checkpoint: Path, mode: str) -> AbstractContextManager[Engine]:
        """An engine that serves the weights of a Hugging Face folder. On leaving, its processes end."""


class DeltaSender(Protocol):
    """The trainer's end of deltas."""

    def delta(self, version: int, weights: Mapping[str, torch.Tensor]) -> Sequence[bytes]:
        """Messages that take a receiver from the last acknowledged version to `version`, whose tensors are `weights`.

        They come in any order, and may change in place afterwards. Raises for weights that cannot be sent.
        """

    def acknowledge(self, receipt: Any) -> None:
        """A receiver holds the version of which `apply` gave this receipt.

        The same one may come twice. That of an earlier version than the last may be refused; it changes nothing.
        """


class DeltaReceiver(Protocol):
    """The engine's end of deltas."""

    def apply(self, messages: Sequence[bytes]) -> Any:
        """Go to the version of a delta; a receipt for the sender. Raises for a delta that does not fit or is damaged.

        A delta of the version that is held changes nothing.
        """

    def weights(self) -> Mapping[str, torch.Tensor]:
        """The tensors as they are now."""


@runtime_checkable
class Delta(Protocol):
    """Facet `delta`: weights in Hugging Face names go from version to version by what changed. On one rank alone.

    Asked for small tensors in fp32 and bf16, which are the kit's own, whatever model the cell has. Tensors in FP8, as
    an engine of FP8 blocks has them, may be refused.
    """

    def sender(self, version: int, weights: Mapping[str, torch.Tensor]) -> DeltaSender:
        """A sender for receivers that hold `weights` as `version`.

        The tensors may change in place afterwards. They need not be contiguous, nor those of later versions.
        """

    def receiver(self, version: int, weights: Mapping[str, torch.Tensor]) -> DeltaReceiver:
        """A receiver that holds `weights` as `version`, in another order than a sender's.

        It may write to these tensors, which are contiguous.
        """


@runtime_checkable
class Quantised(Protocol):
    """Facet `quantised`: weights as an engine that serves FP8 in blocks, or INT4 in groups, loads them.

    Asked in some bf16 cells, of all ranks, twice: of the cell's weights, in FP8 by a config that names no modules; then
    of other weights, which the kit has written over them in place, as an optimizer writes. The kit then loads the
    cell's weights again. INT4 is asked of Kimi-K2.5, if the target claims `sends_int4`.
    """

    def stream(self, config: Path) -> Iterator[tuple[str, torch.Tensor | None]]:
        """The tensors of the published checkpoint whose config.json is in the folder `config`, made of the weights.

        Its `quantization_config` says `quant_method` fp8, `fmt` e4m3, a `weight_block_size` of [rows, columns], and
        perhaps `modules_to_not_convert`: names of modules that stay as they are, with all that is in them. Each linear
        of attention, MLPs and experts has a `weight` in float8_e4m3fn and a `weight_scale_inv` by which its blocks,
        those at the ends smaller, are multiplied: [⌈rows⌉, ⌈columns⌉] in blocks, in float32 or bfloat16, or where
        `scale_fmt` is ue8m0 in float8_e8m0fnu. Everything else, routers, norms, embedding and head among it, is what
        `Export.stream` gives. Tensors come in any order, on the ranks that `Claims.receivers` says; other ranks get
        None, or nothing.

        For INT4 it says `quant_method` compressed-tensors and `format` pack-quantized, with `ignore` and a `group_size`
        as published files have them. Each linear of a routed expert is three tensors: `weight_packed`, int32 [rows,
        columns / 8], of eight numbers from -8 to 7 each, the first in the lowest four bits, each 8 more than it is;
        `weight_scale`, bf16 [rows, columns / group_size], by which numbers are multiplied; `weight_shape`, [rows,
        columns]. Numbers are those of the whole tensor, not of a rank's shard of it.
        """


class Session(Protocol):
    """One opened cell on one rank. A facet that is not claimed is None.

    Facets are listed in the order in which they are called; see `steps/facet.py`.
    """

    @property
    def names(self) -> Names | None: ...
    @property
    def config(self) -> Config | None: ...
    @property
    def seeds(self) -> Seeds | None: ...
    @property
    def dispatch(self) -> Dispatch | None: ...
    @property
    def plan(self) -> Plan | None: ...
    @property
    def delta(self) -> Delta | None: ...
    @property
    def export(self) -> Export | None: ...
    @property
    def forward(self) -> Forward | None: ...
    @property
    def logprobs(self) -> Logprobs | None: ...
    @property
    def replay(self) -> Replay | None: ...
    @property
    def gradients(self) -> Gradients | None: ...
    @property
    def policy(self) -> Policy | None: ...
    @property
    def optimizer(self) -> Optimizer | None: ...
    @property
    def adapters(self) -> Adapters | None: ...
    @property
    def quantised(self) -> Quantised | None: ...
    @property
    def sync(self) -> Sync | None: ...


#: Facets that a target may claim.
FACETS = tuple(name for name, attribute in vars(Session).items() if isinstance(attribute, property))


class Target(Protocol):
    """What `--target name | module:attr` resolves to.

    Its inputs (config, checkpoints, tokens, routes) are read-only copies: writing to them is a failure. A copy that a
    cell leaves unchanged serves the next cell with the same inputs.
    Only processes of worlds import it; `info` and `claims` go as plain data to the one that judges.
    """

    @property
    def info(self) -> Info: ...
    @property
    def claims(self) -> Claims: ...
    def open(self, cell: Cell, world: World) -> AbstractContextManager[Session]: ...


@runtime_checkable
class Recorded(Protocol):
    """A target made of records: its cells ran elsewhere, and nothing runs here."""

    def recorded_steps(self, cell: Cell) -> frozenset[str]:
        """The steps of the cell that have a record."""


def to_plain(value: Any) -> Any:
    """A dataclass of this module as JSON-ready plain values: tuples and arrays become lists, paths strings."""
    if value is None or type(value) in (str, int, bool, float):  # nearly all values of a table are
        return value
    if hasattr(value, "tolist"):  # a number or an array of numpy or torch
        return value.tolist()
    if hasattr(value, "__dataclass_fields__"):
        return {k: to_plain(getattr(value, k)) for k in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return {str(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_plain(v) for v in (sorted(value) if isinstance(value, set | frozenset) else value)]
    return str(value) if isinstance(value, Path) else value

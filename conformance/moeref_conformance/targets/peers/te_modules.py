"""Transformer Engine's modules in plain torch: parameter names, shapes and tensor-parallel marks are its own.

The marks are the attributes `tensor_model_parallel`, `partition_dim` and `sequence_parallel` of parameters, set where
Transformer Engine sets them. The maths is torch's in the dtype of the weights. Nothing is quantised or fused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional


class _Base(torch.nn.Module):
    """What all modules of Transformer Engine have: an extra state, empty here, and `fp8`, off here."""

    fp8 = False

    def get_extra_state(self) -> torch.Tensor:
        """The state of quantisation: empty."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Nothing to keep."""

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Nothing to prepare."""


def _empty(*shape: int, dtype: torch.dtype | None, device: Any) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(*shape, dtype=dtype or torch.get_default_dtype(), device=device))


def _shard(parameter: torch.nn.Parameter, dim: int) -> None:
    """Mark a parameter as Transformer Engine does, also one that is not split."""
    for name, value in (("tensor_model_parallel", True), ("partition_dim", dim), ("partition_stride", 1)):
        setattr(parameter, name, value)


def _share(size: int, parts: int) -> int:
    if size % parts:
        raise ValueError(f"{size} does not divide over {parts} tensor-parallel ranks")
    return size // parts


class Linear(_Base):
    """`weight` [out, in] and `bias` [out]; `parallel_mode` "column" splits out, "row" splits in, None nothing."""

    names: tuple[str, ...] = ("",)  # suffixes of the weights

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        sequence_parallel: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cpu",
        **_: Any,  # kernels, overlap of communication, random states
    ) -> None:
        super().__init__()
        self.parallel_mode, self.tp_group, self.tp_size = parallel_mode, tp_group, tp_size
        self.sequence_parallel = sequence_parallel and tp_size > 1
        self.use_bias, self.return_bias = bias, return_bias
        self.in_features = _share(in_features, tp_size if parallel_mode == "row" else 1)
        self.out_features = _share(out_features, tp_size if parallel_mode == "column" else 1)
        for name in self.names:
            weight = _empty(self.out_features, self.in_features, dtype=params_dtype, device=device)
            with torch.no_grad():
                (init_method or torch.nn.init.xavier_uniform_)(weight)
            _shard(weight, 1 if parallel_mode == "row" else 0)
            self.register_parameter(f"weight{name}", weight)
        for name in self.names:
            if not bias:
                setattr(self, f"bias{name}", torch.empty(0, dtype=params_dtype))
                continue
            value = _empty(self.out_features, dtype=params_dtype, device=device)
            torch.nn.init.zeros_(value)
            if parallel_mode == "column":
                _shard(value, 0)
            elif parallel_mode == "row":
                setattr(value, "sequence_parallel", sequence_parallel)  # noqa: B010 -- a mark torch does not know
            self.register_parameter(f"bias{name}", value)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """As in Transformer Engine, for modules that are built before the groups."""
        self.tp_group = tp_group

    def _enter(self, x: torch.Tensor) -> Any:
        """The input of a column-parallel product: gathered over the sequence, or with its gradient all-reduced."""
        if self.parallel_mode != "column" or self.tp_size == 1:
            return x
        from megatron.core.tensor_parallel import mappings

        if self.sequence_parallel:
            return mappings.gather_from_sequence_parallel_region(x, group=self.tp_group)
        return mappings.copy_to_tensor_model_parallel_region(x, group=self.tp_group)

    def _leave(self, y: torch.Tensor) -> Any:
        """The output of a row-parallel product: summed over ranks, and split over the sequence if need be."""
        if self.parallel_mode != "row" or self.tp_size == 1:
            return y
        from megatron.core.tensor_parallel import mappings

        if self.sequence_parallel:
            return mappings.reduce_scatter_to_sequence_parallel_region(y, group=self.tp_group)
        return mappings.reduce_from_tensor_model_parallel_region(y, group=self.tp_group)

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None, **_: Any) -> Any:
        """`x @ weight.T + bias`; with `return_bias` the bias is not added but returned next to it."""
        weight: Any = self.weight
        bias: Any = self.bias if self.use_bias else None
        y = self._leave(functional.linear(self._enter(x), weight))
        if self.return_bias:
            return y, bias
        return y if bias is None else y + bias


class _Norm(_Base):
    """`weight` [hidden], and `bias` [hidden] for LayerNorm."""

    centred = False

    def __init__(
        self,
        normalized_shape: int | Sequence[int] | None = None,
        eps: float = 1e-5,
        *,
        hidden_size: int | None = None,  # the same under its older name
        sequence_parallel: bool = False,
        zero_centered_gamma: bool = False,
        params_dtype: torch.dtype | None = None,
        device: Any = "cpu",
        **_: Any,
    ) -> None:
        super().__init__()
        shape = hidden_size if normalized_shape is None else normalized_shape
        if shape is None:
            raise TypeError(f"{type(self).__name__} needs a normalized_shape")
        size = shape if isinstance(shape, int) else int(shape[0])
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.weight, bias = _norm_parameters(
            size, self.centred, sequence_parallel, zero_centered_gamma, params_dtype, device
        )
        if bias is not None:
            self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The norm over the last dimension."""
        return _normed(x, self.weight, self.bias if self.centred else None, self.eps, self.zero_centered_gamma)


class RMSNorm(_Norm):
    """`x / sqrt(mean(x²) + eps) · weight`."""


class LayerNorm(_Norm):
    """torch's layer norm."""

    centred = True


def _norm_parameters(
    size: int, centred: bool, sequence_parallel: bool, zero: bool, dtype: Any, device: Any
) -> tuple[torch.nn.Parameter, torch.nn.Parameter | None]:
    weight = _empty(size, dtype=dtype, device=device)
    torch.nn.init.constant_(weight, 0.0 if zero else 1.0)
    bias = torch.nn.Parameter(torch.zeros_like(weight)) if centred else None
    for parameter in (weight, bias):
        if parameter is not None:
            setattr(parameter, "sequence_parallel", sequence_parallel)  # noqa: B010 -- a mark torch does not know
    return weight, bias


def _normed(x: torch.Tensor, weight: torch.Tensor, bias: Any, eps: float, zero: bool) -> torch.Tensor:
    scale = weight + 1 if zero else weight
    if bias is None:
        return functional.rms_norm(x, (x.shape[-1],), scale, eps)
    return functional.layer_norm(x, (x.shape[-1],), scale, bias, eps)


class LayerNormLinear(Linear):
    """A norm and the linear after it; the norm's parameters are `layer_norm_weight` and, if any, `layer_norm_bias`."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        **kwargs: Any,
    ) -> None:
        if return_layernorm_output:
            raise NotImplementedError("the stand-in for Transformer Engine does not return the norm's output")
        super().__init__(in_features, out_features, **kwargs)
        self.eps, self.zero_centered_gamma, self.normalization = eps, zero_centered_gamma, normalization
        self.layer_norm_weight, self.layer_norm_bias = _norm_parameters(
            in_features,
            normalization == "LayerNorm",
            bool(kwargs.get("sequence_parallel")),
            zero_centered_gamma,
            kwargs.get("params_dtype"),
            kwargs.get("device", "cpu"),
        )

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None, **_: Any) -> Any:
        """As `Linear.forward`, of the normalised input."""
        return super().forward(
            _normed(x, self.layer_norm_weight, self.layer_norm_bias, self.eps, self.zero_centered_gamma)
        )


class GroupedLinear(Linear):
    """`weight0` … `weight{n-1}`, each [out, in], for consecutive runs of tokens."""

    def __init__(self, num_gemms: int, in_features: int, out_features: int, **kwargs: Any) -> None:
        self.names = tuple(str(i) for i in range(num_gemms))
        super().__init__(in_features, out_features, **kwargs)
        self.num_gemms = num_gemms

    def forward(  # type: ignore[override]  # as in Transformer Engine
        self, x: torch.Tensor, m_splits: Any, is_first_microbatch: bool | None = None, **_: Any
    ) -> Any:
        """`m_splits` counts the tokens of each weight, in order."""
        splits = m_splits.tolist() if isinstance(m_splits, torch.Tensor) else list(m_splits)
        runs = torch.split(self._enter(x), splits)
        weights = [getattr(self, f"weight{i}") for i in self.names]
        biases = [getattr(self, f"bias{i}") for i in self.names] if self.use_bias else []
        y = [functional.linear(run, weight) for run, weight in zip(runs, weights, strict=True)]
        if self.return_bias:
            return self._leave(torch.cat(y)), biases
        return self._leave(torch.cat([a + b for a, b in zip(y, biases, strict=True)] if biases else y))


class DotProductAttention(_Base):
    """Attention of `query` [S, B, heads, d] over `key` [T, B, groups, d] and `value` [T, B, groups, dv].

    With `softmax_type` "learnable" every head of this rank has a sink, `softmax_offset` [heads]: one more score, of no
    position. `window_size` is (positions seen to the left, to the right), −1 for all.
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        attention_dropout: float = 0.0,
        softmax_scale: float | None = None,
        window_size: tuple[int, int] | None = None,
        softmax_type: str = "vanilla",
        tp_size: int = 1,
        return_max_logit: bool = False,
        **_: Any,
    ) -> None:
        super().__init__()
        if softmax_type not in ("vanilla", "learnable") or return_max_logit:
            raise NotImplementedError(f"the stand-in for Transformer Engine has no softmax type {softmax_type}")
        width = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        self.scale = width**-0.5 if softmax_scale is None else softmax_scale
        self.dropout, self.window_size = attention_dropout, window_size or (-1, -1)
        self.softmax_offset: torch.nn.Parameter | None = None
        if softmax_type == "learnable":
            self.softmax_offset = torch.nn.Parameter(torch.zeros(_share(num_attention_heads, tp_size)))

    def _hidden(self, s: int, t: int, kind: str, mask: torch.Tensor | None) -> torch.Tensor:
        """True where a query does not see a key; [S, T] or the mask's shape. Last query and last key align."""
        ahead = torch.arange(t) - torch.arange(s)[:, None] - (t - s)
        left, right = self.window_size
        far = (ahead < -left if left >= 0 else torch.zeros_like(ahead, dtype=torch.bool)) | (
            ahead > right if right >= 0 else torch.zeros_like(ahead, dtype=torch.bool)
        )
        if kind == "causal":
            return far | (ahead > 0)
        if kind == "arbitrary" and mask is not None:
            return far | mask
        if kind in ("no_mask", "arbitrary"):
            return far
        raise NotImplementedError(f"the stand-in for Transformer Engine has no mask type {kind}")

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: str = "causal",
        qkv_format: str = "sbhd",
        core_attention_bias: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """[S, B, heads · dv]. A mask is True where a key is hidden. Scores and softmax are in fp32."""
        if qkv_format != "sbhd" or core_attention_bias is not None:
            raise NotImplementedError("the stand-in for Transformer Engine attends over [S, B, heads, d] without bias")
        groups = query.shape[2] // key.shape[2]
        q = query.permute(1, 2, 0, 3).float()
        k, v = (x.permute(1, 2, 0, 3).float().repeat_interleave(groups, dim=1) for x in (key, value))
        hidden = self._hidden(q.shape[2], k.shape[2], attn_mask_type, attention_mask)
        scores = (q @ k.transpose(2, 3) * self.scale).masked_fill(hidden, float("-inf"))
        if self.softmax_offset is not None:
            sink = self.softmax_offset.float()[None, :, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = functional.dropout(scores.softmax(-1), self.dropout, self.training)[..., : k.shape[2]]
        return (weights @ v).to(query.dtype).permute(2, 0, 1, 3).flatten(2)

"""What vLLM asks about the looped cache: how large a page is, when it may be shared, and one step's metadata."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.utils import split_decodes_prefills_and_extends
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request

from residualquant.vllm.metrics import StepMetrics
from residualquant.vllm.paged import StepBatch


@dataclass(frozen=True, kw_only=True)
class LoopedKVSpec(FullAttentionSpec):
    """Pages of one layer of a looped model, all loops: uint8 [blocks, H, S * token_bytes].

    ``head_size`` is not channels but bytes: those of one token and KV head, all loops, K and V. So vLLM's own
    arithmetic, ``block_size * num_kv_heads * (head_size + head_size_v)`` bytes a page, gives the storage arithmetic.
    """

    head_size_v: int = 0


class LoopedKVManager(FullAttentionManager):
    """vLLM's block manager, except that a block is shared only when the step that fills it has been run.

    vLLM offers a block to other requests when it *schedules* the tokens in it, since within a step every layer writes
    before it reads. Pages are written after the last loop, when the other loops have long been read; a request of the
    same step would read what is not there.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._uncommitted: dict[str, tuple[Request, int]] = {}

    def cache_blocks(self, request: Request, num_tokens: int, *args, **kwargs) -> None:
        self._uncommitted[request.request_id] = (request, num_tokens)
        super().cache_blocks(request, min(num_tokens, request.num_computed_tokens), *args, **kwargs)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        if request_id in self._uncommitted:
            request, num_tokens = self._uncommitted.pop(request_id)
            super().cache_blocks(request, min(num_tokens, request.num_computed_tokens))
        return super().pop_blocks_for_free(request_id)


@dataclass(frozen=True)
class LoopedMetadata(StepBatch, AttentionMetadata):
    """A step's requests, with the number of its tokens (the rest of a padded step is not read)."""

    tokens: int = 0


class LoopedMetadataBuilder(AttentionMetadataBuilder[LoopedMetadata]):
    """From vLLM's common metadata to :class:`LoopedMetadata`, without waiting for the device.

    Steps in which every request has one token run as CUDA graphs, others eagerly: prompts differ in too many ways.
    """

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, *args):
        super().__init__(*args)
        self._init_reorder_batch_threshold(1)
        self._metrics = StepMetrics(self.vllm_config, self.layer_names, self.device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> LoopedMetadata:
        self._metrics.count_step(int(common_attn_metadata.query_start_loc_cpu[-1]))
        return self.build_for_cudagraph_capture(common_attn_metadata)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> LoopedMetadata:
        common = common_attn_metadata
        decodes, _, beginnings = split_decodes_prefills_and_extends(common)[:3]
        return LoopedMetadata(
            query_start=common.query_start_loc,
            query_start_cpu=common.query_start_loc_cpu,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slots=common.slot_mapping[: common.num_actual_tokens],
            decodes=decodes,
            beginnings=beginnings,
            tokens=common.num_actual_tokens,
        )


class LoopedBackend(AttentionBackend):
    """Ties the looped attention layers to the classes above; the layers run attention themselves."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        raise NotImplementedError("a looped attention layer runs its own attention")

    @staticmethod
    def get_builder_cls() -> type[LoopedMetadataBuilder]:
        return LoopedMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return num_blocks, num_kv_heads, block_size * head_size

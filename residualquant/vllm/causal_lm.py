"""What the models of both families share around their trunk: the head, and what vLLM calls."""

from __future__ import annotations

from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import maybe_prefix
from vllm.sequence import IntermediateTensors


class LoopedLM(nn.Module):
    """A looped model as vLLM runs it. A subclass makes its trunk, then calls :meth:`make_head`.

    Attributes:
        trunk: everything between token ids and the head's input.
        embedding: the trunk's own.
    """

    trunk: nn.Module
    embedding: VocabParallelEmbedding

    def make_head(self, vllm_config: VllmConfig, prefix: str, hidden_size: int, tied: bool) -> None:
        """The head over the whole vocabulary, with the embedding's weights where ``tied``."""
        vocab_size = self.embedding.org_vocab_size
        head = ParallelLMHead(
            vocab_size, hidden_size, quant_config=vllm_config.quant_config, prefix=maybe_prefix(prefix, "lm_head")
        )
        self.lm_head = head.tie_weights(self.embedding) if tied else head
        self.logits_processor = LogitsProcessor(vocab_size)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.embedding(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        return self.trunk(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

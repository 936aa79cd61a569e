"""Hugging Face configuration classes, so that no checkpoint's own code is needed (nor trusted)."""

from __future__ import annotations

from transformers import PretrainedConfig


class OuroHFConfig(PretrainedConfig):
    """``config.json`` of an Ouro checkpoint, for transformers and vLLM."""

    model_type = "ouro"

    def __init__(
        self,
        hidden_size: int = 2048,
        num_attention_heads: int = 16,
        head_dim: int | None = None,
        total_ut_steps: int = 4,
        rope_theta: float = 1_000_000.0,
        rms_norm_eps: float = 1e-6,
        hidden_act: str = "silu",
        tie_word_embeddings: bool = False,
        **others,
    ):
        self.hidden_size = hidden_size
        self.num_attention_heads = num_attention_heads
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.total_ut_steps = total_ut_steps
        self.rope_theta = rope_theta
        self.rms_norm_eps = rms_norm_eps
        self.hidden_act = hidden_act
        others.setdefault("rope_parameters", {"rope_type": "default", "rope_theta": rope_theta})
        super().__init__(tie_word_embeddings=tie_word_embeddings, **others)

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


class HuginnHFConfig(PretrainedConfig):
    """``config.json`` of a Huginn checkpoint; vLLM wants the usual names besides its own."""

    model_type = "huginn_raven"

    def __init__(
        self,
        n_embd: int = 5280,
        n_heads: int = 55,
        vocab_size: int = 65536,
        padded_vocab_size: int | None = None,
        n_layers_in_prelude: int = 2,
        n_layers_in_recurrent_block: int = 4,
        n_layers_in_coda: int = 2,
        mean_recurrence: int = 32,
        block_size: int = 4096,
        **others,
    ):
        self.n_embd = self.hidden_size = n_embd
        self.n_heads = self.num_attention_heads = self.num_key_value_heads = n_heads
        self.head_dim = n_embd // n_heads
        self.vocab_size = padded_vocab_size or vocab_size
        self.n_layers_in_prelude = n_layers_in_prelude
        self.n_layers_in_recurrent_block = n_layers_in_recurrent_block
        self.n_layers_in_coda = n_layers_in_coda
        self.num_hidden_layers = n_layers_in_prelude + n_layers_in_recurrent_block + n_layers_in_coda
        self.mean_recurrence = mean_recurrence
        self.block_size = self.max_position_embeddings = block_size
        super().__init__(**others | {"tie_word_embeddings": True})

"""Hugging Face configuration classes, so that no checkpoint's own code is needed (nor trusted)."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from residualquant.errors import ResidualQuantError
from residualquant.models.huginn import HuginnConfig
from residualquant.models.loading import config_of
from residualquant.models.ouro import OuroConfig


def _checked(kind: str, values: dict[str, Any]) -> OuroConfig | HuginnConfig:
    """Our own configuration of the same values, defaults included."""
    try:
        return config_of(values | {"model_type": kind})
    except ValueError as error:  # which vLLM would put into a message of several lines
        raise ResidualQuantError(f"config.json of this {kind} model cannot be used: {error}") from error


class OuroHFConfig(PretrainedConfig):
    """``config.json`` of an Ouro checkpoint, for transformers and vLLM."""

    model_type = "ouro"

    def __init__(self, hidden_act: str = "silu", tie_word_embeddings: bool = False, **values):
        own = vars(_checked(self.model_type, values))
        vars(self).update(own)
        self.hidden_act = hidden_act
        others = {name: value for name, value in values.items() if name not in own and value is not None}
        others.setdefault("rope_parameters", {"rope_type": "default", "rope_theta": self.rope_theta})
        super().__init__(tie_word_embeddings=tie_word_embeddings, **others)


class HuginnHFConfig(PretrainedConfig):
    """``config.json`` of a Huginn checkpoint; vLLM wants the usual names besides its own."""

    model_type = "huginn_raven"

    def __init__(self, **values):
        config = _checked(self.model_type, values)
        own = vars(config) | {
            "hidden_size": config.n_embd,
            "num_attention_heads": config.n_heads,
            "num_key_value_heads": config.n_heads,
            "head_dim": config.head_dim,
            "num_hidden_layers": config.num_hidden_layers,
            "max_position_embeddings": config.block_size,
        }
        vars(self).update(own)
        others = {name: value for name, value in values.items() if name not in own}
        super().__init__(**others | {"tie_word_embeddings": True})

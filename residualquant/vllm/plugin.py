"""Everything that is registered with vLLM, each once."""

from __future__ import annotations

from transformers import AutoConfig
from vllm import ModelRegistry
from vllm.config import CompilationConfig, VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from residualquant.vllm.attention import OP_NAME
from residualquant.vllm.backend import LoopedKVManager, LoopedKVSpec
from residualquant.vllm.hf_config import HuginnHFConfig, OuroHFConfig
from residualquant.vllm.metrics import remove_folder_at_exit
from residualquant.vllm.settings import MODELS, check_config


def register_all() -> None:
    """Configuration classes, models, KV cache spec with its manager, splitting op, and the check of a configuration."""
    for config in (OuroHFConfig, HuginnHFConfig):
        AutoConfig.register(config.model_type, config, exist_ok=True)
    for architecture, where in MODELS.items():
        ModelRegistry.register_model(architecture, where)
    KVCacheSpecRegistry._ensure_registered()  # it does nothing once any spec is there, so it has to come first
    KVCacheSpecRegistry.register(LoopedKVSpec, LoopedKVManager, uniform_type_base_spec=FullAttentionSpec)
    if OP_NAME not in CompilationConfig._attention_ops:
        CompilationConfig._attention_ops.append(OP_NAME)
    remove_folder_at_exit()
    if not hasattr(VllmConfig.try_verify_and_update_config, "checks_looped"):
        VllmConfig.try_verify_and_update_config = _checked(VllmConfig.try_verify_and_update_config)


def _checked(verify):
    """vLLM's own verification, then ours: vLLM has such a hook for a model it knows, and none for all the others."""

    def verify_and_check(self: VllmConfig) -> None:
        verify(self)
        check_config(self)

    verify_and_check.checks_looped = True
    return verify_and_check

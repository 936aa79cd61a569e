"""Looped models, and how their weights are found and checked."""

from residualquant.models.base import KVShape, LoopedModel, LoopedOutput
from residualquant.models.huginn import Huginn, HuginnConfig
from residualquant.models.loading import load_model, save_model
from residualquant.models.ouro import Ouro, OuroConfig

__all__ = [
    "Huginn",
    "HuginnConfig",
    "KVShape",
    "LoopedModel",
    "LoopedOutput",
    "Ouro",
    "OuroConfig",
    "load_model",
    "save_model",
]

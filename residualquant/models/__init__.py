"""Looped models, and how their weights are found and checked."""

from residualquant.models.loading import load_model, save_model
from residualquant.models.ouro import KVShape, Ouro, OuroConfig, OuroOutput

__all__ = ["KVShape", "Ouro", "OuroConfig", "OuroOutput", "load_model", "save_model"]

"""The benchmark's protocol, on a shape small enough for a CPU."""

from residualquant.models.ouro import OuroConfig
from residualquant.vllm.bench import SETTINGS, measure

SHAPE = OuroConfig(
    hidden_size=128, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
    head_dim=64, vocab_size=320, max_position_embeddings=256,
)  # fmt: skip


def test_every_point_that_fits_gives_a_row(memory):
    kept = {}
    measure(
        SHAPE, "OuroForCausalLM", [(33, 2), (64, 10**6), (16, 1)], kept.__setitem__,
        additional_config=SETTINGS["packed"],
        dtype="float32", enforce_eager=True, max_num_batched_tokens=64, max_num_seqs=2, block_size=16, **memory,
    )  # fmt: skip
    assert kept["tokens_that_fit"] > 1000
    assert [(row["tokens"], row["requests"]) for row in kept["rows"]] == [(33, 2), (16, 1)]
    assert all(row["step_ms"] > 0 and row["prefill_tokens_per_second"] > 0 for row in kept["rows"])

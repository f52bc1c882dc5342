"""A real torchtune decoder of the size of the tests' tiny checkpoint."""

from __future__ import annotations

import torch
from conftest import TINY_QWEN2
from torchtune.models.qwen2 import qwen2
from torchtune.models.qwen2._convert_weights import qwen2_hf_to_tune


def tiny_decoder(weights: dict[str, torch.Tensor], *, tied: bool = True) -> torch.nn.Module:
    """The decoder with the given weights, which have Hugging Face names."""
    sizes = TINY_QWEN2
    model = qwen2(
        vocab_size=sizes["vocab_size"],
        num_layers=sizes["num_hidden_layers"],
        num_heads=sizes["num_attention_heads"],
        num_kv_heads=sizes["num_key_value_heads"],
        embed_dim=sizes["hidden_size"],
        intermediate_dim=sizes["intermediate_size"],
        max_seq_len=sizes["max_position_embeddings"],
        rope_base=10_000,
        norm_eps=sizes["rms_norm_eps"],
        tie_word_embeddings=tied,
    )
    model.load_state_dict(
        qwen2_hf_to_tune(
            weights,
            num_heads=sizes["num_attention_heads"],
            num_kv_heads=sizes["num_key_value_heads"],
            dim=sizes["hidden_size"],
            tie_word_embeddings=tied,
        )
    )
    return model

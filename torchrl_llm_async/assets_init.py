"""Makes the untrained model that the supervised warm-up starts from.

Owns the shape of the demo's model and its vocabulary. Run it as

    python -m torchrl_llm_async.assets_init --output runs/untrained --seed 0

and train the result with ``recipes/configs/warmup_sft.yaml``; ``assets/README.md`` has the rest.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

PAD, EOS = "<pad>", "<eos>"
# TorchRL's history mode renders conversations through this: text in, the same text out.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def build_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """A tokenizer of single bytes: one token per ASCII character, none unknown.

    It is a byte-level BPE without merges, since transformers 5.19 replaces the pre-tokenizer of any
    qwen2 folder by the stock byte-level one: without merges that makes no difference.
    """
    vocabulary = {PAD: 0, EOS: 1}
    # The byte-level alphabet spells each byte as one visible character; bytes 33 to 126 are ASCII.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary.update({character: index for index, character in enumerate(alphabet, start=2)})
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        # Nothing is unknown, but the class transformers picks for qwen2 would add one of its own.
        unk_token=PAD,
        padding_side="left",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    """An untrained Qwen2 model of 0.35 million float32 parameters."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=tokenizer.model_max_length,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        rms_norm_eps=1e-6,
        # About 1 / sqrt(hidden_size): with the usual 0.02 so small a model learns far more slowly.
        initializer_range=0.1,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    return Qwen2ForCausalLM(config)


def main() -> None:
    """Writes the model's folder in Hugging Face format."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    args = parser.parse_args()
    tokenizer = build_tokenizer(max_length=256)
    build_model(tokenizer, args.seed).save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    # transformers 5 writes "TokenizersBackend", a name that version 4 does not know.
    file = args.output / "tokenizer_config.json"
    declared = json.loads(file.read_text())
    declared["tokenizer_class"] = "PreTrainedTokenizerFast"
    file.write_text(json.dumps(declared, indent=2) + "\n")


if __name__ == "__main__":
    main()

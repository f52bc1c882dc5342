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
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

PAD, EOS = "<pad>", "<eos>"
CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
# History mode of TorchRL renders conversations through this: text in, the same text out.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def build_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per printable ASCII character and newline.

    A character outside its alphabet is an error when encoding, there being no unknown token.
    """
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    # Not ".", which leaves newlines out.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    """An untrained Qwen2 model of 0.31 million float32 parameters."""
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
    # transformers writes the class under the name it has there ("TokenizersBackend" in version 5),
    # which older ones and other readers do not know.
    file = args.output / "tokenizer_config.json"
    declared = json.loads(file.read_text())
    declared["tokenizer_class"] = "PreTrainedTokenizerFast"
    file.write_text(json.dumps(declared, indent=2) + "\n")


if __name__ == "__main__":
    main()

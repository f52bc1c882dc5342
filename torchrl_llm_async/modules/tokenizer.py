"""A torchtune tokenizer over any Hugging Face ``tokenizer.json``.

Owns the mapping between text and token ids as torchtune's recipes and data sets expect it. Knows
no chat template: the messages of a conversation are concatenated, and an answer ends with the
end-of-sequence token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from torchtune.data import Message, truncate
from torchtune.modules.transforms.tokenizers import ModelTokenizer


class HFTokenizer(ModelTokenizer):
    """Reads ``tokenizer.json`` and implements torchtune's ``ModelTokenizer``.

    torchtune 0.6.1 has a tokenizer class per model family, none of which reads a custom
    ``tokenizer.json``; this one reads all of them. It can be given wherever torchtune takes a
    tokenizer, e.g. as ``model_transform`` of ``SFTDataset`` or to ``instruct_dataset``.

    Args:
        path: a ``tokenizer.json``, or the folder that holds it.
        pad_token: the padding token's text.
        eos_token: the end-of-sequence token's text.
        max_seq_len: longest sequence in tokens; longer ones are cut, their last token becoming the
            end-of-sequence token. None never cuts.

    Raises:
        ValueError: there is no such file, or one of the two tokens is not in its vocabulary.

    Examples:
        >>> tokenizer = HFTokenizer("assets/written-sums-qwen2")
        >>> tokenizer.decode(tokenizer.encode("1+2=", add_eos=True))
        '1+2='
    """

    def __init__(
        self,
        path: str | Path,
        *,
        pad_token: str = "<pad>",
        eos_token: str = "<eos>",
        max_seq_len: int | None = None,
    ) -> None:
        file = Path(path)
        file = file / "tokenizer.json" if file.is_dir() else file
        if not file.is_file():
            raise ValueError(f"path={str(path)!r}: no tokenizer.json there.")
        self._tokenizer = Tokenizer.from_file(str(file))
        self.special_tokens: dict[str, int] = {}
        for argument, token in (("pad_token", pad_token), ("eos_token", eos_token)):
            token_id = self._tokenizer.token_to_id(token)
            if token_id is None:
                raise ValueError(f"{argument}={token!r} is not in the vocabulary of {file}.")
            self.special_tokens[token] = token_id
        self.pad_id = self.special_tokens[pad_token]
        self.eos_id = self.special_tokens[eos_token]
        self.stop_tokens = [self.eos_id]
        self.max_seq_len = max_seq_len

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included."""
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        """Token ids of a text, with the end-of-sequence token appended if `add_eos`.

        `add_bos` is there for torchtune's signature and changes nothing: no beginning token is
        ever added but by the ``tokenizer.json`` itself.
        """
        ids = self._tokenizer.encode(text).ids
        return [*ids, self.eos_id] if add_eos else ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids, by default without padding and end-of-sequence tokens."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def tokenize_messages(
        self, messages: Sequence[Message], *, add_end_tokens: bool = True
    ) -> tuple[list[int], list[bool]]:
        """Token ids of a conversation, and which of them take no part in the loss.

        Args:
            messages: the conversation.
            add_end_tokens: whether each assistant message is followed by the end-of-sequence token.

        Returns:
            token ids ``[T]`` and the mask ``[T]``, True where the message is masked.
        """
        tokens: list[int] = []
        mask: list[bool] = []
        for message in messages:
            ends = add_end_tokens and message.role == "assistant"
            ids = self.encode(message.text_content, add_eos=ends)
            tokens += ids
            mask += [message.masked] * len(ids)
        if self.max_seq_len is not None and len(tokens) > self.max_seq_len:
            tokens = truncate(tokens, self.max_seq_len, self.eos_id)
            mask = truncate(mask, self.max_seq_len)
        return tokens, mask

    def __call__(self, sample: Mapping[str, Any], inference: bool = False) -> dict[str, Any]:
        """Replaces ``"messages"`` of a sample by its ``"tokens"`` and ``"mask"``."""
        out = {key: value for key, value in sample.items() if key != "messages"}
        out["tokens"], out["mask"] = self.tokenize_messages(
            sample["messages"], add_end_tokens=not inference
        )
        return out

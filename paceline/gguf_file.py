"""A model in one file of llama.cpp's format, GGUF: what it says of itself, its tensors, its tokenizer.

The header is read here, and not by `gguf.GGUFReader`: that one makes several arrays of each word of a vocabulary (1.6 s
for 49,152 of them, 0.1 s here) and takes a file that ends too early for a matter of shapes. What the bytes of a tensor
stand for is the package's, which is imported only then: a target in another format needs none.

Source: docs/gguf.md of ggml, version 3.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from paceline.errors import ModelError

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Types of values, as `struct` names them."""
_STRING, _ARRAY = 8, 9
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$")

_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")


def _split(pattern: str) -> Any:
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), behavior="isolated"), bytes_only])


_PRE_TOKENIZERS = {
    "gpt-2": _GPT2,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2]),
    "llama-bpe": _split(_LLAMA3),
    "qwen2": _split(_QWEN2),
}
"""How text is cut before merges apply, by ``tokenizer.ggml.pre``: those of GPT-2, SmolLM, Llama 3, Qwen 2 and 3."""


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies.

    Attributes:
        shape: As in Transformers: ``[out, in]``.
        kind: The package's type of its numbers.
        block: How many of them are stored together, and in how many bytes.
        start: Of its bytes in the file.
    """

    shape: tuple[int, ...]
    kind: Any
    block: tuple[int, int]
    start: int

    @property
    def is_quantized(self) -> bool:
        """Whether its numbers share scales."""
        return self.block[0] > 1

    @property
    def byte_shape(self) -> tuple[int, ...]:
        """Its shape, with the bytes of a row last."""
        return (*self.shape[:-1], self.shape[-1] // self.block[0] * self.block[1])


class GGUFFile:
    """An open file.

    Attributes:
        metadata: Its values by key.
        tensors: By GGUF's names.
    """

    def __init__(self, path: Path) -> None:
        """Read the header. Raises: ModelError if it is not that of a whole model in one file."""
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            self._bytes: Any = np.memmap(path, mode="r") if path.stat().st_size else np.empty(0, np.uint8)
        except OSError as error:
            raise ModelError(f"target {path} cannot be read: {error.strerror}") from error
        if bytes(self._bytes[:4]) != b"GGUF":
            raise ModelError(f"target {path} is no GGUF file: it does not begin with the letters GGUF")
        try:
            self._read_header()
            end = max((each.start + math.prod(each.byte_shape) for each in self.tensors.values()), default=0)
        except (struct.error, ValueError, LookupError, ArithmeticError, TypeError) as error:
            raise ModelError(f"target {path} is damaged or cut short: its header cannot be read ({error})") from error
        self._check_kind()
        if end > len(self._bytes):
            raise ModelError(
                f"target {path} is cut short: it has {len(self._bytes)} bytes, and its tensors end at {end}"
            )

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the family."""
        return str(self.metadata.get("general.architecture", "?"))

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer: of the sequence, of a turn, of a message."""
        named = (self.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
        return tuple(dict.fromkeys(each for each in named if each is not None))

    def read(self, name: str) -> np.ndarray:
        """A tensor as the float32 that it stands for, in memory of its own. Raises: NotImplementedError."""
        from gguf import dequantize

        tensor = self.tensors[name]
        data = self._bytes[tensor.start : tensor.start + math.prod(tensor.byte_shape)].reshape(tensor.byte_shape)
        return np.require(dequantize(np.asarray(data), tensor.kind), np.float32, ["C", "W", "O"])

    def _read_header(self) -> None:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        data = memoryview(self._bytes)
        place = 4

        def take(kind: str) -> Any:
            nonlocal place
            (value,) = struct.unpack_from("<" + kind, data, place)
            place += struct.calcsize(kind)
            return value

        def text() -> str:
            nonlocal place
            length = take("Q")
            if place + length > len(data):
                raise ValueError("a text goes past the end")
            place += length
            return bytes(data[place - length : place]).decode("utf-8")

        def value(kind: int) -> Any:
            nonlocal place
            if kind == _STRING:
                return text()
            if kind != _ARRAY:
                return take(_NUMBERS[kind])
            of, length = take("I"), take("Q")
            if of == _STRING:
                return [text() for _ in range(length)]
            numbers = np.frombuffer(data, np.dtype(_NUMBERS[of]).newbyteorder("<"), length, place)
            place += numbers.nbytes
            return numbers.tolist()

        if (version := take("I")) not in (2, 3):
            raise ValueError(f"version {version}, 2 or 3 was wanted")
        num_tensors, num_values = take("Q"), take("Q")
        for _ in range(num_values):
            key = text()
            self.metadata[key] = value(take("I"))
        found = []
        for _ in range(num_tensors):
            name = text()
            shape = tuple(take("Q") for _ in range(take("I")))[::-1]
            found.append((name, shape, GGMLQuantizationType(take("I")), take("Q")))
        alignment = self.metadata.get("general.alignment", 32)
        first = -(-place // alignment) * alignment
        self.tensors = {
            name: GGUFTensor(shape, kind, GGML_QUANT_SIZES[kind], first + start) for name, shape, kind, start in found
        }

    def _check_kind(self) -> None:
        if self.metadata.get("split.count", 1) > 1 or _SPLIT.search(self.path.name):
            raise ModelError(
                f"target {self.path} is one of several parts; join them: `llama-gguf-split --merge FIRST-PART OUT.gguf`"
            )
        kind = self.metadata.get("general.type", "model")
        if kind != "model" or self.architecture == "clip" or "token_embd.weight" not in self.tensors:
            what = kind if kind != "model" else f"{self.architecture}, without an embedding of tokens"
            raise ModelError(f"target {self.path} is no language model ({what}): name the model's own GGUF file")


def find_gguf(path: str) -> Path | None:
    """The GGUF file behind a target's path: itself, or the only one in a folder without ``config.json``."""
    place = Path(path).expanduser()
    if place.suffix == ".gguf" and not place.is_dir():
        return place
    if place.is_dir() and not (place / "config.json").exists():
        files = list(place.glob("*.gguf"))
        return files[0] if len(files) == 1 else None
    return None


# ------------------------------------------------------------------ the tokenizer


def load_gguf_tokenizer(path: Path) -> Any:
    """The tokenizer of a GGUF file, with its chat template.

    A ``tokenizer.json`` beside the file is taken instead, if it has the file's vocabulary: no GGUF file keeps all of a
    tokenizer, and how to split text is a mere name there.
    Raises: ModelError if that name is not one of those that are known here.
    """
    file = GGUFFile(path)
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelError(f"target {path} has no tokenizer: put the original's tokenizer.json beside it")
    if (path.parent / "tokenizer.json").is_file():
        tokenizer = _beside(path, tokens, file.metadata.get("tokenizer.ggml.token_type"))
    else:
        tokenizer = tokenizer_of(file.metadata, path)
    tokenizer.name_or_path = str(path)
    if not tokenizer.chat_template:
        tokenizer.chat_template = file.metadata.get("tokenizer.chat_template")
    return tokenizer


def _beside(path: Path, tokens: list[str], kinds: list[int] | None) -> Any:
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, trust_remote_code=False)
    except Exception as error:  # a damaged tokenizer.json raises a bare one
        raise ModelError(f"no tokenizer can be loaded from {path.parent}: {error}") from error
    ids = tokenizer.get_vocab()
    for i, token in enumerate(tokens):
        if (kinds is None or kinds[i] == _NORMAL) and ids.get(token) != i:
            raise ModelError(
                f"{path.parent / 'tokenizer.json'} is not the tokenizer of {path.name}: token {i} of the model, "
                f"{token!r}, has the id {ids.get(token)} there. Put the right one beside it, or none"
            )
    return tokenizer


def tokenizer_of(metadata: dict[str, Any], path: Path) -> PreTrainedTokenizerFast:
    """Byte-level BPE from the metadata. Raises: ModelError for another kind, or unknown splitting."""
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS or "tokenizer.ggml.merges" not in metadata:
        raise ModelError(
            f"target {path} has the tokenizer {kind!r} with text split as {pre!r}; known are 'gpt2' with "
            f"{', '.join(_PRE_TOKENIZERS)}. Put the original's tokenizer.json and tokenizer_config.json beside it"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    vocab = {token: i for i, token in enumerate(tokens) if kinds[i] != _UNUSED}  # these fill up the embedding
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]
    tokenizer.decoder = decoders.ByteLevel()
    for of_kind, add in ((_CONTROL, tokenizer.add_special_tokens), (_USER_DEFINED, tokenizer.add_tokens)):
        chosen = [token for token, each in zip(tokens, kinds, strict=True) if each == of_kind]
        add([AddedToken(token, special=of_kind == _CONTROL, normalized=False) for token in chosen])
    named = {
        f"{role}_token": tokens[metadata[f"tokenizer.ggml.{key}_token_id"]]
        for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
        if metadata.get(f"tokenizer.ggml.{key}_token_id") is not None
    }
    if metadata.get("tokenizer.ggml.add_bos_token") and "bos_token" in named:
        bos = named["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocab[bos])]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=metadata.get(f"{metadata['general.architecture']}.context_length"),
        clean_up_tokenization_spaces=False,
        chat_template=metadata.get("tokenizer.chat_template"),
        **named,
    )

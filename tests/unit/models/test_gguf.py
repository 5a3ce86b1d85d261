"""Targets in GGUF files, written with the format's own package: the weights, taps and tokenizer that they stand for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from paceline.data.chat import find_stop_ids
from paceline.data.chat import load_tokenizer as load_data_tokenizer
from paceline.errors import DataError, ModelError
from paceline.gguf_file import GGUFFile, load_gguf_tokenizer
from paceline.models.gguf import open_gguf_weights, read_configs
from paceline.models.loading import load_text_model, load_tokenizer, read_shape
from paceline.models.merged import write_merged
from paceline.models.target import Target
from paceline.plan.outline import read_target
from tests import tiny
from tests.unit.models.test_adapter import adapter_of

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
    **{f"self_attn.{each}_proj": f"attn_{each}" for each in "qkv"},
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    **{f"mlp.{each}_proj": f"ffn_{each}" for each in ("gate", "up", "down")},
}
"""Written down a second time, from llama.cpp's table, so that a wrong line in the package is seen."""

BYTES = list(bytes_to_unicode().values())
MERGES = ["h e", "l l", "he ll", "hell o", "1 2", "12 3", "Ġ hello", "Ġ 1"]
VOCABULARY = [*BYTES, *(merge.replace(" ", "") for merge in MERGES)]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}<|end|>{% endfor %}"


def loops(data: np.ndarray, kind: Kind) -> np.ndarray:
    """What the bytes of quantised rows stand for, number by number."""
    rows = []
    for row in data.reshape(-1, data.shape[-1]):
        numbers: list[np.float32] = []
        size = {Kind.Q8_0: 34, Kind.Q4_0: 18}[kind]
        for start in range(0, len(row), size):
            block = row[start : start + size].tobytes()
            scale = np.frombuffer(block[:2], np.float16)[0].astype(np.float32)
            if kind == Kind.Q8_0:
                ints = list(np.frombuffer(block[2:], np.int8))
            else:  # low halves first, then high ones
                ints = [byte % 16 - 8 for byte in block[2:]] + [byte // 16 - 8 for byte in block[2:]]
            numbers += [scale * np.float32(each) for each in ints]
        rows.append(numbers)
    return np.array(rows, np.float32).reshape(*data.shape[:-1], -1)


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows as llama.cpp's converter orders those of llama's q and k: pairs of a rotation side by side."""
    half = weight.shape[0] // num_heads // 2
    order = [head * 2 * half + part * half + i for head in range(num_heads) for i in range(half) for part in (0, 1)]
    return weight[order]


def write_gguf(
    folder: str,
    path: Path,
    kind: Kind = Kind.F32,
    architecture: str = "llama",
    change: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    tokens: list[str] | None = None,
    **tokenizer: Any,
) -> dict[str, Tensor]:
    """Write a model folder as a GGUF file.

    Args:
        kind: Of matrices; vectors are float32, as converters have it.
        change: Adds more to the file.
        tokens: The vocabulary, filled up to the embedding with unused ones.
        tokenizer: ``tokenizer.ggml.NAME`` in the file.
    Returns: the weights that the file stands for, by Transformers' names.
    """
    config = json.loads((Path(folder) / "config.json").read_text())
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type("model")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(groups)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    if "moe_intermediate_size" in config:
        writer.add_expert_count(transformers.AutoConfig.from_pretrained(folder).num_experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_eos_token_id(config["eos_token_id"])
    if tokens is not None:
        unused = [f"[PAD{i}]" for i in range(len(tokens), config["vocab_size"])]
        writer.add_token_list([*tokens, *unused])
        kinds = [3 if token.startswith("<|") else 4 if token[0] == "<" and len(token) > 1 else 1 for token in tokens]
        writer.add_token_types(kinds + [5] * len(unused))
    for key, value in tokenizer.items():
        writer.add_key_value(f"tokenizer.ggml.{key}", value, gguf.GGUFValueType.get_type(value))
    change(writer)
    wanted = {}
    for name, tensor in load_file(Path(folder) / "model.safetensors").items():
        stem, _, last = name.rpartition(".")
        if ".mlp.experts." in stem:
            continue
        number, _, key = stem.removeprefix("model.layers.").partition(".")
        prefix, key = (f"blk.{number}.", key) if number.isdigit() else ("", stem)
        turned = {"self_attn.q_proj": heads, "self_attn.k_proj": groups}.get(key) if architecture == "llama" else None
        whole = tensor.numpy()
        order = np.arange(len(whole)) if turned is None else interleaved(np.arange(len(whole)), turned)
        chosen = kind if whole.ndim > 1 else Kind.F32
        packed = gguf.quantize(whole[order], chosen)
        writer.add_tensor(f"{prefix}{NAMES[key]}.{last}", packed, raw_dtype=chosen)
        values = loops(packed, chosen) if chosen in (Kind.Q8_0, Kind.Q4_0) else packed.astype(np.float32)
        wanted[name] = torch.from_numpy(values[np.argsort(order)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return wanted


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Folders of tiny dense targets by family, made once."""
    place = tmp_path_factory.mktemp("dense")

    def make(family: str, **changes: Any) -> str:
        folder = place / "-".join([family, *map(str, changes.values())])
        return str(folder) if folder.exists() else tiny.save(tiny.causal_lm(family, **changes), folder)

    return make


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.Q8_0, Kind.Q4_0], ids=lambda kind: kind.name)
def test_weights_and_taps_are_those_of_the_dense_model(
    dense: Callable[..., str], tmp_path: Path, family: str, kind: Kind
) -> None:
    """Every weight is the number that its block stands for, and shape and taps are those of a folder with these."""
    folder = dense(family)
    wanted = write_gguf(folder, tmp_path / "model.gguf", kind, family)
    weights = load_text_model(str(tmp_path / "model.gguf")).state_dict()
    assert weights.keys() - wanted.keys() <= {"lm_head.weight"}  # the tied one is stored once
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted) and len(wanted) > 40
    same = tmp_path / "same"
    shutil.copytree(folder, same)
    save_file(wanted, same / "model.safetensors", metadata={"format": "pt"})
    file, plain = (Target.load(str(path), layer_ids=(0, 1)) for path in (tmp_path / "model.gguf", same))
    ids = torch.arange(1, 40)
    assert torch.equal(file.document_features(ids), plain.document_features(ids))
    assert read_shape(str(tmp_path / "model.gguf")) == read_shape(str(same))
    assert read_target(str(tmp_path / "model.gguf")) == read_target(str(same))


def test_note_and_cut_layers(dense: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The note counts what was quantised; of layers that no tap needs no tensor is read."""
    write_gguf(dense("llama"), tmp_path / "q.gguf", Kind.Q8_0)
    write_gguf(dense("llama"), tmp_path / "f.gguf", Kind.F16)
    read: list[str] = []
    original = GGUFFile.read
    monkeypatch.setattr(GGUFFile, "read", lambda self, name: (read.append(name), original(self, name))[1])
    target = Target.load(str(tmp_path / "q.gguf"), layer_ids=(1,), dtype=torch.bfloat16)
    assert target.quantization_note == "GGUF Q8_0: 37 tensors dequantised to bfloat16"
    assert {name.split(".")[1] for name in read if name.startswith("blk.")} == {"0", "1"}
    assert load_text_model(str(tmp_path / "f.gguf")).quantization_note == "GGUF F16: not quantised, as float32"


def test_tied_biased_and_other_settings(dense: Callable[..., str], tmp_path: Path) -> None:
    """A head of its own or none, biases of llama's attention, rotary base and epsilon as in the model's folder."""
    tied = dense("qwen3", rms_norm_eps=1e-5)
    write_gguf(tied, tmp_path / "tied.gguf", architecture="qwen3")
    config, _ = read_configs(GGUFFile(tmp_path / "tied.gguf"))
    assert config.tie_word_embeddings and config.rms_norm_eps == 1e-5 and config.head_dim == 8
    assert config.rope_parameters["rope_theta"] == 1000000.0
    biased = dense("llama", attention_bias=True)
    wanted = write_gguf(biased, tmp_path / "biased.gguf")
    weights = load_text_model(str(tmp_path / "biased.gguf")).state_dict()
    assert torch.equal(weights["model.layers.1.self_attn.k_proj.bias"], wanted["model.layers.1.self_attn.k_proj.bias"])
    ids = torch.arange(1, 30)
    taps = [
        Target.load(path, layer_ids=(3,)).document_features(ids) for path in (biased, str(tmp_path / "biased.gguf"))
    ]
    assert torch.equal(*taps)


def test_experts(tmp_path: Path) -> None:
    """Experts' gate and up projections are joined as Transformers has them: the taps are the dense folder's."""
    config = transformers.Qwen3MoeConfig(
        **tiny.target_config("qwen3").to_dict()
        | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"norm_topk_prob": True, "architectures": None}
    )
    torch.manual_seed(0)
    model = tiny.randomise(transformers.Qwen3MoeForCausalLM(config))
    folder = tiny.save(model, tmp_path / "folder")

    def experts(writer: gguf.GGUFWriter) -> None:
        for i, layer in enumerate(model.model.layers):
            gate, up = layer.mlp.experts.gate_up_proj.detach().chunk(2, dim=1)
            down = layer.mlp.experts.down_proj.detach()
            for name, values in (("gate", gate), ("up", up), ("down", down)):
                writer.add_tensor(f"blk.{i}.ffn_{name}_exps.weight", np.ascontiguousarray(values.numpy()))

    write_gguf(folder, tmp_path / "model.gguf", architecture="qwen3moe", change=experts)
    ids = torch.arange(1, 30)
    taps = [
        Target.load(path, layer_ids=(0, 3)).document_features(ids) for path in (folder, str(tmp_path / "model.gguf"))
    ]
    assert torch.equal(*taps)


def test_scaled_rotary_frequencies(dense: Callable[..., str], tmp_path: Path) -> None:
    """Llama 3.1's divisors become the settings that make them, YaRN's are kept; other divisors are refused."""
    llama3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
    llama3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = tiny.target_config("llama", rope_parameters=llama3, head_dim=64, max_position_embeddings=131072)
    folder = tiny.save(tiny.randomise(transformers.LlamaForCausalLM(config)), tmp_path / "llama3")
    plain = 1.0 / (500000.0 ** (torch.arange(0, 64, 2).float() / 64))
    divisors = (plain / ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0]).numpy()
    assert divisors.min() == 1.0 and divisors.max() == pytest.approx(8.0)
    write_gguf(folder, tmp_path / "a.gguf", change=lambda writer: writer.add_tensor("rope_freqs.weight", divisors))
    assert read_shape(str(tmp_path / "a.gguf")).rope == llama3
    ids = torch.arange(1, 60)
    taps = [Target.load(path, layer_ids=(2,)).document_features(ids) for path in (folder, str(tmp_path / "a.gguf"))]
    assert torch.equal(*taps)
    divisors[5] += 0.01
    write_gguf(folder, tmp_path / "b.gguf", change=lambda writer: writer.add_tensor("rope_freqs.weight", divisors))
    with pytest.raises(ModelError, match="not Llama 3's"):
        read_shape(str(tmp_path / "b.gguf"))

    def yarn(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(128)

    write_gguf(dense("qwen3"), tmp_path / "c.gguf", architecture="qwen3", change=yarn)
    rope = {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 128}
    assert read_shape(str(tmp_path / "c.gguf")).rope == rope


def test_the_header_is_what_the_package_reads(dense: Callable[..., str], tmp_path: Path) -> None:
    """Values of every type, and every tensor, are those of the format's own reader."""

    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_array("some.numbers", [1.5, -2.0])
        writer.add_array("some.words", ["", "\u00e9t\u00e9", "Ġx"])
        writer.add_uint64("some.long", 1 << 40)
        writer.add_int8("some.byte", -3)
        writer.add_float64("some.double", 1e-300)
        writer.add_bool("some.flag", True)

    write_gguf(dense("llama"), tmp_path / "model.gguf", Kind.Q4_0, change=more)
    file, reader = GGUFFile(tmp_path / "model.gguf"), gguf.GGUFReader(tmp_path / "model.gguf")
    values = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert file.metadata == values and file.metadata["some.words"][1] == "\u00e9t\u00e9"
    assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        assert np.array_equal(file.read(tensor.name), gguf.dequantize(tensor.data, tensor.tensor_type))


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda writer: writer.add_float32("llama.logit_scale", 2.0), "llama.logit_scale, which is not read"),
        (lambda writer: writer.add_uint32("llama.expert_count", 8), "llama.expert_count, which is not read"),
        (lambda writer: writer.add_uint32("llama.rope.dimension_count", 4), "heads of 8, .* is 4"),
        (lambda writer: writer.add_string("llama.rope.scaling.type", "longrope"), "scaled as 'longrope'"),
        (lambda writer: writer.add_uint16("split.count", 3), "one of several parts"),
        (lambda writer: writer.add_tensor("blk.0.attn_sinks.weight", np.ones(4, np.float32)), "attn_sinks.weight"),
    ],
)
def test_what_is_not_understood_is_refused(
    dense: Callable[..., str], tmp_path: Path, change: Callable[[gguf.GGUFWriter], None], message: str
) -> None:
    """A key or tensor that would change the model is named, and not left out."""
    write_gguf(dense("llama"), tmp_path / "model.gguf", change=change)
    with pytest.raises(ModelError, match=message):
        load_text_model(str(tmp_path / "model.gguf"))


def test_other_files_are_refused(dense: Callable[..., str], tmp_path: Path) -> None:
    """Another family, another kind of file, a part of one, one cut short or missing: each with its own message."""
    path = tmp_path / "model.gguf"
    write_gguf(dense("llama"), path, architecture="gemma2")
    with pytest.raises(ModelError, match="is a gemma2; of GGUF files llama, qwen2, qwen3, qwen3moe are read"):
        read_shape(str(path))
    path.unlink()
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    writer.add_tensor("v.patch_embd.weight", np.ones((2, 2), np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    with pytest.raises(ModelError, match=r"no language model \(mmproj\)"):
        read_shape(str(path))
    write_gguf(dense("llama"), tmp_path / "m-00001-of-00003.gguf")
    with pytest.raises(ModelError, match="llama-gguf-split --merge"):
        read_shape(str(tmp_path / "m-00001-of-00003.gguf"))
    whole = (tmp_path / "m-00001-of-00003.gguf").read_bytes()
    for length, message in (
        (0, "no GGUF"),
        (3, "no GGUF"),
        (15, "damaged"),
        (400, "damaged"),
        (len(whole) - 50, "cut"),
    ):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=message):
            read_shape(str(path))
    path.write_bytes(whole[:4] + (1).to_bytes(4, "little") + whole[8:])
    with pytest.raises(ModelError, match="version 1"):
        read_shape(str(path))
    with pytest.raises(ModelError, match="cannot be read: No such file"):
        read_shape(str(tmp_path / "gone.gguf"))
    with pytest.raises(DataError, match="no GGUF|damaged"):
        load_data_tokenizer(str(path))


def test_a_folder_with_one_file(dense: Callable[..., str], tmp_path: Path) -> None:
    """A folder without a config.json stands for the only GGUF file in it; with two it is refused."""
    write_gguf(dense("llama"), tmp_path / "a.gguf")
    assert read_shape(str(tmp_path)) == read_shape(str(tmp_path / "a.gguf"))
    shutil.copy(tmp_path / "a.gguf", tmp_path / "b.gguf")
    with pytest.raises(ModelError, match=r"no config\.json"):
        read_shape(str(tmp_path))


# ------------------------------------------------------------------ the tokenizer

SPECIAL = ["<|end|>", "<|start|>", "<think>"]
TEXTS = ["hello  hello 12345 it's 7\n\n x", "caf\u00e9 cafe\u0301 \u4e2d\u6587 123123", "<|start|>hello<think>1<|end|>"]


def write_tokenizer(folder: str, path: Path, pre: str, **more: Any) -> None:
    end, start = len(VOCABULARY), len(VOCABULARY) + 1
    write_gguf(
        folder,
        path,
        change=lambda writer: writer.add_chat_template(TEMPLATE),
        tokens=[*VOCABULARY, *SPECIAL],
        model="gpt2",
        pre=pre,
        merges=MERGES,
        bos_token_id=start,
        eot_token_id=end,
        **more,
    )


@pytest.fixture(scope="module")
def sized(dense: Callable[..., str]) -> str:
    """A target whose embedding has rows to spare for the vocabulary here."""
    return dense("llama", vocab_size=len(VOCABULARY) + 8, eos_token_id=len(VOCABULARY) + 1)


def test_tokenizer_template_and_stops(sized: str, tmp_path: Path) -> None:
    """Ids, template and ends come from the file: special tokens stay whole, unused ones are no words."""
    path = tmp_path / "model.gguf"
    write_tokenizer(sized, path, "gpt-2")
    tokenizer = load_tokenizer(str(path))
    vocabulary = {token: i for i, token in enumerate(VOCABULARY)}
    reference = transformers.GPT2Tokenizer(vocab=dict(vocabulary), merges=[tuple(each.split()) for each in MERGES])
    for text in TEXTS[:2]:
        assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text, add_special_tokens=False)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    end, start, think = range(len(VOCABULARY), len(VOCABULARY) + 3)
    hello = vocabulary["hello"]
    assert tokenizer.encode(TEXTS[2]) == [start, hello, think, vocabulary["1"], end]
    assert (
        len(tokenizer) == len(VOCABULARY) + 3 and tokenizer.decode([think, end], skip_special_tokens=True) == "<think>"
    )
    assert (tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token) == ("<|start|>", "<|start|>", None)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False) == "hello<|end|>"
    assert read_shape(str(path)).eos_token_ids == (start, end)
    assert find_stop_ids(load_data_tokenizer(str(path))) == [end, start]


def test_splitting_of_families(sized: str, tmp_path: Path) -> None:
    """Text is cut as the families' own tokenizers cut it; a beginning is added where the file says so."""
    tokenizers = {}
    for pre in ("smollm", "llama-bpe", "qwen2"):
        write_tokenizer(sized, tmp_path / f"{pre}.gguf", pre, add_bos_token=pre == "llama-bpe")
        tokenizers[pre] = load_gguf_tokenizer(tmp_path / f"{pre}.gguf")
    vocabulary = {token: i for i, token in enumerate(VOCABULARY)}
    qwen = transformers.Qwen2Tokenizer(vocab=dict(vocabulary), merges=[tuple(each.split()) for each in MERGES])
    for text in TEXTS[:2]:
        assert tokenizers["qwen2"].encode(text) == qwen.encode(text)
    cuts = {
        pre: each.backend_tokenizer.pre_tokenizer.pre_tokenize_str(" 1234 it's") for pre, each in tokenizers.items()
    }
    words = {pre: [word for word, _ in each] for pre, each in cuts.items()}
    assert words["smollm"] == ["Ġ", "1", "2", "3", "4", "Ġit", "'s"]
    assert words["qwen2"] == ["Ġ", "1", "2", "3", "4", "Ġit", "'s"]
    assert words["llama-bpe"] == ["Ġ", "123", "4", "Ġit", "'s"]
    assert tokenizers["llama-bpe"].encode("hello") == [len(VOCABULARY) + 1, vocabulary["hello"]]
    assert tokenizers["llama-bpe"].encode("hello", add_special_tokens=False) == [vocabulary["hello"]]
    assert isinstance(tokenizers["smollm"].backend_tokenizer.pre_tokenizer, pre_tokenizers.Sequence)


def test_a_tokenizer_beside_the_file(sized: str, tmp_path: Path) -> None:
    """Unknown splitting is refused until the original tokenizer lies beside the file; another model's is refused."""
    path = tmp_path / "model.gguf"
    write_tokenizer(sized, path, "tekken")
    with pytest.raises(ModelError, match="split as 'tekken'; known are 'gpt2' with gpt-2, smollm, llama-bpe, qwen2"):
        load_tokenizer(str(path))
    other = tmp_path / "other"
    other.mkdir()
    write_tokenizer(sized, other / "known.gguf", "qwen2")
    original = load_tokenizer(str(other / "known.gguf"))
    original.chat_template = None
    original.save_pretrained(tmp_path)
    found = load_tokenizer(str(path))
    assert found.encode(TEXTS[0]) == original.encode(TEXTS[0]) and found.chat_template == TEMPLATE
    assert find_stop_ids(load_data_tokenizer(str(path))) == [len(VOCABULARY), len(VOCABULARY) + 1]
    tree = json.loads((tmp_path / "tokenizer.json").read_text())
    vocab = tree["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    with pytest.raises(ModelError, match=r"tokenizer\.json is not the tokenizer of model\.gguf"):
        load_tokenizer(str(path))


def test_an_adapter_is_merged_and_written(sized: str, tmp_path: Path) -> None:
    """An adapter changes a file's weights as it changes those of the folder, and the merged model is a folder."""
    write_tokenizer(sized, tmp_path / "model.gguf", "qwen2")
    adapter, _ = adapter_of(sized, tmp_path / "adapter")
    merged, plain = (load_text_model(path, adapter=adapter) for path in (str(tmp_path / "model.gguf"), sized))
    assert all(torch.equal(merged.state_dict()[name], each) for name, each in plain.state_dict().items())
    kind, is_part = write_merged(str(tmp_path / "model.gguf"), adapter, tmp_path / "out")
    assert (kind, is_part) == (torch.bfloat16, False)
    shape = read_shape(str(tmp_path / "model.gguf"))
    assert read_shape(str(tmp_path / "out")) == shape and len(shape.eos_token_ids) == 2
    one, other = (load_tokenizer(str(tmp_path / name)) for name in ("out", "model.gguf"))
    assert one.encode(TEXTS[0]) == other.encode(TEXTS[0])


def test_lazy_weights_have_memory_of_their_own(dense: Callable[..., str], tmp_path: Path) -> None:
    """A weight that was read can be written to, and the file stays as it is."""
    write_gguf(dense("llama"), tmp_path / "model.gguf")
    before = (tmp_path / "model.gguf").read_bytes()
    weights, kinds, num_quantized = open_gguf_weights(GGUFFile(tmp_path / "model.gguf"))
    weights["model.norm.weight"][...].zero_()
    assert (kinds, num_quantized) == ("F32", 0) and (tmp_path / "model.gguf").read_bytes() == before

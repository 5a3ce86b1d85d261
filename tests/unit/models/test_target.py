"""The frozen target: taps, cut, text part of wrappers, packing by probe, caches, and the errors of bad folders."""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from paceline.errors import ConfigError, ModelError
from paceline.kernels.linear_cross_entropy import Head
from paceline.models.loading import (
    check_layer_ids,
    default_layer_ids,
    load_tokenizer,
    quiet_transformers,
    read_shape,
    shape_of,
)
from paceline.models.target import FeatureCache, Target
from paceline.records import TokenBatch
from tests import tiny

IDS = torch.tensor([11, 12, 13, 14, 15, 16, 240, 3, 99, 15, 2, 2, 77, 101, 8])


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Any:
    """One compute thread, so that equal bits may be asked for."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A model folder of every family; never changed."""
    root = tmp_path_factory.mktemp("targets")
    return {family: tiny.save(tiny.causal_lm(family), root / family) for family in tiny.FAMILIES}


@pytest.fixture(scope="module")
def models(folders: dict[str, str]) -> dict[str, Any]:
    """The library's model of every folder; never changed. Gemma 2 runs eager: under SDPA Transformers 5.17 leaves its
    soft cap out."""
    own = {"gemma2": "eager"}
    return {family: library_model(folder, own.get(family)) for family, folder in folders.items()}


def library_model(folder: str, attention: str | None = None, kind: Any = transformers.AutoModelForCausalLM) -> Any:
    """A folder's model as the library loads it. Bits may be compared with a target's: the weights of both lie in memory
    as in the file, and where a vector starts decides in which order BLAS adds."""
    with quiet_transformers():
        return kind.from_pretrained(folder, attn_implementation=attention).eval()


def hidden_states(trunk: Any, ids: Tensor = IDS) -> list[Tensor]:
    """The library's hidden states ``[n, D]`` of one document: embedding, then layer by layer, the last one normed."""
    with torch.no_grad():
        return [h[0] for h in trunk(input_ids=ids[None], output_hidden_states=True, use_cache=False).hidden_states]


def edited(folder: str, to: Path, edit: Callable[[dict[str, Tensor]], Any]) -> str:
    """A copy of a model folder with other tensors."""
    shutil.copytree(folder, to)
    weights = load_file(to / "model.safetensors")
    edit(weights)
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    return str(to)


def reconfigured(folder: str, to: Path, edit: Callable[[dict[str, Any]], Any]) -> str:
    """A copy of a model folder with another config.json."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    edit(config)
    (to / "config.json").write_text(json.dumps(config))
    return str(to)


# ------------------------------------------------------------------ layer ids


@pytest.mark.parametrize(
    ("num_layers", "num_taps", "ids"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (64, 5, (1, 16, 31, 46, 61)),
        (40, 5, (1, 10, 19, 28, 37)),
        (40, 8, (1, 6, 11, 16, 22, 27, 32, 37)),
        (8, 5, (1, 2, 3, 4, 5)),
    ],
)
def test_default_taps_are_the_published_ones(num_layers: int, num_taps: int, ids: tuple[int, ...]) -> None:
    """The spread of released drafters, Python's rounding included."""
    assert default_layer_ids(num_layers, num_taps) == ids


def test_default_taps_of_any_depth_are_servable() -> None:
    """Every depth from 2 gets ascending taps without repeats, below the last layer, and five from depth 8."""
    for num_layers in range(2, 131):
        ids = default_layer_ids(num_layers)
        assert ids and list(ids) == sorted(set(ids)) and ids[0] >= 0 and ids[-1] <= num_layers - 2
        assert check_layer_ids(ids, num_layers) == ids
        assert len(ids) == 5 or num_layers < 8
    with pytest.raises(ConfigError, match="1 layer"):
        default_layer_ids(1)


@pytest.mark.parametrize("ids", [[2, 2], [-1, 2], [0, 5], [3, 1], [0, 4], []])
def test_p02_bad_layer_lists_name_key_and_value(ids: list[int]) -> None:
    """Case P02: repeats, ids out of range, another order, the last layer and no layer are refused by key and value."""
    with pytest.raises(ConfigError) as caught:
        check_layer_ids(ids, 5)
    assert f"target.layer_ids={ids}" in str(caught.value)


class AddLayer(nn.Module):
    def __init__(self, amount: int) -> None:
        super().__init__()
        self.amount = amount

    def forward(self, x: Tensor) -> Tensor:
        return x + self.amount


class AdditiveTrunk(nn.Module):
    """Case P02's stack: layer i adds i + 1, the final norm multiplies by 100."""

    def __init__(self, returns_tuple: bool) -> None:
        super().__init__()
        self.config = transformers.LlamaConfig(num_hidden_layers=5)
        self.embed_tokens = nn.Embedding.from_pretrained(torch.zeros(8, 1))
        self.layers = nn.ModuleList(AddLayer(i + 1) for i in range(5))
        self.norm = nn.Identity()
        self.returns_tuple = returns_tuple
        if returns_tuple:
            for layer in self.layers:
                layer.forward = (lambda add: lambda x: (add(x),))(layer.forward)  # type: ignore[method-assign]

    def forward(self, input_ids: Tensor, use_cache: bool) -> Tensor:
        assert not use_cache
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)[0] if self.returns_tuple else layer(x)
        return self.norm(x) * 100


class AdditiveLM(nn.Module):
    def __init__(self, returns_tuple: bool) -> None:
        super().__init__()
        self.model = AdditiveTrunk(returns_tuple)
        self.lm_head = nn.Linear(1, 8, bias=False)

    def get_decoder(self) -> nn.Module:
        return self.model

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


@pytest.mark.parametrize("returns_tuple", [False, True])
@pytest.mark.parametrize(("ids", "values"), [((0, 2), [1, 6]), ((1, 3), [3, 10])])
def test_p02_a_tap_is_the_output_of_its_layer(
    folders: dict[str, str], ids: tuple[int, ...], values: list[int], returns_tuple: bool
) -> None:
    """Case P02: id i means the output of layer i, whether layers return tensors or tuples, joined in order."""
    shape = read_shape(folders["llama"])
    target = Target(AdditiveLM(returns_tuple), type(shape)(**(vars(shape) | {"hidden_size": 1})), ids)
    feature = target.document_features(torch.tensor([1, 2, 3]))
    assert feature.tolist() == [[float(v) for v in values]] * 3
    assert target.feature_size == feature.shape[1] == len(ids)


# ------------------------------------------------------------------ taps of real families


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_taps_are_the_librarys_hidden_states(models: dict[str, Any], folders: dict[str, str], family: str) -> None:
    """Every layer's tap equals `hidden_states[i + 1]` to the bit, on the whole model and on the one cut after it."""
    wanted = hidden_states(models[family].get_decoder())
    num_layers = len(wanted) - 1
    target = Target.load(folders[family], layer_ids=range(num_layers - 1))
    taps = target.document_features(IDS).split(32, dim=-1)
    assert len(taps) == num_layers - 1 and target.feature_size == 32 * len(taps)
    for i, tap in enumerate(taps):
        assert torch.equal(tap, wanted[i + 1])
    for last in range(num_layers - 1):
        assert torch.equal(Target.load(folders[family], layer_ids=[last]).document_features(IDS), wanted[last + 1])


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_layers_past_the_last_tap_are_not_kept(folders: dict[str, str], family: str) -> None:
    """The trunk ends with its last tap and has no norm, yet the shape tells the whole depth."""
    target = Target.load(folders[family], layer_ids=(0, 2))
    names = [name for name, _ in target._trunk.named_parameters()]
    assert {int(n.split(".")[1]) for n in names if n.startswith("layers.")} == {0, 1, 2}
    assert not any(name.startswith("norm") for name in names)
    assert target.shape == read_shape(folders[family]) and target.shape.num_layers in (5, 8)
    assert not any(p.requires_grad for p in target._trunk.parameters()) and not target._trunk.training


def test_a_whole_model_is_cut_in_place() -> None:
    """A model handed over with all its layers is cut after the last tap, and its taps are unchanged."""
    model = tiny.causal_lm("llama")
    wanted = hidden_states(model.get_decoder())
    target = Target(model, shape_of(model.config, None), (0, 2))
    assert len(model.get_decoder().layers) == 3
    assert torch.equal(target.document_features(IDS), torch.cat([wanted[1], wanted[3]], -1))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_last_hidden_state_is_the_librarys(models: dict[str, Any], folders: dict[str, str], family: str) -> None:
    """With `needs_last_hidden` nothing is cut and the state after the final norm comes beside unchanged taps."""
    wanted = hidden_states(models[family].get_decoder())
    target = Target.load(folders[family], layer_ids=(0, 2), needs_last_hidden=True)
    batch = target.features(tiny_batch([IDS]))
    assert batch.last_hidden is not None and torch.equal(batch.last_hidden[: len(IDS)], wanted[-1])
    assert torch.equal(batch.context_feature[: len(IDS)], torch.cat([wanted[1], wanted[3]], -1))
    assert Target.load(folders[family], layer_ids=(0, 2)).features(tiny_batch([IDS])).last_hidden is None


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_embedding_and_head_are_the_librarys(models: dict[str, Any], folders: dict[str, str], family: str) -> None:
    """The shared embedding scales and the shared head caps as the family does, so logits equal the library's."""
    model = models[family]
    target = Target.load(folders[family], layer_ids=(0, 2), needs_last_hidden=True)
    states = hidden_states(model.get_decoder())
    assert torch.equal(target.embed(IDS), states[0])
    with torch.no_grad():
        wanted = model(input_ids=IDS[None], use_cache=False).logits[0]
    torch.testing.assert_close(target.head.logits(states[-1]), wanted, rtol=1e-5, atol=1e-5)
    assert not target.head.weight.requires_grad


def test_family_quirks_reach_the_shape(folders: dict[str, str]) -> None:
    """Gemma's scaled embedding and soft cap, and whether head and embedding are tied, are told apart."""
    gemma = Target.load(folders["gemma2"], layer_ids=(1,))
    assert gemma.shape.softcap == gemma.head.softcap == 30.0
    row = gemma.embed.weight[IDS]
    torch.testing.assert_close(gemma.embed(IDS), row * 32**0.5, rtol=1e-4, atol=0)
    assert read_shape(folders["gemma3"]).rope["rope_theta"] == 1e6  # that of the full-attention layers
    tied, untied = Target.load(folders["qwen3"]), Target.load(folders["llama"])
    assert tied.shape.tie_word_embeddings and torch.equal(tied.head.weight, tied.embed.weight)
    assert not untied.shape.tie_word_embeddings and not torch.equal(untied.head.weight, untied.embed.weight)
    shape = read_shape(folders["qwen3"])
    assert (shape.vocab_size, shape.num_key_value_heads, shape.head_dim, shape.eos_token_ids) == (272, 2, 8, (257,))


def test_granite_divides_and_cohere_multiplies_the_logits(tmp_path: Path) -> None:
    """Factors of the final logits keep their direction: Granite's divides, Cohere's multiplies."""
    small = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3,
             "num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": None}  # fmt: skip
    for config in (
        transformers.GraniteConfig(**small, logits_scaling=8.0),
        transformers.CohereConfig(**small, logit_scale=0.0625),
    ):
        with quiet_transformers():
            model = tiny.randomise(transformers.AutoModelForCausalLM.from_config(config))
        folder = tiny.save(model, tmp_path / config.model_type)
        target = Target.load(folder, layer_ids=(0, 1), needs_last_hidden=True)
        ids = torch.tensor([1, 5, 9])
        with torch.no_grad():
            wanted = model(input_ids=ids[None], use_cache=False).logits[0]
        last = target.features(tiny_batch([ids])).last_hidden
        assert last is not None
        torch.testing.assert_close(target.head.logits(last[:3]), wanted, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------ wrappers, damaged and foreign folders


def wrapper(family: str) -> tuple[Any, Any]:
    """A tiny multimodal wrapper, and its text trunk."""
    text = tiny.target_config(family).to_dict()
    with quiet_transformers():
        torch.manual_seed(0)
        if family == "qwen3_5":
            vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
                      "patch_size": 4, "num_position_embeddings": 16}  # fmt: skip
            config = transformers.Qwen3_5Config(
                text_config=text, vision_config=vision, image_token_id=265, video_token_id=266,
                vision_start_token_id=259, vision_end_token_id=260,
            )  # fmt: skip
            model = transformers.Qwen3_5ForConditionalGeneration(config)
        else:
            vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                      "image_size": 8, "patch_size": 4}  # fmt: skip
            config = transformers.Gemma3Config(
                text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=265,
                boi_token_index=259, eoi_token_index=260,
            )  # fmt: skip
            model = transformers.Gemma3ForConditionalGeneration(config)
    return tiny.randomise(model), model.model.language_model


@pytest.mark.parametrize("family", ["qwen3_5", "gemma3"])
def test_the_text_part_of_a_multimodal_checkpoint(tmp_path: Path, family: str) -> None:
    """Of a wrapper with vision and `mtp.*` tensors the text part loads, cut, with the wrapper's taps to the bit."""
    model, _ = wrapper(family)
    plain = tiny.save(model, tmp_path / "plain")

    def add_mtp(weights: dict[str, Tensor]) -> None:
        assert any("vision" in key or "visual" in key for key in weights)
        weights |= {"mtp.fc.weight": torch.ones(3, 3), "mtp.layers.0.input_layernorm.weight": torch.ones(3)}

    folder = edited(plain, tmp_path / "with mtp", add_mtp)
    target = Target.load(folder, layer_ids=(1, 3), needs_last_hidden=False)
    states = hidden_states(library_model(folder, kind=type(model)).model.language_model)
    assert torch.equal(target.document_features(IDS), torch.cat([states[2], states[4]], -1))
    assert torch.equal(target.embed(IDS), states[0])
    assert torch.equal(target.head.weight, model.get_output_embeddings().weight)
    assert len(target._trunk.layers) == 4
    assert target.shape.model_type == f"{family}_text" and target.shape.hidden_size == 32


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"]
)
def test_a_missing_tensor_is_named(folders: dict[str, str], tmp_path: Path, name: str) -> None:
    """A checkpoint without a tensor that is needed is refused by its name, rather than filled with random numbers."""
    folder = edited(folders["llama"], tmp_path / "cut", lambda weights: weights.pop(name))
    with pytest.raises(ModelError, match=f"missing.*{name}"):
        Target.load(folder, needs_last_hidden=True)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.extra.weight", "model.extra_norm.weight", "adapter.weight"])
def test_an_unexpected_tensor_is_named(folders: dict[str, str], tmp_path: Path, name: str) -> None:
    """A tensor that is neither the text model's nor an expected leftover is refused by its name."""
    folder = edited(folders["llama"], tmp_path / "more", lambda weights: weights.update({name: torch.ones(2)}))
    with pytest.raises(ModelError, match=f"unexpected.*{name}"):
        Target.load(folder)


def test_a_tensor_of_another_shape_is_named(folders: dict[str, str], tmp_path: Path) -> None:
    """A tensor that does not fit the configuration is refused by its name."""
    name = "model.layers.1.mlp.up_proj.weight"
    folder = edited(folders["llama"], tmp_path / "odd", lambda weights: weights.update({name: torch.ones(2, 2)}))
    with pytest.raises(ModelError, match=f"other shapes.*{name}"):
        Target.load(folder)


def test_layers_past_the_last_tap_may_be_absent(folders: dict[str, str], tmp_path: Path) -> None:
    """A tensor of a layer that is not run is not asked for; without the cut it is."""
    name = "model.layers.4.mlp.up_proj.weight"
    folder = edited(folders["llama"], tmp_path / "late", lambda weights: weights.pop(name))
    assert torch.equal(
        Target.load(folder, layer_ids=(0, 3)).document_features(IDS),
        Target.load(folders["llama"], layer_ids=(0, 3)).document_features(IDS),
    )
    with pytest.raises(ModelError, match=name):
        Target.load(folder, layer_ids=(0, 3), needs_last_hidden=True)


def test_folders_that_are_no_target(folders: dict[str, str], tmp_path: Path) -> None:
    """Empty, missing, damaged, encoder-decoder and foreign folders are a ModelError with the folder or the cause."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"empty has no config\.json"):
        Target.load(str(tmp_path / "empty"))
    with pytest.raises(ModelError, match="absent.*no such folder"):
        Target.load(str(tmp_path / "absent"))
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    with pytest.raises(ModelError, match="broken"):
        read_shape(str(broken))
    (broken / "config.json").write_text('{"model_type": "never-heard-of"}')
    with pytest.raises(ModelError, match="never-heard-of"):
        read_shape(str(broken))
    shutil.copy(Path(folders["llama"]) / "config.json", broken / "config.json")
    with pytest.raises(ModelError, match="broken cannot be loaded"):
        Target.load(str(broken))
    (broken / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ModelError, match="broken cannot be loaded"):
        Target.load(str(broken))
    transformers.T5Config(num_layers=1, d_model=16, num_heads=2, d_kv=8).save_pretrained(tmp_path / "t5")
    with pytest.raises(ModelError, match=r"encoder-decoder \(t5\)"):
        Target.load(str(tmp_path / "t5"))
    with pytest.raises(ModelError, match="no tokenizer"):
        load_tokenizer(folders["llama"])


def test_a_target_without_rotary_positions_is_refused(tmp_path: Path) -> None:
    """A family without rope_theta cannot give the drafter its positions: an error that names the key."""
    with quiet_transformers():
        transformers.GPT2Config(n_layer=3, n_embd=16, n_head=2).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ModelError, match="rope_theta"):
        read_shape(str(tmp_path / "gpt2"))


def test_an_assumed_rope_theta_is_told(
    folders: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Case X02: both schemas give their theta in silence; the library's default, where the file has none, is logged."""

    def old_schema(config: dict[str, Any]) -> None:
        del config["rope_parameters"]
        config |= {"rope_theta": 5e6, "rope_scaling": None}

    with caplog.at_level(logging.WARNING, "paceline"):
        assert read_shape(folders["qwen3"]).rope == {"rope_type": "default", "rope_theta": 1e6}
        old = reconfigured(folders["qwen3"], tmp_path / "old", old_schema)
        assert read_shape(old).rope["rope_theta"] == 5e6
        assert not caplog.records
        none = reconfigured(folders["qwen3"], tmp_path / "none", lambda config: config.pop("rope_parameters"))
        assert read_shape(none).rope["rope_theta"] == 10000.0
    assert len(caplog.records) == 1 and "rope_theta" in caplog.text and "10000" in caplog.text


def test_a_head_with_a_bias_is_refused(models: dict[str, Any], folders: dict[str, str]) -> None:
    """A drafter shares a plain matrix, so a head with a bias is an error."""
    model = tiny.causal_lm("llama")
    model.lm_head.bias = nn.Parameter(torch.zeros(tiny.VOCAB))
    with pytest.raises(ModelError, match="bias"):
        Target(model, read_shape(folders["llama"]), (0, 2))


# ------------------------------------------------------------------ documents in one row


def tiny_batch(documents: list[Tensor], length: int | None = None, first_row: int = 0) -> TokenBatch:
    total = sum(len(d) for d in documents)
    parts = [(first_row + i, d, torch.ones(len(d), dtype=torch.bool)) for i, d in enumerate(documents)]
    return TokenBatch.pack(0, parts, total + 4 if length is None else length)


P01_DOCUMENTS = [torch.tensor([11, 12, 13, 14, 15]), torch.tensor([21, 22, 23, 24, 25, 26, 27])]


def p01_target(attention: str, packing: str) -> Target:
    """Case P01's tiny target on one of the library's attentions."""
    model = tiny.causal_lm("qwen3", attention=attention)
    assert model.config._attn_implementation == attention
    return Target(model, shape_of(model.config, None), (0, 1, 2, 3), packing)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_p01_two_documents_in_one_row(attention: str) -> None:
    """Case P01: features of both documents equal the stand-alone ones within 1e-4, on sdpa and eager attention."""
    batch = tiny_batch(P01_DOCUMENTS, 16)
    assert batch.document_ids.tolist() == [0] * 5 + [1] * 7 + [-1] * 4
    assert batch.position_ids.tolist() == [*range(5), *range(7), 0, 0, 0, 0]
    target = p01_target(attention, "packed")
    assert target.packed
    feature = target.features(batch).context_feature
    alone = [target.document_features(d) for d in P01_DOCUMENTS]
    torch.testing.assert_close(feature[:12], torch.cat(alone), rtol=0, atol=1e-4)
    assert feature.isfinite().all() and not feature[12:].any()
    # the trap: reset positions beside an all-ones mask let document 1 read document 0
    leaky = torch.empty_like(feature)
    target._run(
        leaky,
        batch.input_ids[None],
        position_ids=batch.position_ids[None],
        attention_mask=torch.ones(1, 16, dtype=torch.int64),
    )
    torch.testing.assert_close(leaky[:5], alone[0], rtol=0, atol=1e-4)
    assert (leaky[5] - alone[1][0]).abs().max() > 0.1


def test_p01_the_exact_mask() -> None:
    """Case P01: each token sees its own document up to itself; padding sees only itself, so nothing is NaN."""
    target = p01_target("sdpa", "per_document")
    mask = target._dense_masks(tiny_batch(P01_DOCUMENTS, 16))["full_attention"]
    assert mask.shape == (1, 1, 16, 16) and mask.dtype == torch.float32
    rows = ["".join("1" if value == 0 else "." for value in row) for row in mask[0, 0].tolist()]
    first = ["1" * (i + 1) + "." * (15 - i) for i in range(5)]
    second = ["." * 5 + "1" * (i + 1) + "." * (10 - i) for i in range(7)]
    padding = ["." * (12 + i) + "1" + "." * (3 - i) for i in range(4)]
    assert rows == first + second + padding


def test_the_probe_finds_a_mask_that_is_ignored(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    """With P01's trap in place of the mask the probe says that documents leak, and they run one by one."""
    monkeypatch.setattr(Target, "_dense_masks", lambda self, tokens: torch.ones(1, len(tokens.input_ids)))
    with caplog.at_level(logging.WARNING, "paceline"):
        target = p01_target("sdpa", "packed")
    assert not target.packed and "one by one" in target.packing_note
    batch = tiny_batch(P01_DOCUMENTS, 16)
    wanted = torch.cat([target.document_features(d) for d in P01_DOCUMENTS])
    assert torch.equal(target.features(batch).context_feature[:12], wanted)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3"])
def test_packed_features_equal_those_of_documents_alone(folders: dict[str, str], family: str) -> None:
    """Packed, every document has the features it has alone, within 1e-4, also with windows shorter than documents."""
    documents = [torch.randint(1, 250, (n,), generator=torch.Generator().manual_seed(n)) for n in (19, 1, 3, 40)]
    batch = tiny_batch(documents, 70)
    packed = Target.load(folders[family], layer_ids=(0, 1, 2, 3), packing="packed")
    one_by_one = Target.load(folders[family], layer_ids=(0, 1, 2, 3), packing="per_document")
    assert packed.packed and "packed" in packed.packing_note and not one_by_one.packed
    got, wanted = packed.features(batch).context_feature, one_by_one.features(batch).context_feature
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)
    assert got.shape == (70, 128) and not wanted[63:].any() and not got[63:].any()


@pytest.mark.parametrize(
    ("name", "own", "packs"),
    [
        ("GptOssConfig", {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 6}, True),
        ("MistralConfig", {"sliding_window": 6}, True),
        ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}, True),
        ("Qwen3MoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}, True),
        ("Cohere2Config", {"sliding_window": 6}, True),
        (
            "Qwen3NextConfig",
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
             "shared_expert_intermediate_size": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
             "linear_key_head_dim": 8, "linear_value_head_dim": 8},
            False,
        ),
    ],
)  # fmt: skip
def test_other_families(tmp_path: Path, name: str, own: dict[str, Any], packs: bool) -> None:
    """Windows with and without layer types, sinks, experts: taps to the bit, packed only if documents stay apart."""
    small = {"vocab_size": 272, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
             "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None, "bos_token_id": None,
             "eos_token_id": 257}  # fmt: skip
    with quiet_transformers():
        torch.manual_seed(0)
        model = tiny.randomise(
            transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**small, **own))
        )
    folder = tiny.save(model, tmp_path / "model")
    target = Target.load(folder, layer_ids=(0, 1, 2), packing="packed")
    assert target.packed is packs
    states = hidden_states(library_model(folder).get_decoder())
    assert torch.equal(target.document_features(IDS), torch.cat(states[1:4], -1))
    documents = [IDS, IDS[:3], IDS.flip(0)]
    feature = target.features(tiny_batch(documents)).context_feature
    wanted = torch.cat([target.document_features(d) for d in documents])
    torch.testing.assert_close(feature[: len(wanted)], wanted, rtol=0, atol=1e-4)


def test_a_hybrid_target_is_never_packed(folders: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    """Layers that carry state from document to document are found by the probe, told in one line, run one by one."""
    with caplog.at_level(logging.WARNING, "paceline"):
        target = Target.load(folders["qwen3_5"], layer_ids=(1, 5), packing="packed")
    assert not target.packed
    assert [record.getMessage() for record in caplog.records] == [target.packing_note]
    assert "one by one" in target.packing_note and "qwen3_5" in target.packing_note and "\n" not in target.packing_note
    documents = [IDS, IDS[:3], IDS.flip(0)]
    feature = target.features(tiny_batch(documents)).context_feature
    assert torch.equal(feature[: 2 * len(IDS) + 3], torch.cat([target.document_features(d) for d in documents]))


def test_a_target_that_packs_says_so_without_a_warning(
    folders: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """Llama's documents stay apart: the probe says so and nothing is logged."""
    with caplog.at_level(logging.WARNING, "paceline"):
        target = Target.load(folders["llama"], packing="packed")
    assert target.packed and not caplog.records


def test_on_the_cpu_documents_run_one_by_one_with_the_same_bits_in_any_packing(folders: dict[str, str]) -> None:
    """`auto` on the CPU: a document's features are bit-equal wherever it stands in a row, zeros on padding."""
    target = Target.load(folders["llama"])
    assert not target.packed
    a, b = IDS, IDS.flip(0)[:7]
    first, second = target.features(tiny_batch([a, b])), target.features(tiny_batch([b, a], 40))
    n = len(a)
    assert torch.equal(first.context_feature[:n], second.context_feature[7 : 7 + n])
    assert torch.equal(first.context_feature[n : n + 7], second.context_feature[:7])
    assert not second.context_feature[n + 7 :].any() and second.context_feature.shape == (40, target.feature_size)
    assert first.context_feature.dtype == target.dtype == torch.float32


def test_bfloat16_targets_give_bfloat16_features(folders: dict[str, str]) -> None:
    """Weights and features have the type asked for, packed or not."""
    for packing in ("packed", "per_document"):
        target = Target.load(folders["llama"], layer_ids=(0, 3), dtype=torch.bfloat16, packing=packing)
        assert target.packed == (packing == "packed")
        batch = target.features(tiny_batch([IDS, IDS[:4]]))
        assert batch.context_feature.dtype == target.head.weight.dtype == torch.bfloat16
        wide = Target.load(folders["llama"], layer_ids=(0, 3)).features(tiny_batch([IDS, IDS[:4]])).context_feature
        assert (batch.context_feature.float() - wide).norm() / wide.norm() < 3e-2


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5"])
def test_threads_may_share_a_target(folders: dict[str, str], family: str) -> None:
    """Three threads that run rows at once get the bits that each gets alone."""
    target = Target.load(folders[family], layer_ids=(0, 2))
    rows = [[tiny.row([9 + i, 20 - j], 40, seed=10 * i + j) for j in range(6)] for i in range(3)]
    wanted = [[target.features(row).context_feature for row in part] for part in rows]
    got: list[list[Tensor]] = [[], [], []]
    barrier = threading.Barrier(3)

    def work(i: int) -> None:
        torch.set_num_threads(1)
        barrier.wait()
        got[i] = [target.features(row).context_feature for row in rows[i]]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for mine, alone in zip(got, wanted, strict=True):
        assert len(mine) == 6 and all(torch.equal(a, b) for a, b in zip(mine, alone, strict=True))


# ------------------------------------------------------------------ cache, fingerprint


def test_the_cache_stops_at_its_budget() -> None:
    """Documents are kept as long as they fit; a full cache keeps what it has and a row is kept once."""
    cache = FeatureCache(100)
    small, large = torch.zeros(2, 5), torch.ones(5, 5)  # 40 and 100 bytes
    cache.put(1, small)
    cache.put(2, large)
    cache.put(3, small + 3)
    cache.put(1, small + 9)
    cache.put(4, small)
    assert cache.get(1) is small and cache.get(2) is None and cache.get(4) is None
    kept = cache.get(3)
    assert kept is not None and torch.equal(kept, small + 3)


def test_cached_features_are_the_same_bits(folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A second pass takes every document by its data set row from the cache and runs no layer."""
    target, cache = Target.load(folders["llama"]), FeatureCache(1 << 20)
    batch = tiny_batch([IDS, IDS[:6]], first_row=40)
    first = target.features(batch, cache).context_feature
    assert torch.equal(first, target.features(batch).context_feature)
    kept = cache.get(41)
    assert kept is not None and torch.equal(kept, first[15:21]) and cache.get(0) is None
    monkeypatch.setattr(target, "_run", lambda *args, **kwargs: pytest.fail("the target ran"))
    swapped = TokenBatch.pack(1, [(41, IDS[:6], torch.ones(6)), (40, IDS, torch.ones(15))], 30)
    again = target.features(swapped, cache).context_feature
    assert torch.equal(again[:6], first[15:21]) and torch.equal(again[6:21], first[:15]) and not again[21:].any()


def test_the_cache_holds_the_last_hidden_state_too(folders: dict[str, str]) -> None:
    """With `needs_last_hidden` both parts come from the cache, in their own widths."""
    target, cache = Target.load(folders["llama"], layer_ids=(0, 2), needs_last_hidden=True), FeatureCache(1 << 20)
    first, again = (target.features(tiny_batch([IDS]), cache) for _ in range(2))
    assert first.last_hidden is not None and again.last_hidden is not None
    assert torch.equal(first.last_hidden, again.last_hidden) and first.last_hidden.shape[1] == 32
    assert torch.equal(first.context_feature, again.context_feature) and first.context_feature.shape[1] == 64


def test_the_fingerprint_tells_another_target_not_another_folder(folders: dict[str, str], tmp_path: Path) -> None:
    """Equal weights elsewhere have the same fingerprint; one other weight, or another configuration, has not."""
    original = Target.load(folders["llama"], layer_ids=(0, 3)).fingerprint()
    shutil.copytree(folders["llama"], tmp_path / "copy")
    assert Target.load(str(tmp_path / "copy"), layer_ids=(0, 3)).fingerprint() == original

    def nudge(weights: dict[str, Tensor]) -> None:
        weights["model.layers.2.mlp.up_proj.weight"][0, 5] += 0.25

    def swap_head(weights: dict[str, Tensor]) -> None:
        weights["lm_head.weight"] = weights["lm_head.weight"].flip(0)

    for name, edit in {"nudged": nudge, "head": swap_head}.items():
        other = edited(folders["llama"], tmp_path / name, edit)
        assert Target.load(other, layer_ids=(0, 3)).fingerprint() != original
    theta = reconfigured(
        folders["llama"], tmp_path / "theta", lambda config: config["rope_parameters"].update(rope_theta=5.0)
    )
    assert Target.load(theta, layer_ids=(0, 3)).fingerprint() != original


def test_the_head_may_be_kept_in_another_type(folders: dict[str, str]) -> None:
    """The head is a plain record that the drafter casts."""
    head = Target.load(folders["gemma2"], layer_ids=(0,)).head
    assert isinstance(head, Head) and head.to(torch.bfloat16).softcap == 30.0


@pytest.mark.parametrize("packing", ["packed", "per_document"])
def test_features_come_in_the_drafters_type(tmp_path: Path, packing: str) -> None:
    """Delivered and kept in the type that the drafter would cast them to, to the same bits."""
    wide = tiny.target("llama", tmp_path / "m", layer_ids=(1, 3), packing=packing)
    narrow = tiny.target("llama", tmp_path / "m", layer_ids=(1, 3), packing=packing, feature_dtype=torch.bfloat16)
    tokens, cache = tiny.row((30, 20), 64), FeatureCache(1 << 20)
    expected = wide.features(tokens).context_feature
    assert (expected.dtype, narrow.packed) == (torch.float32, packing == "packed")
    for _ in range(2):
        found = narrow.features(tokens, cache).context_feature
        assert found.dtype == torch.bfloat16 and torch.equal(found, expected.bfloat16())
    if packing == "per_document":
        kept = cache.get(0)
        assert kept is not None and kept.dtype == torch.bfloat16
    ids = tokens.input_ids[:30]
    assert torch.equal(narrow.document_features(ids), wide.document_features(ids).bfloat16())

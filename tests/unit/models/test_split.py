"""A target in several parts: the same bits, rows that follow one another through the parts, all arguments in place."""

from __future__ import annotations

import inspect
import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from accelerate import dispatch_model
from accelerate.utils.modeling import check_device_map
from torch import Tensor, nn
from transformers.integrations.accelerate import expand_device_map

from paceline.config import Kernels
from paceline.errors import ConfigError
from paceline.kernels.flash4 import DocumentStarts
from paceline.models import gated_delta
from paceline.models.loading import _without_hooks, load_causal_lm, load_configs, quiet_transformers
from paceline.models.split import (
    Parts,
    bring_along,
    device_map,
    lanes,
    part_devices,
    part_starts,
    place,
    starts_of,
)
from paceline.models.target import Target
from paceline.records import FeatureBatch
from tests import tiny
from tests.unit.models.test_adapter import adapter_of
from tests.unit.models.test_gated_delta import install

CPU = torch.device("cpu")
WAIT_S = 20.0
"""For another thread; only a test that fails waits so long."""


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Any:
    """One compute thread, so that equal bits may be asked for."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model folder of every family; never changed. Gemma 2 runs eager, as its soft cap needs."""
    root = tmp_path_factory.mktemp("targets")
    for family in tiny.FAMILIES:
        tiny.save(tiny.causal_lm(family, attention="eager" if family == "gemma2" else None), root / family)
    return {family: root / family for family in tiny.FAMILIES}


# ------------------------------------------------------------------ which layers go where


def largest(sizes: list[int], starts: tuple[int, ...], first: int, last: int) -> int:
    edges = [*starts, len(sizes)]
    parts = [sum(sizes[a:b]) for a, b in itertools.pairwise(edges)]
    parts[0] += first
    parts[-1] += last
    return max(parts)


def test_the_largest_part_is_as_small_as_it_can_be() -> None:
    """Against every way to cut: layers of random sizes, with an embedding and a norm besides."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        count = int(torch.randint(1, 8, (), generator=generator))
        sizes = torch.randint(1, 30, (count,), generator=generator).tolist()
        first, last = torch.randint(0, 60, (2,), generator=generator).tolist()
        for parts in range(1, count + 1):
            starts = part_starts(sizes, parts, first, last)
            assert len(starts) == parts and starts[0] == 0 and list(starts) == sorted(set(starts))
            ways = itertools.combinations(range(1, count), parts - 1)
            best = min(largest(sizes, (0, *cuts), first, last) for cuts in ways)
            assert largest(sizes, starts, first, last) == best


def test_more_parts_than_layers_are_refused() -> None:
    """By key, with both numbers."""
    with pytest.raises(ConfigError, match="topology.gpus_per_target=4: 3 layers"):
        part_starts([1, 1, 1], 4)


def test_parts_take_the_gpus_from_the_first_one_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """And say which they would need where there are fewer; on the CPU all are the CPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert part_devices("cuda", 2) == (torch.device("cuda:0"), torch.device("cuda:1"))
    assert part_devices("cuda:2", 2) == (torch.device("cuda:2"), torch.device("cuda:3"))
    assert part_devices("cpu", 3) == (CPU, CPU, CPU)
    with pytest.raises(ConfigError, match="gpus_per_target=3: the target would take cuda:2 to cuda:4, and 4 GPUs"):
        part_devices("cuda:2", 3)
    assert [lanes(parts) for parts in (0, 1, 2, 4)] == [2, 2, 3, 5]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_weight_has_a_place(family: str) -> None:
    """Layers by their part, the final norm with the last, everything else first; from a model without weights too."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(tiny.target_config(family))
    devices = [torch.device("cuda", i) for i in range(3)]
    trunk = model.get_decoder()
    starts = starts_of(model, len(trunk.layers), 3, keeps_norm=True)
    places = device_map(model, starts, devices)
    check_device_map(model, places)
    expanded = expand_device_map(places, [*dict(model.named_parameters())])
    for name in [*dict(model.named_parameters()), *dict(model.named_buffers())]:
        found = {place for key, place in places.items() if name == key or name.startswith(f"{key}.")}
        assert len(found) == 1 and expanded.get(name) in (None, *found), name
        if ".layers." in name:
            layer = int(name.split(".layers.")[1].split(".")[0])
            assert found == {devices[sum(start <= layer for start in starts) - 1]}
        else:
            assert found == {devices[2 if name.endswith("model.norm.weight") else 0]}


# ------------------------------------------------------------------ the same bits

ROUTES: dict[str, dict[str, Any]] = {
    "one_by_one": {"packing": "per_document"},
    "masked": {"packing": "packed"},
    "flex": {"packing": "packed", "kernels": Kernels(attention="flex", compile=False)},
}


def features(target: Target, **row: Any) -> FeatureBatch:
    return target.features(tiny.row([5, 17, 3, 30], 64, **row))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_parts_change_no_bit(folders: dict[str, Path], family: str, route: str) -> None:
    """Taps, note, fingerprint and names of the weights are those of a target in one piece."""
    whole = tiny.target(family, folders[family], **ROUTES[route])
    split = tiny.target(family, folders[family], num_parts=3, **ROUTES[route])
    assert split.route == whole.route and split.packing_note == whole.packing_note
    if family != "qwen3_5":  # its gated-delta layers know no documents on the CPU
        assert whole.route == route
    for seed in (0, 1):
        assert torch.equal(features(split, seed=seed).context_feature, features(whole, seed=seed).context_feature)
    ids = torch.arange(1, 20)
    assert torch.equal(split.document_features(ids), whole.document_features(ids))
    assert split.fingerprint() == whole.fingerprint() and split.head_fingerprint() == whole.head_fingerprint()
    assert split.device == whole.device and split.dtype == whole.dtype
    assert torch.equal(split.embed.weight, whole.embed.weight) and torch.equal(split.head.weight, whole.head.weight)


OTHERS: dict[str, dict[str, Any]] = {
    "GptOssConfig": {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 6},
    "MistralConfig": {"sliding_window": 6},
    "Qwen2Config": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
    "Qwen3MoeConfig": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "Cohere2Config": {"sliding_window": 6},
}  # fmt: skip


def other(name: str) -> Any:
    small = {"vocab_size": 272, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
             "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None, "bos_token_id": None,
             "eos_token_id": 257}  # fmt: skip
    with quiet_transformers():
        torch.manual_seed(0)
        config = getattr(transformers, name)(**small, **OTHERS[name])
        return tiny.randomise(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager"))


@pytest.mark.parametrize("packing", ["packed", "per_document"])
@pytest.mark.parametrize("name", OTHERS)
def test_parts_change_no_bit_of_other_families(name: str, packing: str, tmp_path: Path) -> None:
    """Experts, sinks, windows; as the library's own hidden states too."""
    model = other(name)
    tiny.save(model, tmp_path / "model")
    whole, split = (
        Target.load(str(tmp_path / "model"), layer_ids=(0, 1, 2), packing=packing, num_parts=n) for n in (1, 3)
    )
    assert split.packing_note == whole.packing_note
    assert torch.equal(features(split).context_feature, features(whole).context_feature)
    ids = torch.arange(1, 20)
    with torch.no_grad():
        states = model.get_decoder()(input_ids=ids[None], output_hidden_states=True, use_cache=False).hidden_states
    wanted = torch.cat([each[0] for each in states[1:4]], -1)
    torch.testing.assert_close(split.document_features(ids), wanted, rtol=0, atol=1e-4)


def test_documents_edges_reach_the_kernels_of_every_part(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hybrid target's packed row, with a stand-in for the kernels: the bits of one piece, edges with every call."""
    monkeypatch.setattr(gated_delta, "_kernels", None)
    fake = install(monkeypatch, tiny.causal_lm("qwen3_5").get_decoder())
    whole, split = (tiny.target("qwen3_5", folders["qwen3_5"], packing="packed", num_parts=n) for n in (1, 3))
    assert whole.route == split.route == "masked"
    del fake.seen[:]
    assert torch.equal(features(split).context_feature, features(whole).context_feature)
    assert len(fake.seen) > 8 and all(each["cu_seqlens"] is not None for each in fake.seen)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5"])
def test_the_last_hidden_state_comes_from_the_last_part(folders: dict[str, Path], family: str) -> None:
    """After the final norm, which is there with the last layers."""
    whole = tiny.target(family, folders[family], needs_last_hidden=True)
    split = tiny.target(family, folders[family], needs_last_hidden=True, num_parts=4)
    one, other = features(split), features(whole)
    assert one.last_hidden is not None and other.last_hidden is not None
    assert torch.equal(one.last_hidden, other.last_hidden)
    assert torch.equal(one.context_feature, other.context_feature)


def test_a_target_multiplies_in_fp8_part_by_part(folders: dict[str, Path]) -> None:
    """The same products, of the same weights."""
    whole, split = (tiny.target("llama", folders["llama"], fp8=True, num_parts=n) for n in (1, 2))
    assert "multiply in fp8" in (split.quantization_note or "")
    assert torch.equal(features(split).context_feature, features(whole).context_feature)


# ------------------------------------------------------------------ on devices that differ


class Recorder(nn.Module):
    """A layer that says where its arguments are; the meta device stands in for another GPU."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.seen = seen

    def forward(self, hidden: Tensor, mask: Any, position_embeddings: Any, **kwargs: Any) -> Tensor:
        self.seen.append((hidden, mask, position_embeddings, kwargs))
        return hidden + self.weight + position_embeddings[0]


def test_what_a_layer_takes_is_where_the_layer_is() -> None:
    """Hidden states, masks, rotary tables in a tuple and what else is given move, tables and masks once a part and row;
    what exists on every device is taken from there, and plain values stay as they are."""
    seen: list[Any] = []
    layers = nn.ModuleList(Recorder(seen) for _ in range(4))
    meta = torch.device("meta")
    for layer in layers[2:]:
        layer.to(meta)
    parts = Parts(layers, None, (0, 2), (CPU, meta))
    mask, tables, edges = torch.zeros(2), (torch.ones(3), torch.ones(3)), torch.zeros(2)
    here, there = object(), object()  # block masks, as far as hooks can tell

    def run() -> Tensor:
        hidden = torch.zeros(3)
        with parts.own_streams(), parts.row([{"block": {"full": here}}, {"block": {"full": there}}]):
            for layer in layers:
                hidden = layer(hidden, mask, tables, block=here, edges=edges, handle=7, cache=None)
        return hidden

    assert run().device == meta
    for i, (hidden, got_mask, got_tables, kwargs) in enumerate(seen):
        device = CPU if i < 2 else meta
        assert {hidden.device, got_mask.device, *(each.device for each in got_tables)} == {device}
        assert kwargs["edges"].device == device and kwargs["handle"] == 7 and kwargs["cache"] is None
        assert kwargs["block"] is (here if i < 2 else there)
    assert seen[0][1] is mask and seen[2][1] is seen[3][1] and seen[2][2][0] is seen[3][2][0]
    run()
    assert seen[6][1] is not seen[2][1]  # of another row


@pytest.mark.parametrize("family", [*tiny.FAMILIES, *OTHERS])
def test_no_layer_meets_a_tensor_of_another_device(family: str) -> None:
    """The library's forward with its second half elsewhere: torch mixes no devices, so nothing stayed behind."""
    model = other(family).bfloat16() if family in OTHERS else tiny.causal_lm(family, attention="eager")
    trunk, meta = model.get_decoder().requires_grad_(False), torch.device("meta")
    count = len(trunk.layers)
    for layer in trunk.layers[count // 2 :]:
        layer.to(meta)
    trunk.norm.to(meta)
    parts = Parts(trunk.layers, trunk.norm, (0, count // 2), (CPU, meta))
    ids = torch.arange(1, 9)[None]
    with parts.own_streams(), parts.row([{}, {}]), torch.no_grad():
        out = trunk(input_ids=ids, position_ids=torch.arange(8)[None], use_cache=False).last_hidden_state
    assert out.device == meta and out.shape == (1, 8, 32)


class Elsewhere(nn.Module):
    """A layer or head that puts out what lies on the CPU, as if it had come from there."""

    def __init__(self, seen: list[torch.device]) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.seen += [each.device for each in (hidden, *args[0], kwargs["mask"])] if args else [hidden.device]
        return torch.zeros(3)


def test_one_row_at_a_time_is_brought_to_each_layer_and_back_to_the_head() -> None:
    """Without parts that take turns: layers, final norm and head get what they take on their own devices."""
    seen: list[torch.device] = []
    meta = torch.device("meta")
    trunk = SimpleNamespace(layers=[Elsewhere(seen) for _ in range(3)], norm=Elsewhere(seen))
    head = Elsewhere(seen)
    model = SimpleNamespace(get_decoder=lambda: trunk, get_output_embeddings=lambda: head)
    bring_along(model, (0, 2), (meta, CPU))
    for layer in trunk.layers:
        layer(torch.zeros(3), (torch.zeros(1), torch.zeros(1)), mask=torch.zeros(2), cache=None)
    trunk.norm(torch.zeros(3))
    head(torch.zeros(3))
    assert seen == [meta] * 8 + [CPU] * 4 + [CPU, meta]


@pytest.mark.parametrize("family", [*tiny.FAMILIES, *OTHERS])
def test_decoding_mixes_no_devices_either(family: str) -> None:
    """The library's forward with a cache, a prompt and then more tokens, its second half elsewhere; for the head the
    states come back, which the meta device refuses as the only one."""
    model = other(family).bfloat16() if family in OTHERS else tiny.causal_lm(family, attention="eager")
    trunk, meta = model.requires_grad_(False).get_decoder(), torch.device("meta")
    starts = (0, len(trunk.layers) // 2)
    place(model, starts, (CPU, meta))
    bring_along(model, starts, (CPU, meta))
    cache = transformers.DynamicCache(config=trunk.config)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    for ids in (torch.arange(1, 9), torch.arange(9, 12), torch.arange(12, 13)):
        out = trunk(input_ids=ids[None], use_cache=True, **{name: cache}).last_hidden_state
        assert out.device == meta and out.shape == (1, len(ids), 32)
    with pytest.raises(NotImplementedError, match="meta tensor"):
        model(input_ids=torch.arange(1, 9)[None])


def test_kernels_find_their_documents_on_their_own_device() -> None:
    """FlashAttention-4 asks by the queries' device; each thread has its own."""
    starts = DocumentStarts()
    here, there = torch.tensor([0, 3]), torch.zeros(2, device="meta")
    starts.cu_seqlens = here
    starts.cu_seqlens = there
    assert starts.on(CPU) is here and starts.on(torch.device("meta")) is there
    assert starts.on(torch.device("cuda", 0)) is None


# ------------------------------------------------------------------ many rows at a time


def hold(target: Target, layer: int, at: Callable[[int], None]) -> None:
    """Call `at` with the first token of the row whenever a row comes to a layer."""
    here = threading.local()

    def first_token(_module: nn.Module, args: tuple[Any, ...]) -> None:
        here.token = int(args[0][0, 0])

    target.embed.register_forward_pre_hook(first_token)
    target._trunk.layers[layer].register_forward_pre_hook(lambda *_: at(here.token))


def test_a_part_takes_the_next_row_while_the_next_part_is_at_the_one_before(folders: dict[str, Path]) -> None:
    """With three parts three rows are under way at a time: none of them may go on before each is in a part of its own.
    What comes out is what comes out of one after the other."""
    whole = tiny.target("qwen3", folders["qwen3"])
    split = tiny.target("qwen3", folders["qwen3"], num_parts=3, layer_ids=(1, 3))
    whole = tiny.target("qwen3", folders["qwen3"], layer_ids=(1, 3))
    rows = [tiny.row([20], seed=seed) for seed in range(3)]
    wanted = [whole.features(each).context_feature for each in rows]
    number_of = {int(each.input_ids[0]): i for i, each in enumerate(rows)}
    assert len(number_of) == 3 and split._parts is not None
    starts = split._parts.starts
    all_there = threading.Barrier(3)  # broken, and with it the test, if the parts are not busy at the same time
    started = [threading.Event() for _ in range(3)]

    def at_part(part: int) -> Callable[[int], None]:
        def at(token: int) -> None:
            if part == 0:
                started[number_of[token]].set()
            if part == 2 - number_of[token]:  # the first row in the last part, the last one in the first
                all_there.wait(WAIT_S)

        return at

    for part, layer in enumerate(starts):
        hold(split, layer, at_part(part))
    got: dict[int, Tensor] = {}

    def make(i: int) -> None:
        torch.set_num_threads(1)
        got[i] = split.features(rows[i]).context_feature

    threads = [threading.Thread(target=make, args=(i,)) for i in range(3)]
    for i, thread in enumerate(threads):
        thread.start()
        assert started[i].wait(WAIT_S)
    for thread in threads:
        thread.join(WAIT_S)
    assert not all_there.broken and all(torch.equal(got[i], wanted[i]) for i in range(3))


def test_a_row_that_fails_leaves_the_parts_free(folders: dict[str, Path]) -> None:
    """Wherever it fails, the next one runs."""
    split = tiny.target("llama", folders["llama"], num_parts=3, layer_ids=(1, 3))
    wanted = features(split).context_feature
    for layer in split._trunk.layers:

        def fail(*_: Any) -> None:
            raise RuntimeError("broken")

        handle = layer.register_forward_hook(fail, prepend=True)
        with pytest.raises(RuntimeError, match="broken"):
            features(split)
        handle.remove()
        assert torch.equal(features(split).context_feature, wanted)


# ------------------------------------------------------------------ loading


def test_what_accelerate_hangs_on_modules_is_taken_off(folders: dict[str, Path]) -> None:
    """Loaded through its dispatch, layers run the class's own forward."""
    model = tiny.causal_lm("llama")
    ids = torch.arange(1, 9)[None]
    wanted = model(ids).logits
    dispatch_model(model, device_map(model, (0, 2), (CPU, CPU)), main_device="cpu", force_hooks=True)
    assert "forward" in vars(model.get_decoder().layers[0]) and hasattr(model.get_decoder().layers[0], "_hf_hook")
    _without_hooks((model, {}))
    assert not any("forward" in vars(module) or hasattr(module, "_hf_hook") for module in model.modules())
    assert torch.equal(model(ids).logits, wanted)


def test_an_adapter_is_merged_before_the_parts_go_apart(folders: dict[str, Path], tmp_path: Path) -> None:
    """The bits of a merged target in one piece."""
    adapter, _ = adapter_of(str(folders["llama"]), tmp_path / "adapter")
    whole, split = (tiny.target("llama", folders["llama"], adapter=adapter, num_parts=n) for n in (1, 2))
    assert split.fingerprint() == whole.fingerprint() != tiny.target("llama", folders["llama"]).fingerprint()
    assert torch.equal(features(split).context_feature, features(whole).context_feature)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_model_in_parts_has_all_its_weights(
    folders: dict[str, Path], is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By way of accelerate's device map, and without it; where the parts begin goes with the model."""
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "accelerate" else find(name))
    if is_there:
        monkeypatch.undo()
    path = str(folders["qwen3"])
    config, _ = load_configs(path, None, False)
    config.num_hidden_layers = 4
    model = load_causal_lm(path, config, torch.float32, "cpu", num_layers=4, devices=(CPU, CPU), keeps_norm=False)
    assert model.part_starts == starts_of(model, 4, 2, False)
    wanted = tiny.causal_lm("qwen3").state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, wanted[name]), name

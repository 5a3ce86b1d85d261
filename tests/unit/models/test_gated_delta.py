"""Gated-delta layers: documents of a packed row kept apart, with kernels that take edges (a stand-in) and without."""

from __future__ import annotations

import importlib
import sys
import threading
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from paceline.models import gated_delta
from paceline.models.gated_delta import enable, forward_kwargs, is_hybrid, missing_note, split_mixers, takes_edges
from paceline.models.loading import quiet_transformers
from tests import tiny

LENGTHS = (37, 3, 24)  # 3: shorter than the convolution
EDGES = (0, 37, 40, 64)
ROUNDING = 1e-4
"""Of eight layers of random weights: a processor gives up to 6e-6, a wrong edge more than 1."""
FUNCTIONS = ("causal_conv1d_fn", "torch_chunk_gated_delta_rule", *gated_delta._ONE_TOKEN)


def hybrid(family: str) -> Any:
    """The trunk of a tiny hybrid whose layers decay slowly enough to leak."""
    if family == "qwen3_5":
        return tiny.causal_lm(family).get_decoder()
    config = tiny.target_config("qwen3_5").to_dict()
    kept = ("linear_", "num_", "head_dim", "hidden_size", "intermediate_size", "vocab_size", "max_position")
    own = {key: value for key, value in config.items() if key.startswith(kept)}
    own |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    own |= {"shared_expert_intermediate_size": 16, "pad_token_id": None}
    rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
    if family == "qwen3_next":
        made: Any = transformers.Qwen3NextConfig(**own, rope_parameters=rope)
    else:
        made = transformers.Qwen3_5MoeTextConfig(**own, rope_parameters=rope | {"mrope_section": [1, 1, 0]})
    with quiet_transformers():
        torch.manual_seed(0)
        return tiny.randomise(transformers.AutoModelForCausalLM.from_config(made)).get_decoder()


HYBRIDS = ("qwen3_5", "qwen3_5_moe", "qwen3_next")


def mask_of(edges: tuple[int, ...]) -> dict[str, Tensor | None]:
    """Masks in the form that hybrids take, with which full attention keeps documents apart."""
    document = torch.bucketize(torch.arange(edges[-1]), torch.tensor(edges[1:]), right=True)
    visible = (document[:, None] == document[None, :]).tril()
    additive = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)[None, None]
    return {"full_attention": additive, "linear_attention": None}


@torch.no_grad()
def run(trunk: Any, ids: Tensor, edges: tuple[int, ...] | None = None, **kwargs: Any) -> Tensor:
    """Last hidden states ``[S, D]`` of a packed row, or of one document."""
    if edges is not None:
        kwargs["attention_mask"] = mask_of(edges)
        kwargs["position_ids"] = torch.cat([torch.arange(b - a) for a, b in pairwise(edges)])[None]
    return trunk(input_ids=ids[None], use_cache=False, **kwargs).last_hidden_state[0]


def ids_of(length: int = EDGES[-1]) -> Tensor:
    """Random tokens."""
    return torch.randint(0, tiny.VOCAB, (length,), generator=torch.Generator().manual_seed(1))


def worst(packed: Tensor, trunk: Any, edges: tuple[int, ...] = EDGES) -> float:
    """Largest relative error of a document, or of its first four tokens, against the document alone."""
    errors = []
    for a, b in pairwise(edges):
        alone = run(trunk, ids_of()[a:b])
        for part in (slice(None), slice(4)):
            errors.append(float((packed[a:b][part] - alone[part]).norm() / alone[part].norm()))
    return max(errors)


class Fake:
    """Kernels that take edges, by the library's own torch code on each document; they keep what they were given."""

    def __init__(self, module: Any) -> None:
        self._rule = gated_delta._torch_function(module.torch_chunk_gated_delta_rule)
        self.seen: list[dict[str, Any]] = []

    def conv(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, **edges: Any) -> Any:
        """``[B, S, C]`` by ``[C, taps]``, and no final state."""
        assert activation == "silu"

        def alone(piece: Tensor) -> Tensor:
            padded = F.pad(piece.transpose(1, 2), (weight.shape[1] - 1, 0))
            return F.silu(F.conv1d(padded, weight[:, None], bias, groups=weight.shape[0])).transpose(1, 2)

        return torch.cat([alone(x[:, a:b]) for a, b in self._spans(x, **edges)], 1), None

    def rule(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, use_qk_l2norm_in_kernel: bool, **edges: Any) -> Any:  # fmt: skip # noqa: E501
        """The gated delta rule from an empty state, and no final state."""
        assert use_qk_l2norm_in_kernel
        pieces = [
            self._rule(*(t[:, a:b] for t in (q, k, v, g, beta)), use_qk_l2norm_in_kernel=True)[0]
            for a, b in self._spans(q, **edges)
        ]
        return torch.cat(pieces, 1), None

    def _spans(self, x: Tensor, cu_seqlens: Tensor | None, chunk_indices: Tensor | None = None) -> Any:
        self.seen.append({"cu_seqlens": cu_seqlens, "chunk_indices": chunk_indices})
        if cu_seqlens is None:
            assert chunk_indices is None
            return [(0, x.shape[1])]
        assert x.shape[0] == 1 and cu_seqlens.dtype == torch.int32 and cu_seqlens[-1] == x.shape[1]
        return list(pairwise(cu_seqlens.tolist()))


def fla_of(fake: Any, version: str = "0.6.0") -> dict[str, ModuleType]:
    """Modules by the names under which fla-core is imported."""
    names = ("fla", "fla.modules", "fla.modules.causal_conv1d", "fla.ops", "fla.ops.gated_delta_rule")
    modules = {name: ModuleType(name) for name in names}
    modules["fla"].__version__ = version  # type: ignore[attr-defined]
    modules["fla.modules.causal_conv1d"].causal_conv1d = fake.conv  # type: ignore[attr-defined]
    modules["fla.ops.gated_delta_rule"].chunk_gated_delta_rule = fake.rule  # type: ignore[attr-defined]
    modules["fla.ops.gated_delta_rule"].fused_recurrent_gated_delta_rule = fake.rule  # type: ignore[attr-defined]
    return modules


def modelling_file(trunk: Any) -> Any:
    """The module of the trunk's mixers."""
    return sys.modules[type(trunk.layers[0].linear_attn).__module__]


@pytest.fixture(autouse=True)
def no_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without fla, whatever is installed here, but for tests on a GPU."""
    if request.node.get_closest_marker("gpu"):
        return
    monkeypatch.setattr(gated_delta, "_kernels", None)
    for name in [name for name in sys.modules if name == "fla" or name.startswith("fla.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fla", None)


def install(monkeypatch: pytest.MonkeyPatch, trunk: Any, version: str = "0.6.0") -> Fake:
    """Put the stand-in for fla in place, on the CPU as if it were a GPU; undone after the test."""
    file = modelling_file(trunk)
    for name in FUNCTIONS:
        monkeypatch.setattr(file, name, getattr(file, name))  # so that it is put back
    fake = Fake(file)
    for name, module in fla_of(fake, version).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(gated_delta, "KERNEL_DEVICE", "cpu")
    return fake


def test_only_trunks_with_gated_delta_layers_are_hybrid() -> None:
    """A dense trunk is not, and there is nothing to enable in it."""
    dense = tiny.causal_lm("llama").get_decoder()
    assert is_hybrid(hybrid("qwen3_5")) and not is_hybrid(dense) and not is_hybrid(nn.Linear(2, 2))
    assert enable(dense) == "" and not takes_edges(dense)


# ------------------------------------------------------------------ without kernels


@pytest.mark.parametrize("family", HYBRIDS)
def test_split_mixers_keep_documents_apart(family: str) -> None:
    """A packed row leaks through gated-delta layers; with mixers split, each document equals itself alone."""
    trunk = hybrid(family)
    assert worst(run(trunk, ids_of(), EDGES), trunk) > 0.1
    split = split_mixers(trunk)
    with split.documents(EDGES):
        packed = run(trunk, ids_of(), EDGES)
    assert split.edges is None
    assert worst(packed, trunk) < ROUNDING


def test_each_thread_has_its_own_edges() -> None:
    """Edges set in one thread are not those of another, nor do they stay after an error."""
    split = split_mixers(hybrid("qwen3_5"))
    seen = []
    with pytest.raises(ValueError), split.documents([0, 3, 5]):
        thread = threading.Thread(target=lambda: seen.append(split.edges))
        thread.start()
        thread.join()
        assert split.edges == (0, 3, 5)
        raise ValueError
    assert seen == [None] and split.edges is None


def test_without_fla_a_note_says_what_to_install() -> None:
    """The note names the package; on the CPU, where it would change nothing, `enable` does not."""
    trunk = hybrid("qwen3_5")
    before = modelling_file(trunk).causal_conv1d_fn
    assert "pip install fla-core" in (missing_note() or "")
    assert enable(trunk) == "gated-delta layers run in torch" and not takes_edges(trunk)
    assert modelling_file(trunk).causal_conv1d_fn is before


def test_on_a_gpu_without_fla_enable_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """There it is the missing package's note."""
    monkeypatch.setattr(gated_delta, "KERNEL_DEVICE", "cpu")
    assert enable(hybrid("qwen3_5")) == missing_note()


def test_a_broken_fla_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """An import that fails with anything is logged, not raised."""

    class Broken(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("0 active drivers")

    for name in ("fla", "fla.modules", "fla.modules.causal_conv1d"):
        monkeypatch.setitem(sys.modules, name, Broken(name))
    assert missing_note() is not None and "0 active drivers" in caplog.text


# ------------------------------------------------------------------ with kernels


@pytest.mark.parametrize("family", HYBRIDS)
def test_kernels_that_take_edges_keep_documents_apart(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the edges handed to convolution and rule, each document equals itself alone."""
    trunk = hybrid(family)
    wanted = [run(trunk, ids_of()[a:b]) for a, b in pairwise(EDGES)]
    fake = install(monkeypatch, trunk)
    assert enable(trunk) == "gated-delta layers keep documents apart by the kernels of fla-core 0.6.0"
    assert enable(trunk) and takes_edges(trunk) and missing_note() is None
    kwargs = forward_kwargs(torch.tensor(EDGES))
    packed = run(trunk, ids_of(), EDGES, **kwargs)
    mixers = sum(kind == "linear_attention" for kind in trunk.config.layer_types)
    assert len(fake.seen) == 2 * mixers
    assert all(seen["cu_seqlens"] is kwargs["cu_seq_lens_q"] for seen in fake.seen)  # fla caches by identity
    assert all(seen["chunk_indices"] is kwargs["chunk_indices"] for seen in fake.seen)
    for (a, b), alone in zip(pairwise(EDGES), wanted, strict=True):
        assert float((packed[a:b] - alone).norm() / alone.norm()) < ROUNDING
        assert float((packed[a:b][:4] - alone[:4]).norm() / alone[:4].norm()) < ROUNDING


def test_without_edges_the_kernels_see_one_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward without edges equals the library's, and a cache is filled by the library's own functions."""
    trunk = hybrid("qwen3_5")
    ids = ids_of(20)
    wanted = run(trunk, ids)
    fake = install(monkeypatch, trunk)
    enable(trunk)
    torch.testing.assert_close(run(trunk, ids), wanted, rtol=1e-4, atol=1e-4)
    assert fake.seen and all(seen["cu_seqlens"] is None for seen in fake.seen)
    with torch.no_grad():
        cache = transformers.DynamicCache(config=trunk.config)
        pieces = [
            trunk(input_ids=piece[None], past_key_values=cache, use_cache=True).last_hidden_state[0]
            for piece in ids.split([9, 1, 10])
        ]
    torch.testing.assert_close(torch.cat(pieces), wanted, rtol=1e-4, atol=1e-4)


def test_what_the_forward_needs() -> None:
    """Edges as int32; chunks only for kernels known to take them, and only where the host knows the edges."""
    assert list(forward_kwargs(torch.tensor(EDGES))) == ["cu_seq_lens_q"]
    assert forward_kwargs(torch.tensor(EDGES))["cu_seq_lens_q"].dtype == torch.int32


@pytest.mark.parametrize(("version", "names"), [("0.6.0", 2), ("0.10.1.dev0", 2), ("1.0", 2), ("0.5.9", 1), ("?", 1)])
def test_chunks_are_for_kernels_known_to_take_them(version: str, names: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before fla 0.6 the convolution counted in chunks of its own."""
    trunk = hybrid("qwen3_5")
    install(monkeypatch, trunk, version)
    enable(trunk)
    edges = torch.tensor(EDGES)
    kwargs = forward_kwargs(edges)
    assert len(kwargs) == names and kwargs["cu_seq_lens_q"] is not edges
    assert worst(run(trunk, ids_of(), EDGES, **kwargs), trunk) < ROUNDING


def test_chunks_are_counted_document_by_document() -> None:
    """Every document starts a chunk of 64 of its own; a document of no tokens has none."""
    edges = [0, 130, 130, 131, 195, 259]
    wanted = [
        (document, chunk)
        for document, (a, b) in enumerate(pairwise(edges))
        for chunk in range(-(-(b - a) // gated_delta.CHUNK))
    ]
    found = gated_delta._chunk_indices(torch.tensor(edges))
    assert found.dtype == torch.int32 and [tuple(row) for row in found.tolist()] == wanted


def test_a_layer_compiles_whole_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels break no graph, and a row with other documents compiles nothing anew."""
    trunk = hybrid("qwen3_5")
    install(monkeypatch, trunk)
    enable(trunk)
    layer = trunk.layers[0]
    states = torch.randn(1, EDGES[-1], 32)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=False)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for edges in (EDGES, (0, 10, 20, 30, 64), (0, 1, 64)):
            kwargs: dict[str, Any] = {"position_embeddings": None, **forward_kwargs(torch.tensor(edges))}
            torch.testing.assert_close(compiled(states, **kwargs), layer(states, **kwargs))
    torch._dynamo.reset()


# ------------------------------------------------------------------ fla installed, device cpu


class NeedsGpu:
    """What fla's kernels do on the CPU where Triton is installed."""

    def conv(self, *args: Any, **kwargs: Any) -> Any:
        """Die."""
        raise RuntimeError("0 active drivers ([]). There should only be one.")

    def rule(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Any = None) -> Any:
        """Die."""
        raise RuntimeError("0 active drivers ([]). There should only be one.")


def test_with_fla_installed_the_cpu_still_runs_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library picked fla's rule when it was imported; after `enable` a forward on the CPU is what it was."""
    config = tiny.target_config("qwen3_5")
    wanted = run(hybrid("qwen3_5"), ids_of(30))
    for name, module in fla_of(NeedsGpu()).items():
        monkeypatch.setitem(sys.modules, name, module)
    name = "transformers.models.qwen3_5.modeling_qwen3_5"
    package = importlib.import_module("transformers.models.qwen3_5")
    monkeypatch.setattr(package, "modeling_qwen3_5", sys.modules[name], raising=False)  # both are put back
    monkeypatch.delitem(sys.modules, name)
    file = importlib.import_module(name)  # once more, now with fla
    with quiet_transformers():
        torch.manual_seed(0)
        model = tiny.randomise(file.Qwen3_5ForCausalLM(config))
    with pytest.raises(RuntimeError, match="0 active drivers"):
        run(model.get_decoder(), ids_of(30))
    assert enable(model.get_decoder()) == "gated-delta layers run in torch on the CPU"
    assert not takes_edges(model.get_decoder())
    assert torch.equal(run(model.get_decoder(), ids_of(30)), wanted)
    with torch.no_grad():
        generated = model.generate(ids_of(5)[None], max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert generated.shape == (1, 9)


# ------------------------------------------------------------------ the real kernels


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 5e-3), (torch.bfloat16, 3e-2)])
def test_fla_computes_what_torch_does(dtype: torch.dtype, limit: float) -> None:
    """On a packed row, convolution and rule of fla-core equal the library's torch code on each document.

    The probe of a target compares fla with itself; this compares it with something else. float32 products of fla are
    TF32 inside.
    """
    pytest.importorskip("fla.ops.gated_delta_rule")
    trunk = hybrid("qwen3_5")
    file = modelling_file(trunk)
    in_torch = gated_delta._torch_function(file.torch_chunk_gated_delta_rule)
    enable(trunk.cuda())
    edges = torch.tensor([0, 300, 303, 700, 1024])
    kwargs = forward_kwargs(edges, "cuda")
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    query, key, value = random(1, 1024, 16, 128), random(1, 1024, 16, 128), random(1, 1024, 16, 128)
    g, beta = -random(1, 1024, 16).float().abs() * 0.05, random(1, 1024, 16).sigmoid()
    found = gated_delta.packed_rule(query, key, value, g, beta, True, kwargs["cu_seq_lens_q"], kwargs["chunk_indices"])
    x, weight = random(1, 1024, 384), random(384, 4)
    mixed = gated_delta.packed_conv(x, weight, None, "silu", kwargs["cu_seq_lens_q"], kwargs["chunk_indices"])
    for a, b in pairwise(edges.tolist()):
        pieces = (t[:, a:b].float() for t in (query, key, value, g, beta))
        wanted, _ = in_torch(*pieces, use_qk_l2norm_in_kernel=True)
        assert float((found[:, a:b].float() - wanted).norm() / wanted.norm()) < limit
        alone = F.pad(x[:, a:b].float().transpose(1, 2), (3, 0))
        alone = F.silu(F.conv1d(alone, weight.float()[:, None], groups=384)).transpose(1, 2)
        assert float((mixed[:, a:b].float() - alone).norm() / alone.norm()) < limit

"""Static checks of a drafter's folder against its target: what an engine would misread, refuse, or take in silence.

The target's configuration and tokenizer are read, its weights are not. Engines differ in what they fill in, skip or
refuse, so every finding says what it would do and where. What names and numbers cannot show is left to the fingerprint
and to `eval.parity`.

What engines do with a key is of vLLM 0.32 and 0.33, `speculators` 0.9.0, z-lab's `dflash` 0.1.0 and Transformers 5
(for DFlash2 and DSpark of vLLM 0.32); SGLang was read, not run. Where each trap comes from is in docs/serving.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.errors import ModelError
from paceline.export import speculators, zlab
from paceline.export.check_tensors import check_tensors
from paceline.export.findings import DraftFolder, Finding, read_folder
from paceline.export.fingerprint import Mismatch
from paceline.export.folder import (
    ANCHOR_KEY,
    ARCHITECTURES,
    CONFIG_FILE,
    FINGERPRINT_FILE,
    LAYER_KEYS,
    num_drafted,
    option_names,
    predicts_from_anchor,
)
from paceline.models.draft import DFlashDrafter
from paceline.models.engine_limits import VLLM_CPU_HEAD_DIMS, VLLM_MARKOV_HEADS, VLLM_V2_KINDS
from paceline.models.loading import TargetShape, load_tokenizer, read_shape

Engine = Literal["zlab", "speculators", "vllm", "sglang"]

READS: dict[Engine, tuple[str, ...]] = {
    "zlab": ("z-lab",),
    "speculators": ("speculators",),
    "vllm": ("z-lab", "speculators"),
    "sglang": ("z-lab",),
}
"""Layouts that an engine reads."""

ZLAB_KINDS = ("dflash", "dflash2")
"""Drafter kinds that z-lab's `dflash` 0.1.0 decodes with."""

LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class TargetFacts:
    """What is known of a target without its weights.

    Attributes:
        token_uses: Tokens that text, the chat template or generation uses, and for what; None: it has no tokenizer.
    """

    path: str
    shape: TargetShape
    token_uses: dict[int, str] | None


def read_target_facts(path: str, trust_remote_code: bool = False) -> TargetFacts:
    """A target's configuration and, where it has one, what its tokenizer uses. Raises: ModelError."""
    shape = read_shape(path, trust_remote_code=trust_remote_code)
    try:
        tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
    except ModelError:
        return TargetFacts(path, shape, None)
    return TargetFacts(path, shape, token_uses(shape, tokenizer))


def check_folder(folder: Path | str, target: TargetFacts, engine: Engine | None = None) -> list[Finding]:
    """All that is wrong or doubtful in a drafter's folder, errors first.

    Args:
        engine: The one that is going to serve it; None: any.
    Raises: ModelError if the folder is no drafter's at all.
    """
    seen = read_folder(Path(folder))
    for check in (
        lambda: _check_layout(seen, engine),
        lambda: _check_numbers(seen, target.shape),
        lambda: _check_block_size(seen),
        lambda: _check_options(seen),
        lambda: _check_anchor(seen),
        lambda: _check_taps(seen, target.shape),
        lambda: _check_layer_types(seen),
        lambda: _check_causality(seen),
        lambda: _check_rope(seen, target.shape),
        lambda: _check_mask_token(seen, target),
        lambda: _check_engine_limits(seen, target.shape, engine),
        lambda: check_tensors(seen, target.shape),
    ):
        _guarded(seen, check)
    if not any(finding.severity == "error" for finding in seen.findings):
        _check_reader(seen)
    if not (seen.path / FINGERPRINT_FILE).exists():
        seen.warn(
            FINGERPRINT_FILE,
            "no such file",
            "one written by `paceline export --target`",
            "a tap off by one, another mask token or theta cannot be told from the trained ones: no engine says a "
            "word and the acceptance falls. --prompts measures it instead",
            "fingerprint",
        )
    return sorted(seen.findings, key=lambda finding: finding.severity)


def mismatch_findings(mismatches: list[Mismatch]) -> list[Finding]:
    """Findings of a comparison with the fingerprint."""
    effect = "every engine serves it as it stands, without an error: the answers stay right, the acceptance falls"
    findings = []
    for m in mismatches:
        seen = m.seen if m.difference is None else f"{m.seen} (difference {m.difference:.1e})"
        wanted = m.wanted if m.tolerance is None else f"{m.wanted}, within {m.tolerance:.0e}"
        findings.append(Finding("error", m.stage, seen, wanted, effect, "fingerprint"))
    return findings


def _guarded(seen: DraftFolder, check: Callable[[], None]) -> None:
    """A value of a wrong kind is a finding, not the end of the check."""
    try:
        check()
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
        seen.error(CONFIG_FILE, f"{type(error).__name__}: {error}", "values of the layout's types", "it cannot be read")


def _check_layout(seen: DraftFolder, engine: Engine | None) -> None:
    if engine == "zlab" and seen.kind not in ZLAB_KINDS:
        seen.error(
            "architectures", seen.config.get("architectures"), f"a drafter of {' or '.join(ZLAB_KINDS)}",
            "z-lab's decoder has no class for it: serve it with vLLM or SGLang",
        )  # fmt: skip
    if engine is not None and seen.layout not in READS[engine]:
        seen.error(
            "layout", seen.layout, " or ".join(READS[engine]), f"{engine} cannot load it: export with another --format"
        )
    names = ARCHITECTURES[seen.layout]
    if seen.config.get("architectures") != [names[seen.kind]]:
        wanted = " or ".join(f'["{name}"]' for name in names.values()) if seen.is_zlab else [names[seen.kind]]
        seen.error("architectures", seen.config.get("architectures"), wanted, "engines choose the model by it")
    if seen.is_zlab:
        top_keys, nested_keys = zlab.known_keys(seen.kind)
        _check_fixed(seen, seen.config, zlab.FIXED_VALUES | zlab.FIXED_ENGINE_VALUES)
        _check_fixed(seen, seen.section, zlab.FIXED_DFLASH_VALUES)
        _check_unknown(seen, "dflash_config", set(seen.section) - nested_keys)
        _check_unknown(seen, "the top level", set(seen.config) - top_keys)
        return
    if "model_type" in seen.config:
        seen.error("model_type", seen.config["model_type"], "no such key at the top", "it hides the layout from vLLM")
    if speculators.kind_of(seen.config) is None:
        kinds, effect = " or ".join(names), "engines choose the model by it"
        seen.error("speculators_model_type", seen.config.get("speculators_model_type"), kinds, effect)
    _check_fixed(seen, seen.section, {"algorithm": seen.kind})
    _check_fixed(seen, seen.layer, speculators.FIXED_LAYER_VALUES)
    _check_unknown(seen, "the top level", set(seen.config) - speculators.known_keys(seen.kind) - {"model_type"})


def _check_options(seen: DraftFolder) -> None:
    """What only this kind has: each at every place where an engine looks."""
    places = [("", seen.config)]
    if seen.is_zlab:
        places = [("dflash_config.", seen.section)]
        if seen.kind == "dspark":
            places.insert(0, ("", seen.config))
            for key in ("mask_token_id", "target_layer_ids"):
                if seen.config.get(key) is None:
                    seen.warn(key, None, seen.section.get(key), "DeepSpec reads it at the top level")
                elif seen.config[key] != seen.section.get(key):
                    seen.error(
                        key, f"{seen.config[key]} at the top, {seen.section.get(key)} in dflash_config", "one value",
                        "readers look in either place",
                    )  # fmt: skip
    for name in option_names(seen.kind):
        values = [section.get(name) for _, section in places]
        if all(value is None for value in values):
            seen.error(places[0][0] + name, None, "the trained value", "engines take their own, leave it out, or fail")
        elif len({str(value) for value in values if value is not None}) > 1:
            seen.error(
                name, f"{values[0]} at the top, {values[1]} in dflash_config", "one value",
                "readers look in either place",
            )  # fmt: skip
        elif values[0] is None:
            seen.error(name, None, values[1], "vLLM and SGLang read it at the top level alone")


def _check_anchor(seen: DraftFolder) -> None:
    """Whether slot 0 predicts: of engines that take it for granted each takes another thing."""
    predicts = predicts_from_anchor(seen.kind)
    places = [("", seen.config), ("dflash_config.", seen.section)] if seen.is_zlab else [("", seen.config)]
    for place, section in places:
        if section.get(ANCHOR_KEY) not in (None, predicts):
            effect = "blocks are served one place off: almost nothing is accepted"
            seen.error(place + ANCHOR_KEY, section[ANCHOR_KEY], predicts, effect)
    if not predicts:
        return
    if seen.config.get(ANCHOR_KEY) is None:
        effect = "engines take slot 0 for either: served one place off, almost nothing is accepted"
        seen.error(ANCHOR_KEY, None, "true, at the top level", effect)
    if seen.is_zlab and seen.section.get(ANCHOR_KEY):
        effect = "vLLM 0.32 does not start: it takes the key for one of DFlash, whose slot 0 does not predict"
        seen.error(f"dflash_config.{ANCHOR_KEY}", True, "at the top level alone", effect)


def _check_fixed(seen: DraftFolder, section: dict[str, Any], fixed: dict[str, Any]) -> None:
    for key, value in fixed.items():
        if section.get(key) not in (None, value):
            seen.error(key, section[key], value, "it means a drafter that computes something else than this one")


def _check_unknown(seen: DraftFolder, where: str, unknown: set[str]) -> None:
    for key in sorted(unknown):
        seen.error(key, f"a key of {where}", "no such key", "it means another kind of drafter, or nothing to anyone")


def _check_numbers(seen: DraftFolder, target: TargetShape) -> None:
    for key in LAYER_KEYS:
        if seen.layer.get(key) is None:
            seen.error(key, None, "a number", "every engine fills in a default of its own")
    pairs = [(seen.layer, "hidden_size", target.hidden_size), (seen.layer, "vocab_size", target.vocab_size)]
    pairs += [
        (seen.config, "num_target_layers", target.num_layers),
        (seen.config, "target_hidden_size", target.hidden_size),
    ]
    for section, key, wanted in pairs:
        if section.get(key) is not None and section[key] != wanted:
            seen.error(key, section[key], f"{wanted}, the target's", "the drafter was trained for another target")
    if seen.is_zlab and seen.config.get("num_target_layers") is None:
        seen.error("num_target_layers", None, target.num_layers, "readers cannot tell which target the taps belong to")
    _check_logits(seen, target)
    if seen.config.get("dtype", seen.config.get("torch_dtype")) is None:
        seen.warn("dtype", None, "the type of the weights", "readers take a type of their own")


def _check_logits(seen: DraftFolder, target: TargetShape) -> None:
    """A factor and a soft cap of the target's logits; z-lab's decoder takes them from the drafter's folder."""
    pairs = (("output_multiplier", target.logit_scale, 1.0), ("final_logit_softcapping", target.softcap, None))
    for key, wanted, neutral in pairs:
        has_place = seen.is_zlab and seen.kind != "dspark"
        written = seen.section.get(key, seen.config.get(key, neutral)) if has_place else neutral
        if wanted == written:
            continue
        if has_place:
            seen.error(
                key, written, f"{wanted}, the target's", "z-lab's decoder drafts from other logits than were trained"
            )
        else:
            place = "no place for it in this layout, or for this kind of drafter"
            seen.error(key, place, f"{wanted}, the target's", "engines draft without it")


def _check_block_size(seen: DraftFolder) -> None:
    top = seen.number(seen.config, "block_size", 2)
    if not seen.is_zlab:
        if top is None:
            seen.error("block_size", seen.config.get("block_size"), "slots of a block", "`speculators` takes 8")
            return
        methods, most = seen.section.get("proposal_methods") or [], num_drafted(seen.kind, top)
        drafted = methods[0].get("speculative_tokens") if methods else None
        key, wanted = "proposal_methods[0].speculative_tokens", f"{most}, which blocks of {top} draft"
        if drafted is None:
            seen.error(key, None, most, "vLLM does not start from the folder without it")
        elif drafted > most:
            seen.error(key, drafted, wanted, "vLLM drafts slots that were never trained")
        elif drafted < most:
            seen.warn(key, drafted, wanted, "vLLM drafts shorter blocks than were trained")
        return
    nested = seen.number(seen.section, "block_size", 2)
    places = {"block_size": top, "dflash_config.block_size": nested}
    missing = [key for key, value in places.items() if value is None]
    if len(missing) == 2:
        seen.error("block_size", None, "slots of a block", "SGLang takes 16, others nothing")
    elif missing:
        found = top if nested is None else nested
        seen.warn(missing[0], None, found, "a reader that looks only here takes its own default: SGLang 16")
    elif top != nested:
        seen.error(
            "block_size", f"{top} at the top, {nested} in dflash_config", "one number", "readers look in either place"
        )


def _check_taps(seen: DraftFolder, target: TargetShape) -> None:
    if seen.is_zlab:
        key, shift = "dflash_config.target_layer_ids", 0
        written = seen.section.get("target_layer_ids")
    else:
        key, shift = "aux_hidden_state_layer_ids", 1
        written = seen.config.get("aux_hidden_state_layer_ids")
    if not isinstance(written, list) or not written or any(type(i) is not int for i in written):
        seen.error(key, written, "the tapped layers", "engines guess taps of their own, or refuse")
        return
    low, high = shift, target.num_layers - 1 + shift
    if outside := [i for i in written if not low <= i <= high]:
        seen.error(
            key, f"{outside} among {written}", f"{low} to {high}: this layout counts from {low}",
            "SGLang and vLLM capture another layer or none",
        )  # fmt: skip
    if written != sorted(set(written)):
        seen.error(key, written, "ascending, each once", "vLLM joins the features in the order of the layers")
    aux = seen.config.get("eagle_aux_hidden_state_layer_ids") if seen.is_zlab else None
    if aux is not None and aux != [i + 1 for i in written]:
        seen.error(
            "eagle_aux_hidden_state_layer_ids", aux, [i + 1 for i in written],
            "vLLM goes by it as it stands, and counts what enters a layer; z-lab and SGLang go by target_layer_ids",
        )  # fmt: skip
    if high in written:
        seen.error(
            key, f"{high} is the last layer", f"{high - 1} or lower",
            "vLLM takes its output before the final norm, Transformers lists it after: another acceptance in each",
        )  # fmt: skip


def _check_layer_types(seen: DraftFolder) -> None:
    num_layers = seen.number(seen.layer, "num_hidden_layers")
    types, window = seen.layer.get("layer_types"), seen.layer.get("sliding_window")
    use = seen.layer.get("use_sliding_window")
    if types is None:
        if use or window is not None:
            seen.error("layer_types", None, "one entry a layer", "some engines then slide every layer and others none")
        else:
            seen.warn("layer_types", None, "one entry a layer", "engines take full attention everywhere")
        return
    if num_layers is not None and len(types) != num_layers:
        seen.error("layer_types", f"{len(types)} entries", f"{num_layers}, as num_hidden_layers", "layers are misread")
    if unknown := sorted(set(types) - set(LAYER_TYPES)):
        seen.error("layer_types", unknown, LAYER_TYPES, "SGLang and vLLM know no others")
    if "sliding_attention" not in types:
        if use:
            seen.error("use_sliding_window", use, "false: no layer slides", "engines that go by it slide every layer")
        return
    if window is None:
        seen.error("sliding_window", None, "a number of tokens", "layers cannot slide without it")
    else:
        seen.number(seen.layer, "sliding_window")
    if use is False:
        seen.error(
            "use_sliding_window", False, "true: layers slide",
            "Transformers drops sliding_window, and llama.cpp slides only where this is true",
        )  # fmt: skip


def _check_causality(seen: DraftFolder) -> None:
    types = seen.layer.get("layer_types") or ["full_attention"]
    slides, has_full = "sliding_attention" in types, "full_attention" in types
    if seen.is_zlab:
        _check_zlab_causality(seen, slides, has_full)
        return
    non_causal, written = seen.config.get("sliding_window_non_causal"), seen.layer.get("is_causal")
    for key, value in (("sliding_window_non_causal", non_causal), ("transformer_layer_config.is_causal", written)):
        if value is not None and type(value) is not bool:
            seen.error(key, value, "true or false", "engines read it otherwise")
            return
    key = "transformer_layer_config.is_causal"
    if not slides:
        if written:
            seen.error(key, written, False, "full-attention layers of this layout are bidirectional inside a block")
        if written is None and non_causal is False and seen.kind != "dspark":
            seen.error(
                key, "missing, with sliding_window_non_causal=false", "false",
                "vLLM takes the flag for every layer and serves the block causal, `speculators` trains full layers "
                "bidirectional: with 0.32 the steps of 17 of 24 answers changed, without an error",
            )  # fmt: skip
        return
    if non_causal is None:
        seen.error(
            "sliding_window_non_causal", None, "true or false",
            "`speculators` takes sliding layers for causal, vLLM for bidirectional ones",
        )  # fmt: skip
    elif has_full and not non_causal:
        seen.error(
            "sliding_window_non_causal", non_causal, "true, or no full layers",
            "it means causal sliding layers beside bidirectional full ones, which vLLM has no word for",
        )  # fmt: skip
    elif written is None and seen.kind == "dspark" and non_causal:
        seen.error(
            key, None, False, "vLLM drops sliding_window_non_causal for DSpark, and serves sliding layers causal"
        )
    elif written is None:
        seen.warn(key, None, not non_causal, "some versions of vLLM drop sliding_window_non_causal")
    elif written == non_causal:
        seen.error(
            key, f"{written}, with sliding_window_non_causal={non_causal}", f"{not non_causal}, or the other flag",
            "vLLM goes by the one, `speculators` by the other",
        )  # fmt: skip


def _check_zlab_causality(seen: DraftFolder, slides: bool, has_full: bool) -> None:
    top, nested = seen.config.get("is_causal"), seen.section.get("causal")
    for key, value in (("is_causal", top), ("dflash_config.causal", nested)):
        if value is not None and type(value) is not bool:
            seen.error(key, value, "true or false", "engines read it otherwise")
            return
    if top is not None and nested is not None and top != nested:
        seen.error(
            "is_causal", f"{top}, with dflash_config.causal={nested}", "one of them", "engines read either place"
        )
    if top is not None:
        return
    wanted = "true or false, unless layers differ" if slides and has_full and nested is None else "true or false"
    seen.warn(
        "is_causal", None, wanted,
        "engines fill it in: causal in sliding layers, bidirectional in full ones; older z-lab code takes neither "
        "for causal",
    )  # fmt: skip


def _check_rope(seen: DraftFolder, target: TargetShape) -> None:
    new, scaling, theta = (seen.layer.get(key) for key in ("rope_parameters", "rope_scaling", "rope_theta"))
    older = _rope(dict(scaling or {}), theta)
    newer = _rope(dict(new or {}), None)
    found = newer if newer.get("rope_theta") is not None else older
    if found.get("rope_theta") is None:
        seen.error("rope_theta", None, target.rope["rope_theta"], "engines take 10000 without a word, which costs most")
        return
    if new and (theta is not None or scaling):
        differ = sorted(key for key in newer.keys() | older.keys() if newer.get(key) != older.get(key))
        if theta is None:
            differ = [key for key in differ if key != "rope_theta"]
        for key in differ:
            seen.error(
                f"rope_parameters.{key}", f"{newer.get(key)}, in rope_theta and rope_scaling {older.get(key)}",
                "the same in both", "Transformers 5 reads the first, engines on version 4 the other",
            )  # fmt: skip
    elif seen.is_zlab:
        missing = "rope_theta" if new else "rope_parameters"
        seen.warn(missing, None, "both schemas", "Transformers 5 reads rope_parameters, version 4 rope_theta")
    for key in zlab.UNSUPPORTED_ROPE_KEYS:
        if newer.get(key) is not None or older.get(key) is not None:
            seen.error(key, newer.get(key, older.get(key)), "no such key", "engines rotate otherwise than the drafter")
    if not seen.is_zlab and found["rope_type"] not in speculators.ROPE_KEYS:
        kinds = ", ".join(speculators.ROPE_KEYS)
        seen.error("rope_type", found["rope_type"], kinds, "vLLM computes it otherwise than Transformers")
    wanted = _rope(dict(target.rope), None)
    if found["rope_theta"] != wanted["rope_theta"] and not (seen.path / FINGERPRINT_FILE).exists():
        seen.warn(
            "rope_theta", found["rope_theta"], f"{wanted['rope_theta']}, the target's",
            "right only if it was trained so; a wrong one costs most of the acceptance, and raises nothing",
        )  # fmt: skip


def _rope(rope: dict[str, Any], theta: float | None) -> dict[str, Any]:
    """Rotary settings of either schema in one form."""
    kind = rope.pop("type", None)
    rope.setdefault("rope_type", kind or "default")
    if theta is not None:
        rope["rope_theta"] = theta
    return {key: value for key, value in rope.items() if value is not None}


def _check_mask_token(seen: DraftFolder, target: TargetFacts) -> None:
    section, key = (seen.section, "dflash_config.mask_token_id") if seen.is_zlab else (seen.config, "mask_token_id")
    mask = section.get("mask_token_id")
    size = target.shape.vocab_size
    if type(mask) is not int:
        seen.error(
            key,
            mask,
            f"a token from 0 to {size - 1}",
            "SGLang looks for a token <|MASK|>, `speculators` loads it and fails later",
        )
        return
    if not 0 <= mask < size:
        seen.error(
            key, mask, f"0 to {size - 1}: the target's embedding has {size} rows", "there is no embedding for it"
        )
        return
    uses = target.token_uses
    effect = "a mask in a text could not be told from one in a block, and it is not what a trained drafter saw"
    if uses is None:
        seen.warn(key, f"{mask}, and {target.path} has no tokenizer", "a token that is never used", effect, "tokenizer")
        uses = {token: "an end-of-turn token" for token in target.shape.eos_token_ids}
    if mask in uses:
        seen.error(key, f"{mask}: {uses[mask]}", "a token that is never used", effect, "tokenizer")


def token_uses(shape: TargetShape, tokenizer: Any) -> dict[int, str]:
    """Tokens that text, the chat template or generation can bring about; the others may be the mask."""
    added, template = tokenizer.added_tokens_decoder, str(getattr(tokenizer, "chat_template", None) or "")
    uses = {token: "an ordinary token of the tokenizer" for token in range(len(tokenizer)) if token not in added}
    for token, entry in added.items():
        if not entry.special:
            uses[token] = f"{entry.content}, which text may hold"
        elif entry.content in template:
            uses[token] = f"{entry.content}, which the chat template writes"
    for name in ("bos", "unk", "pad", "eos"):
        token = getattr(tokenizer, f"{name}_token_id", None)
        if token is not None:
            uses[token] = f"the tokenizer's {name} token"
    if shape.pad_token_id is not None:
        uses[shape.pad_token_id] = "the padding token"
    return uses | dict.fromkeys(shape.eos_token_ids, "an end-of-turn token")


def _check_engine_limits(seen: DraftFolder, target: TargetShape, engine: Engine | None) -> None:
    if engine not in (None, "vllm"):
        return
    for who, head_dim in (("the drafter", seen.layer.get("head_dim")), ("the target", target.head_dim)):
        if head_dim is not None and head_dim not in VLLM_CPU_HEAD_DIMS:
            sizes = ", ".join(map(str, VLLM_CPU_HEAD_DIMS))
            seen.warn(f"head_dim of {who}", head_dim, sizes, "vLLM refuses other sizes on a CPU")
    head = seen.config.get("markov_head_type")
    if seen.kind == "dspark" and head not in (None, *VLLM_MARKOV_HEADS):
        wanted, effect = " or ".join(VLLM_MARKOV_HEADS), "vLLM has no place for it and refuses the folder's tensors"
        (seen.warn if engine is None else seen.error)("markov_head_type", head, wanted, effect)
    if seen.kind in VLLM_V2_KINDS:
        seen.warn(
            "architectures", ARCHITECTURES[seen.layout][seen.kind], "a GPU, where vLLM runs it",
            "vLLM drafts with this kind by its V2 model runner alone, which needs Triton; on a CPU it refuses it",
        )  # fmt: skip
    if len(set(seen.layer.get("layer_types") or ())) > 1:
        seen.warn(
            "layer_types", "sliding and full attention", "one kind",
            "vLLM serves a mixture with its V2 model runner alone, and refuses it on a CPU",
        )  # fmt: skip


def _check_reader(seen: DraftFolder) -> None:
    """Whether this project's own reader takes it, which refuses what it does not know."""
    try:
        read_drafter(seen.path)
    except ModelError as error:
        seen.error(
            CONFIG_FILE, str(error), "a folder that `paceline eval` reads", "it cannot be measured here", "reader"
        )


def read_drafter(folder: Path | str) -> DFlashDrafter:
    """The drafter of a folder of either layout. Raises: ModelError."""
    return zlab.load_zlab(folder) if zlab.is_zlab(folder) else speculators.load_speculators(folder)

"""`paceline check`: whether engines read a drafter's folder as it was trained."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paceline.errors import ConfigError, ModelError, printable
from paceline.files import write_atomically
from paceline.models.imports import import_models

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from paceline.eval.decode import CachedTarget
    from paceline.eval.engine_vllm import VllmCheck
    from paceline.eval.parity import LayerParity, Measured
    from paceline.export.check import Engine, TargetFacts
    from paceline.export.findings import Finding
    from paceline.export.fingerprint import Fingerprint
    from paceline.models.draft import DFlashDrafter
    from paceline.models.target import Target


@dataclass
class CheckReport:
    """All that was checked.

    Attributes:
        findings: Errors first.
        parity: Numbers computed two ways.
        measured: Against the target's own answers; None without prompts.
        vllm: None where it was not served there.
        not_run: Checks that could not be run, and why.
    """

    draft: str
    target: str
    engine: str | None
    findings: list[Finding] = field(default_factory=list)
    parity: list[LayerParity] = field(default_factory=list)
    measured: Measured | None = None
    vllm: VllmCheck | None = None
    not_run: list[str] = field(default_factory=list)

    @property
    def num_errors(self) -> int:
        """Findings that are errors."""
        return sum(finding.severity == "error" for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        num_errors = self.num_errors
        return {
            "ok": num_errors == 0,
            "errors": num_errors,
            "warnings": len(self.findings) - num_errors,
            **dataclasses.asdict(self),
        }


def check(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Exported or published drafter, of either layout.")],
    target: Annotated[str, typer.Option(metavar="DIR|ID", help="The target: a model folder, GGUF file or hub id.")],
    engine: Annotated[
        Literal["zlab", "speculators", "vllm", "sglang"] | None,
        typer.Option(
            help="Who is to serve it; by default any. vllm: served there as well, and compared step by step; "
            "speculators: loaded there, and compared layer by layer."
        ),
    ] = None,
    engine_python: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Python interpreter that has the engine; by default this one."),
    ] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="JSONL as for `eval`: labels, settings and acceptance are measured on the answers."
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Longest answer in tokens.")] = 64,
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="Prompts to use, the first ones.")] = None,
    run_target: Annotated[
        bool,
        typer.Option("--run-target/--no-run-target", help="Load the target's weights; without, taps stay unchecked."),
    ] = True,
    adapter: Annotated[
        str | None, typer.Option(metavar="DIR", help="LoRA adapter that is merged into the target, a folder of PEFT's.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda or cuda:N.")] = "auto",
    gpus_per_target: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="GPUs that the target's layers are split over: --device and the next."),
    ] = 1,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the target.")
    ] = False,
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write the result as JSON; `-`: to stdout, and only that."),
    ] = None,
) -> None:
    """Check a drafter's folder against its target: keys, numbers, behaviour, engines. Exit code 1 if one is wrong."""
    from rich.console import Console

    import_models()
    from paceline.plan.resolve import resolve_device

    if not run_target and (prompts or engine == "vllm"):
        raise ConfigError("--no-run-target leaves nothing to decode with: leave out --prompts and --engine vllm")
    if adapter is not None and engine == "vllm":
        raise ConfigError(
            "--engine vllm starts the target as it is in its folder: write the merged one with `paceline merge`, and "
            "name it as --target in place of --adapter"
        )
    if gpus_per_target > 1 and engine == "vllm":
        raise ConfigError(
            f"--engine vllm serves the target on one GPU: leave --gpus-per-target {gpus_per_target} out, or the engine"
        )
    console = Console(stderr=json_file == "-", soft_wrap=True, highlight=False)
    report = run_checks(
        folder,
        target,
        engine,
        engine_python=engine_python,
        prompts=_token_ids(prompts, target, limit, trust_remote_code) if prompts else None,
        max_new_tokens=max_new_tokens,
        run_target=run_target,
        device=resolve_device(device),
        gpus_per_target=gpus_per_target,
        adapter=adapter,
        trust_remote_code=trust_remote_code,
    )
    print_report(console, report)
    text = json.dumps(report.as_dict(), indent=1)
    if json_file == "-":
        typer.echo(text)
    elif json_file is not None:
        write_atomically(Path(json_file), text + "\n")
    if report.num_errors:
        raise typer.Exit(1)


def run_checks(
    folder: Path,
    target: str,
    engine: Engine | None = None,
    *,
    engine_python: Path | None = None,
    prompts: Sequence[Sequence[int]] | None = None,
    max_new_tokens: int = 64,
    run_target: bool = True,
    device: torch.device | None = None,
    gpus_per_target: int = 1,
    adapter: str | None = None,
    trust_remote_code: bool = False,
) -> CheckReport:
    """Every check that can be run, cheap ones first; one that needs what an earlier one refused is left out, and said.

    Args:
        prompts: Token ids.
    Raises: ModelError if the folder is no drafter's or the target cannot be read; ConfigError, ServerError for engines.
    """
    import torch

    from paceline.cli.evaluate import check_parts
    from paceline.export.check import check_folder, read_drafter, read_target_facts

    facts = read_target_facts(target, trust_remote_code)
    report = CheckReport(str(folder), target, engine, check_folder(folder, facts, engine))
    try:
        drafter = read_drafter(folder)
    except ModelError as error:
        report.not_run.append(f"fingerprint, parity and engines: the drafter cannot be read ({error})")
        return report
    recorded = _read_fingerprint(report, folder)
    if recorded is not None:
        _compare_drafter(report, recorded, drafter)
    if _is_unfit(report, drafter, facts):
        return _sorted(report)
    if not run_target:
        report.not_run.append("taps, blocks and engines: --no-run-target")
        return _sorted(report)
    where = device or torch.device("cpu")
    check_parts(where, gpus_per_target, max(drafter.shape.target_layer_ids) + 1)  # of the part that trains
    options = {"device": where, "num_parts": gpus_per_target, "adapter": adapter}
    options |= {"trust_remote_code": trust_remote_code}
    part = _run_with_target(report, drafter, recorded, prompts, max_new_tokens, options)
    if engine == "speculators":
        _load_with_speculators(report, folder, drafter, part, engine_python)
    if engine == "vllm":
        _serve_with_vllm(report, folder, facts, drafter, engine_python, prompts, max_new_tokens)
    return _sorted(report)


def _run_with_target(
    report: CheckReport,
    drafter: DFlashDrafter,
    recorded: Fingerprint | None,
    prompts: Sequence[Sequence[int]] | None,
    max_new_tokens: int,
    options: dict[str, Any],
) -> Target:
    """Taps, fingerprint, blocks and, with prompts, measures. Returns: the part of the target that was loaded.

    Args:
        options: Of loading the target, but for the type.
    """
    import torch

    from paceline.eval.decode import CachedTarget
    from paceline.eval.parity import check_blocks, tap_parity
    from paceline.export.check import mismatch_findings
    from paceline.export.fingerprint import compare_target, layers_to_tap
    from paceline.models.target import Target

    options = options | {"dtype": torch.bfloat16 if options["device"].type == "cuda" else torch.float32}
    part = Target.load(report.target, layer_ids=layers_to_tap(drafter.shape), **options)
    report.parity += tap_parity(part)
    if recorded is not None and recorded.target is not None:
        report.findings += mismatch_findings(compare_target(recorded, drafter, part))
    whole = CachedTarget.load(report.target, drafter.shape.target_layer_ids, **options)
    report.parity += check_blocks(drafter, whole, part)
    report.findings += _parity_findings(report.parity)
    if prompts is None:
        report.not_run.append("labels, and the acceptance: --prompts FILE measures them on the target's own answers")
    else:
        _measure(report, drafter, whole, part, prompts, max_new_tokens)
    return part


def _read_fingerprint(report: CheckReport, folder: Path) -> Fingerprint | None:
    from paceline.export.findings import Finding
    from paceline.export.fingerprint import read_fingerprint
    from paceline.export.folder import FINGERPRINT_FILE

    try:
        recorded = read_fingerprint(folder)
    except ModelError as error:
        effect = "nothing says what was trained"
        report.findings.append(
            Finding("error", FINGERPRINT_FILE, str(error), "as exported", effect, found_by="fingerprint")
        )
        return None
    if recorded is not None and recorded.target is None:
        effect = "a tap off by one, or another target, cannot be told from the trained ones"
        wanted = "the target's part: `paceline export --target`"
        report.findings.append(
            Finding("warning", FINGERPRINT_FILE, "the drafter's part alone", wanted, effect, found_by="fingerprint")
        )
    return recorded


def _compare_drafter(report: CheckReport, recorded: Fingerprint, drafter: DFlashDrafter) -> None:
    from paceline.export.check import mismatch_findings
    from paceline.export.fingerprint import compare_drafter

    report.findings += mismatch_findings(compare_drafter(recorded, drafter))


def _is_unfit(report: CheckReport, drafter: DFlashDrafter, facts: TargetFacts) -> bool:
    """Whether target and drafter cannot be run together, which is then said."""
    from paceline.eval.decode import check_fit
    from paceline.models.loading import check_layer_ids

    shape = drafter.shape
    try:
        check_fit(drafter, facts.shape, shape.target_layer_ids)
        check_layer_ids(shape.target_layer_ids, facts.shape.num_layers)
        if not 0 <= shape.mask_token_id < facts.shape.vocab_size:
            raise ModelError(f"mask token {shape.mask_token_id} has no embedding")
    except (ModelError, ConfigError) as error:
        report.not_run.append(f"everything that runs the target: {error}")
        return True
    return False


def _parity_findings(rows: Sequence[LayerParity]) -> list[Finding]:
    from paceline.export.findings import Finding

    effect = "what is decoded is not what was trained: a fault of this program, please report it"
    return [
        Finding("error", row.name, f"{row.difference:.1e} apart", f"within {row.tolerance:.0e}", effect, "parity")
        for row in rows
        if not row.is_equal
    ]


def _measure(
    report: CheckReport,
    drafter: DFlashDrafter,
    whole: CachedTarget,
    part: Target,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
) -> None:
    from paceline.eval.parity import measure
    from paceline.export.findings import Finding

    report.measured = measure(drafter, whole, part, prompts, max_new_tokens)
    if report.measured.num_blocks == 0:
        report.not_run.append("labels: no answer is longer than a block; raise --max-new-tokens")
    for setting in report.measured.settings:
        if setting.is_better:
            seen = f"{setting.score:.3f} right with it, {setting.as_is:.3f} as the folder says, z={setting.z:.1f}"
            effect = "it looks like what the drafter was trained with: engines go by the folder and accept less"
            report.findings.append(Finding("error", setting.name, seen, "no better setting", effect, "prompts"))


def _load_with_speculators(
    report: CheckReport, folder: Path, drafter: DFlashDrafter, part: Target, python: Path | None
) -> None:
    from paceline.eval.engine_speculators import check_with_speculators, has_speculators
    from paceline.export.findings import Finding

    if report.num_errors:
        report.not_run.append("loaded by speculators: there are errors")
        return
    if not has_speculators(python):
        if python is not None:
            raise ConfigError(f"--engine-python {python} has no package `speculators`")
        report.not_run.append("loaded by speculators: the package is not installed here; --engine-python names another")
        return
    seen = check_with_speculators(folder, drafter, part, python=python)
    for kind, names in seen.loading.items():
        for name in names:
            effect = f"speculators {seen.version} goes on with what it has"
            report.findings.append(Finding("error", name, kind.replace("_", " "), "loaded", effect, "engine"))
    report.parity += seen.layers
    if not seen.layers:
        report.not_run.append("layers in speculators: with so short a window its mask is another one than engines'")
    for row in seen.layers:
        if not row.is_equal:
            effect = f"speculators {seen.version} computes something else"
            seen_there, wanted = f"{row.difference:.1e} apart", f"within {row.tolerance:.0e}"
            report.findings.append(Finding("error", row.name, seen_there, wanted, effect, "engine"))


def _serve_with_vllm(
    report: CheckReport,
    folder: Path,
    facts: TargetFacts,
    drafter: DFlashDrafter,
    python: Path | None,
    prompts: Sequence[Sequence[int]] | None,
    max_new_tokens: int,
) -> None:
    from paceline.eval.engine_vllm import check_with_vllm, find_vllm
    from paceline.export.findings import Finding

    place = Path(report.target).expanduser()
    if not place.is_dir():
        raise ConfigError(f"--engine vllm: --target {report.target} has to be a folder on this machine")
    if python is None:
        try:
            find_vllm()
        except ConfigError as error:
            report.not_run.append(f"served by vLLM: {error}")
            return
    ids = [list(prompt) for prompt in prompts or _random_prompts(facts.shape.vocab_size)]
    try:
        report.vllm = check_with_vllm(folder, place, ids, drafter=drafter, max_new_tokens=max_new_tokens, python=python)
    except ModelError as error:
        finding = Finding("error", "vllm", str(error), "a drafter that it serves", "it does not start", "engine")
        report.findings.append(finding)
        return
    if not (report.vllm.tokens_equal and report.vllm.steps_equal):
        seen = str(report.vllm.difference)
        wanted, effect = "equal answers and steps", f"vLLM {report.vllm.version} computes something else"
        report.findings.append(Finding("error", "vllm", seen, wanted, effect, "engine"))


def _random_prompts(vocab_size: int) -> list[list[int]]:
    import numpy as np

    draw = np.random.RandomState(2)
    return [draw.randint(0, vocab_size, size=length).tolist() for length in (5, 9, 14, 20)]


def _token_ids(files: Sequence[Path], target: str, limit: int | None, trust_remote_code: bool) -> list[list[int]]:
    from paceline.eval.evaluate import encode_prompts, read_prompts
    from paceline.models.loading import load_tokenizer

    return encode_prompts(read_prompts(list(files), limit), load_tokenizer(target, trust_remote_code=trust_remote_code))


def _sorted(report: CheckReport) -> CheckReport:
    report.findings.sort(key=lambda finding: finding.severity)
    return report


def print_report(console: Console, report: CheckReport) -> None:
    """Findings by severity, then what was computed and measured."""
    for finding in report.findings:
        style = "red" if finding.severity == "error" else "yellow"
        console.print(printable(f"{finding.severity:<7} {finding.key}: {finding.seen}"), style=style, markup=False)
        console.print(printable(f"        wanted {finding.wanted}"), markup=False)
        console.print(printable(f"        {finding.effect} [{finding.found_by}]"), markup=False)
    if report.parity:
        console.print("parity (largest difference over the largest value):")
    for row in report.parity:
        verdict = "ok" if row.is_equal else "DIFFERS"
        console.print(f"  {row.name:<9} {row.kind:<40} {row.difference:.1e} of {row.tolerance:.0e}  {verdict}")
    if report.measured is not None and report.measured.num_blocks:
        console.print(
            f"on the target's own answers: acceptance length {report.measured.acceptance_length:.3f} over "
            f"{report.measured.num_blocks} blocks, one at every place that leaves room for a whole block"
        )
        for setting in report.measured.settings:
            console.print(
                f"  {setting.name:<28} {setting.score:.3f} against {setting.as_is:.3f} as the folder says "
                f"(z {setting.z:+.1f})",
                markup=False,
            )
    if report.vllm is not None:
        served = report.vllm
        console.print(
            f"vLLM {served.version}: tokens {'equal' if served.tokens_equal else 'DIFFER'}, steps "
            f"{'equal' if served.steps_equal else 'DIFFER'}; acceptance length {served.acceptance_vllm:.3f} there, "
            f"{served.acceptance_ours:.3f} here"
        )
    for line in report.not_run:
        console.print(printable(f"not run: {line}"), style="yellow", markup=False)
    num_warnings = len(report.findings) - report.num_errors
    verdict = "served as it was trained, as far as was checked" if report.num_errors == 0 else "do not serve it"
    console.print(f"{report.num_errors} errors, {num_warnings} warnings: {verdict}", style="bold")

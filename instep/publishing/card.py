"""A model card made from a run: nothing in it is written by hand, nothing names a path of this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from instep import __version__
from instep.config import GrpoSettings, SftSettings
from instep.publishing.origin import Origin
from instep.runs.overview import changed_settings, figures_of

PRIVATE = ("data.path", "data.validation_path", "model.", "run.", "tracking.", "task.path", "task.test_path")
PRIVATE += ("adapter.start_from", "engine", "task.few_shot", "task.system_prompt")
"""Settings that name places of this machine, or are told elsewhere in the card."""
LONGEST_VALUE = 120


def write_card(
    run: Path, settings: SftSettings | GrpoSettings, summary: Mapping[str, Any], origin: Origin, repo: str
) -> str:
    """The README.md of a run's result in the repository `repo`."""
    full = settings.adapter.kind == "full"
    method = "GRPO" if isinstance(settings, GrpoSettings) else "SFT"
    parts = [
        _front_matter(origin, method, full),
        f"# {repo.partition('/')[2]}",
        _opening(settings, origin, method, full),
        _results(run, summary),
        _evaluations(run),
        _data(summary),
        _training(settings, summary, method),
        _loading(origin, repo, full),
        _terms(origin),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front_matter(origin: Origin, method: str, full: bool) -> str:
    lines = ["---", f"base_model: {origin.id}"]
    lines.append(f"base_model_relation: {'finetune' if full else 'adapter'}")
    lines.append(f"library_name: {'transformers' if full else 'peft'}")
    lines.append("pipeline_tag: text-generation")
    if origin.licence:
        lines.append(f"license: {origin.licence}")
    lines += ["tags:", "- instep", f"- {method.lower()}", *([] if full else ["- lora"]), "---"]
    return "\n".join(lines)


def _opening(settings: SftSettings | GrpoSettings, origin: Origin, method: str, full: bool) -> str:
    adapter = settings.adapter
    what = (
        "every parameter of"
        if full
        else f"a LoRA adapter (rank {adapter.rank}, alpha {_number(adapter.alpha)}, on "
        f"{', '.join(adapter.target_modules)}) for"
    )
    how = (
        "supervised fine-tuning on what the assistant said in conversations"
        if method == "SFT"
        else "GRPO with rewards that can be checked"
    )
    revision = f" at revision `{origin.revision}`" if origin.revision else ""
    name = f"[{origin.id}](https://huggingface.co/{origin.id}){revision}"
    note = f" The weights that it was trained on were {origin.note}." if origin.note else ""
    return f"This is {what} {name}, trained with instep {__version__} by {how}.{note}"


def _results(run: Path, summary: Mapping[str, Any]) -> str:
    """Held-out loss or reward, before and after."""
    before, after = summary.get("validation_before"), summary.get("validation_after")
    rows: list[tuple[str, str, str]] = []
    if before and after and "loss" in before and "loss" in after:
        chosen = str(summary.get("adapter_from") or "").startswith("best")
        best = summary.get("best_validation_loss")
        loss = best if chosen and best is not None else after["loss"]
        rows.append(("loss", f"{before['loss']:.4f}", f"{loss:.4f}"))
        if not chosen and "token_accuracy" in before and "token_accuracy" in after:
            rows.append(
                ("token accuracy", f"{before['token_accuracy']:.1%}", f"{after['token_accuracy']:.1%}")
            )
    reward = figures_of(run / "metrics.jsonl").get("validation/reward")
    if reward:
        first, last = reward["first"]["value"], reward["last"]["value"]
        rows.append(("reward", f"{first:.3f}", f"{last:.3f}"))
    if not rows:
        return "## Result\n\nNothing was held out in this run, so that there is no held-out figure."
    table = _table(("held out", "before", "after"), rows)
    return f"## Result\n\n{table}\n\nThe held-out conversations or tasks were not trained on."


def _evaluations(run: Path) -> str:
    """The newest evaluation of each task, with its interval."""
    newest: dict[str, dict[str, Any]] = {}
    for file in sorted((run / "evaluations").glob("*.json")):
        try:
            value = json.loads(file.read_text(encoding="utf-8"))
            newest[value["split"]] = value
        except (OSError, ValueError, KeyError, TypeError):
            continue
    rows = [row for value in newest.values() for row in _evaluation_rows(value)]
    if not rows:
        return ""
    table = _table(("tasks", "model", "accuracy", "95 % interval", "asked-for format"), rows)
    return f"## Evaluation\n\n{table}\n\nWilson intervals; the base model answered the same tasks."


def _evaluation_rows(value: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    split = value["split"]
    for model, modes in value["results"].items():
        for mode, figures in modes.items():
            accuracy, low, high, form = (
                figures.get(f"{split} {name}")
                for name in ("accuracy", "accuracy_low", "accuracy_high", "format_rate")
            )
            if accuracy is not None and low is not None and high is not None:
                yield (
                    f"{split} ({value['tasks']})",
                    f"{model}, {mode}",
                    f"{accuracy:.1%}",
                    f"{low * 100:.1f}–{high:.1%}",
                    "–" if form is None else f"{form:.0%}",
                )


def _data(summary: Mapping[str, Any]) -> str:
    data = summary.get("data")
    if not data:
        task = summary.get("task")
        text = f"Tasks: {PurePath(str(task)).name}; {summary.get('rollouts')} completions were sampled and rewarded."
        return f"## Data\n\n{text}" if task else ""
    names = ("conversations", "supervised_turns", "supervised_tokens", "windows")
    rows = [
        (
            name.replace("_", " "),
            *(f"{data[split].get(name, 0):,}" for split in ("train", "validation")),
        )
        for name in names
    ]
    lines = [_table(("", "trained on", "held out"), rows)]
    read = data.get("read") or {}
    if read.get("formats"):
        lines.append(
            "Formats: " + ", ".join(f"{count} {name}" for name, count in read["formats"].items()) + "."
        )
    if read.get("redactions"):
        found = ", ".join(f"{count} {kind}" for kind, count in sorted(read["redactions"].items()))
        lines.append(f"Replaced by placeholders before training: {found}.")
    lines.append(f"Data fingerprint (sha256 over tokens and weights): `{data['fingerprint']}`")
    return "## Data\n\n" + "\n\n".join(lines)


def _training(settings: SftSettings | GrpoSettings, summary: Mapping[str, Any], method: str) -> str:
    facts = [
        ("method", method),
        ("steps", f"{summary['steps']} ({summary.get('skipped_steps', 0)} skipped)"),
        ("result of", str(summary.get("adapter_from") or "the last step")),
        ("training time", f"{summary['training_seconds'] / 60:.1f} min"),
        ("engine", f"{summary['engine']} on {summary['device']}, {summary['precision']}"),
        ("optimizer", f"AdamW, learning rate {_number(settings.optimizer.learning_rate)}, "
                      f"{settings.optimizer.schedule} schedule"),
        ("seed", str(settings.seed)),
    ]  # fmt: skip
    if summary.get("supervised_tokens"):
        facts.insert(3, ("supervised tokens processed", f"{summary['supervised_tokens']:,}"))
    changed = [f"| `{name}` | `{value}` |" for name, value in _shown(settings)]
    more = ""
    if changed:
        more = (
            "\n\nSettings that differ from instep's defaults:\n\n| setting | value |\n|---|---|\n"
            + "\n".join(changed)
        )
    return "## Training\n\n" + _table(("", ""), facts) + more


def _shown(settings: SftSettings | GrpoSettings) -> Iterator[tuple[str, str]]:
    for name, (value, _) in sorted(changed_settings(settings).items()):
        if value is None or name.startswith(PRIVATE):
            continue
        text = ", ".join(map(_plain, value)) if isinstance(value, (list, tuple)) else _plain(value)
        yield (
            name,
            (text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + "…").replace("|", "\\|"),
        )


def _plain(value: Any) -> str:
    """A value without the folders of a path in it; one line."""
    text = str(value)
    file, colon, rest = text.partition(":")
    if isinstance(value, str) and PurePath(file).suffix and ("/" in file or "\\" in file):
        text = PurePath(file.replace("\\", "/")).name + colon + rest
    return " ".join(text.split())


def _loading(origin: Origin, repo: str, full: bool) -> str:
    name = repo.partition("/")[2]
    if full:
        python = (
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            f'model = AutoModelForCausalLM.from_pretrained("{repo}")\n'
            f'tokenizer = AutoTokenizer.from_pretrained("{repo}")'
        )
        shell = f'instep chat {repo}\ninstep generate "Hello" --model {repo}'
    else:
        revision = f', revision="{origin.revision}"' if origin.revision else ""
        python = (
            "from peft import PeftModel\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            f'base = AutoModelForCausalLM.from_pretrained("{origin.id}"{revision})\n'
            f'model = PeftModel.from_pretrained(base, "{repo}")\n'
            f'tokenizer = AutoTokenizer.from_pretrained("{origin.id}"{revision})'
        )
        shell = (
            f"hf download {repo} --local-dir {name}\n"
            f"instep chat {name}                 # PyTorch, MLX or JAX: --engine\n"
            f"instep fuse {name} -o {name}-fused   # a model that needs no adapter, for MLX and others"
        )
    library = "transformers" if full else "PEFT"
    return f"## How to use it\n\nWith {library}:\n\n```python\n{python}\n```\n\nWith instep:\n\n```\n{shell}\n```"


def _terms(origin: Origin) -> str:
    if not origin.terms:
        return f"## Licence\n\nThat of the base model: see [{origin.id}](https://huggingface.co/{origin.id})."
    return f"## Licence\n\nThe base model's licence is {origin.terms}; it applies to what is derived from it."


def _table(head: tuple[str, ...], rows: Any) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:g}"

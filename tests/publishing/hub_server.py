"""A stand-in for the Hugging Face Hub on 127.0.0.1 that speaks the upload protocol of huggingface_hub.

Asked are: the repository, its creation, whether the card's front matter is valid, how each file is to be sent
(preupload), where large ones go (LFS batch), their bytes (PUT, then verify), and the commit as lines of JSON. Only
what a commit names becomes a file.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

TOKEN = "hf_a_token_of_the_stand_in"


class Hub:
    """`files` and `private` by repository; `fail` maps a part of a path to the status that it answers."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.fail: dict[str, int] = {}
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, text in (headers or {}).items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(data)

    def _refused(self) -> bool:
        self.hub.requests.append(f"{self.command} {self.path}")
        for part, status in self.hub.fail.items():
            if part in self.path:
                self._body()
                self._answer({"error": "refused by the test"}, status)
                return True
        signed = "/objects/" in self.path and self.command == "PUT"  # such links carry their own signature
        if not signed and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._body()
            self._answer({"error": "no token"}, 401)
            return True
        return False

    def do_GET(self) -> None:
        if self._refused():
            return
        repo = self.path.removeprefix("/api/models/").partition("?")[0]
        if repo not in self.hub.files:
            self._answer({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
            return
        names = [{"rfilename": name} for name in self.hub.files[repo]]
        self._answer(
            {"_id": "1", "id": repo, "private": self.hub.private[repo], "sha": "0" * 40, "siblings": names,
             "tags": [], "downloads": 0, "likes": 0}
        )  # fmt: skip

    def do_PUT(self) -> None:
        if self._refused():
            return
        oid, data = self.path.rpartition("/")[2], self._body()
        if hashlib.sha256(data).hexdigest() != oid:
            self._answer({"error": "wrong digest"}, 400)
            return
        self.hub.objects[oid] = data
        self._answer({})

    def do_POST(self) -> None:
        if self._refused():
            return
        path, body = self.path.partition("?")[0], self._body()
        if path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            self._validate(json.loads(body)["content"])
        elif "/preupload/" in path:
            files = json.loads(body)["files"]
            large = [file["path"].endswith(".safetensors") for file in files]
            modes = [
                {"path": file["path"], "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False}
                for file, lfs in zip(files, large, strict=True)
            ]
            self._answer({"files": modes})
        elif path.endswith(".git/info/lfs/objects/batch"):
            self._batch(path, json.loads(body))
        elif path.endswith("/verify"):
            known = json.loads(body)["oid"] in self.hub.objects
            self._answer({}, 200 if known else 404)
        elif "/commit/" in path:
            self._commit(path, body)
        else:
            self._answer({"error": "unknown"}, 404)

    def _validate(self, card: str) -> None:
        """Whether the front matter of a README.md is YAML with fields that the Hub knows."""
        try:
            head = yaml.safe_load(card.split("---")[1])
            errors = [] if isinstance(head, dict) and isinstance(head.get("tags"), list) else ["no tags"]
        except (yaml.YAMLError, IndexError) as error:
            errors = [str(error)]
        told = [{"message": one} for one in errors]
        self._answer({"errors": told, "warnings": []}, 400 if errors else 200)

    def _create(self, value: dict[str, Any]) -> None:
        repo = f"{value['organization']}/{value['name']}"
        self.hub.files[repo] = {}
        self.hub.private[repo] = value.get("visibility") == "private" or value.get("private") is True
        self._answer({"url": f"{self.hub.url}/{repo}", "name": repo, "id": repo})

    def _batch(self, path: str, value: dict[str, Any]) -> None:
        objects = [
            {
                "oid": one["oid"],
                "size": one["size"],
                "actions": {
                    "upload": {"href": f"{self.hub.url}/objects/{one['oid']}"},
                    "verify": {"href": f"{self.hub.url}/verify"},
                },
            }
            for one in value["objects"]
        ]
        self._answer({"transfer": "basic", "objects": objects})

    def _commit(self, path: str, body: bytes) -> None:
        repo = path.removeprefix("/api/models/").partition("/commit/")[0]
        lines = [json.loads(line) for line in body.splitlines()]
        added: dict[str, bytes] = {}
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                added[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.hub.objects:
                    self._answer({"error": "object is missing"}, 400)
                    return
                added[value["path"]] = self.hub.objects[value["oid"]]
        self.hub.files[repo].update(added)
        oid = hashlib.sha1(body).hexdigest()
        self._answer({"success": True, "commitOid": oid, "commitUrl": f"{self.hub.url}/{repo}/commit/{oid}"})

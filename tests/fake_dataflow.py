"""Cloud Storage and the Dataflow service on localhost: as much of both as a mining run asks for.

Storage keeps objects in memory (upload, download, list, delete). A job that is
created is run for real when the caller says so: its staged graph goes through Beam's local runner
in this process, against the same storage. The protocols are those of the JSON API v1 and of
Dataflow's v1b3 REST API; written from the requests that gcsfs, google-cloud-storage and Beam send.
"""

from __future__ import annotations

import base64
import contextlib
import email
import hashlib
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import google_crc32c
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.portability import python_urns
from apache_beam.portability.api import beam_runner_api_pb2
from apache_beam.runners.portability.fn_api_runner.fn_runner import FnApiRunner

Execute = Callable[["FakeGoogle", dict[str, Any]], None]


class FakeGoogle:
    """State of the fake; `url` is where it listens. See `serving`.

    objects: "bucket/name" -> bytes. jobs: as submitted, with id and currentState. requests:
    "METHOD /path" of each request. execute: run in a thread for each new job; the job is DONE when
    it returns and FAILED, with the exception's text, when it raises.
    """

    def __init__(self, execute: Execute) -> None:
        self.objects: dict[str, bytes] = {}
        self.jobs: list[dict[str, Any]] = []
        self.messages: dict[str, list[str]] = {}
        self.requests: list[str] = []
        self.execute = execute
        self.url = ""
        self._uploads: dict[str, tuple[str, bytes]] = {}

    def store(self, key: str, data: bytes) -> dict[str, Any]:
        self.objects[key] = data
        return self.describe(key)

    def describe(self, key: str) -> dict[str, Any]:
        bucket, name = key.split("/", 1)
        data = self.objects[key]
        crc = google_crc32c.value(data).to_bytes(4, "big")
        return {
            "kind": "storage#object",
            "bucket": bucket,
            "name": name,
            "id": f"{key}/1",
            "size": str(len(data)),
            "generation": "1",
            "metageneration": "1",
            "storageClass": "STANDARD",
            "contentType": "application/octet-stream",
            "timeCreated": "2026-01-01T00:00:00.000Z",
            "updated": "2026-01-01T00:00:00.000Z",
            "md5Hash": base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode(),
            "crc32c": base64.b64encode(crc).decode(),
        }

    def list(self, bucket: str, prefix: str, delimiter: str) -> dict[str, Any]:
        items, prefixes = [], set()
        for key in sorted(self.objects):
            name = key.removeprefix(f"{bucket}/")
            if name == key or not name.startswith(prefix):
                continue
            head, cut, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
            if cut:
                prefixes.add(prefix + head + cut)
            else:
                items.append(self.describe(key))
        return {"kind": "storage#objects", "items": items, "prefixes": sorted(prefixes)}

    def create_job(self, job: dict[str, Any]) -> dict[str, Any]:
        for other in self.jobs:  # the service knows one live job of a name
            if other["name"] == job["name"] and other["currentState"] == "JOB_STATE_RUNNING":
                return other
        job |= {"id": f"job-{len(self.jobs) + 1}", "currentState": "JOB_STATE_RUNNING"}
        self.jobs.append(job)
        self.messages[job["id"]] = []
        threading.Thread(target=self._run, args=(job,), daemon=True).start()
        return job

    def _run(self, job: dict[str, Any]) -> None:
        state = "JOB_STATE_DONE"
        try:
            self.execute(self, job)
        except Exception as error:
            self.messages[job["id"]].append(f"Workflow failed. Causes: {error}")
            state = "JOB_STATE_FAILED"
        job["currentState"] = state

    def upload(self, key: str, data: bytes) -> str:
        number = str(len(self._uploads))
        self._uploads[number] = (key, data)
        return number

    def append(self, number: str, data: bytes, *, last: bool) -> dict[str, Any] | int:
        """Take one piece; the finished object, or how many bytes there are so far."""
        key, before = self._uploads[number]
        self._uploads[number] = (key, before + data)
        return self.store(key, before + data) if last else len(before + data)


def run_staged_graph(fake: FakeGoogle, job: dict[str, Any]) -> None:
    """An `execute` that runs the job's staged graph, as a worker would, in this process."""
    graph = staged_graph(fake, job)
    for environment in graph.components.environments.values():
        environment.urn, environment.payload = python_urns.EMBEDDED_PYTHON, b""
        del environment.dependencies[:]
    FnApiRunner().run_via_runner_api(graph, PipelineOptions()).wait_until_finish()


def staged_graph(fake: FakeGoogle, job: dict[str, Any]) -> Any:
    """The graph of a submitted job (a Pipeline proto)."""
    url: str = job["environment"]["sdkPipelineOptions"]["options"]["pipelineUrl"]
    return beam_runner_api_pb2.Pipeline.FromString(fake.objects[url.removeprefix("gs://")])


@contextlib.contextmanager
def serving(execute: Execute = run_staged_graph) -> Iterator[FakeGoogle]:
    """Both services on a free port until the block ends."""
    fake = FakeGoogle(execute)
    handler = type("Handler", (_Handler,), {"fake": fake})
    server = _Server(("localhost", 0), handler)
    server.daemon_threads = True
    fake.url = f"http://localhost:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def connected(execute: Execute = run_staged_graph) -> Iterator[FakeGoogle]:
    """`serving`, with this process's clients turned to it and without their long waits."""
    import gcsfs
    from apache_beam.internal.gcp import auth
    from apache_beam.runners.dataflow import dataflow_runner

    def short(seconds: float, sleep: Callable[[float], None] = time.sleep) -> None:
        sleep(min(seconds, 0.1))

    with serving(execute) as fake, pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", fake.url)
        # Else gcsfs asks by gRPC, and not the emulator, what kind of bucket it has.
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        # There are no credentials: Beam would look for them for half a minute.
        patch.setattr(auth._Credentials, "_credentials_init", True)
        patch.setattr(auth._Credentials, "_credentials", None)
        # Beam looks at a job every 5 s.
        patch.setattr(dataflow_runner, "time", SimpleNamespace(sleep=short, time=time.time))
        gcsfs.GCSFileSystem.clear_instance_cache()  # they know the address of another fake
        yield fake
        gcsfs.GCSFileSystem.clear_instance_cache()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # clients may hang up at any time
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    fake: FakeGoogle
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def _answer(self, status: int, body: Any = b"", **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", headers.pop("kind", "application/json"))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _handle(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.fake.requests.append(f"{self.command} {parts.path}")
        for pattern, method in _ROUTES:
            match = re.fullmatch(pattern, f"{self.command} {parts.path}")
            if match:
                method(self, query, body, *(unquote(group) for group in match.groups()))
                return
        self._answer(501, {"error": {"code": 501, "message": f"not faked: {self.path}"}})

    do_GET = do_POST = do_PUT = do_DELETE = _handle  # noqa: N815

    def bucket(self, query: dict[str, str], body: bytes, bucket: str) -> None:
        self._answer(200, {"kind": "storage#bucket", "name": bucket, "id": bucket,
                           "location": "US-CENTRAL1", "locationType": "region"})  # fmt: skip

    def list_objects(self, query: dict[str, str], body: bytes, bucket: str) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        self._answer(200, self.fake.list(bucket, prefix, delimiter))

    def get_object(self, query: dict[str, str], body: bytes, bucket: str, name: str) -> None:
        key = f"{bucket}/{name}"
        if key not in self.fake.objects:
            self._not_found(key)
        elif query.get("alt") != "media":
            self._answer(200, self.fake.describe(key))
        else:
            data, status, more = self.fake.objects[key], 200, {}
            piece = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
            if piece:
                start, size = int(piece[1]), len(data)
                stop = min(int(piece[2]) + 1, size) if piece[2] else size
                if start >= size:
                    self._answer(416, {"error": {"code": 416, "message": "range"}})
                    return
                data, status = data[start:stop], 206
                more = {"Content_Range": f"bytes {start}-{stop - 1}/{size}"}
            self._answer(status, data, kind="application/octet-stream", **more)

    def delete_object(self, query: dict[str, str], body: bytes, bucket: str, name: str) -> None:
        if self.fake.objects.pop(f"{bucket}/{name}", None) is None:
            self._not_found(f"{bucket}/{name}")
        else:
            self._answer(204)

    def upload(self, query: dict[str, str], body: bytes, bucket: str) -> None:
        name = query.get("name", "")
        if query["uploadType"] == "media":
            self._answer(200, self.fake.store(f"{bucket}/{name}", body))
        elif query["uploadType"] == "multipart":
            metadata, data = self._parts(body)
            name = name or json.loads(metadata)["name"]
            self._answer(200, self.fake.store(f"{bucket}/{name}", data))
        else:
            name = name or json.loads(body)["name"]
            number = self.fake.upload(f"{bucket}/{name}", b"")
            self._answer(200, {}, Location=f"{self.fake.url}/resumable/{number}")

    def resume(self, query: dict[str, str], body: bytes, number: str) -> None:
        # "bytes 0-9/*" has more to come, "bytes 10-12/13" and "bytes */13" are the end
        total = (self.headers.get("Content-Range") or "bytes 0-0/0").rpartition("/")[2]
        answer = self.fake.append(number, body, last=total != "*")
        if isinstance(answer, int):
            self._answer(308, b"", Range=f"bytes=0-{answer - 1}")
        else:
            self._answer(200, answer)

    def _parts(self, body: bytes) -> list[bytes]:
        """The payloads of a multipart body."""
        kind = (self.headers.get("Content-Type") or "").encode()
        message = email.message_from_bytes(b"Content-Type: " + kind + b"\r\n\r\n" + body)
        boundary = b"--" + str(message.get_boundary()).encode()
        pieces = body.split(boundary)[1:-1]
        payloads = [re.split(rb"\r?\n\r?\n", piece, maxsplit=1)[1] for piece in pieces]
        return [payload.removesuffix(b"\n").removesuffix(b"\r") for payload in payloads]

    def create_job(self, query: dict[str, str], body: bytes, project: str, region: str) -> None:
        self._answer(200, self.fake.create_job(json.loads(body)))

    def get_job(self, query: dict[str, str], body: bytes, project: str, region: str,
                job_id: str) -> None:  # fmt: skip
        found = [job for job in self.fake.jobs if job["id"] == job_id]
        if found:
            self._answer(200, found[0])
        else:
            self._not_found(job_id)

    def get_messages(self, query: dict[str, str], body: bytes, project: str, region: str,
                     job_id: str) -> None:  # fmt: skip
        messages = [
            {"id": str(number), "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
             "messageText": text, "messageImportance": "JOB_MESSAGE_ERROR"}
            for number, text in enumerate(self.fake.messages[job_id])
        ]  # fmt: skip
        self._answer(200, {"jobMessages": messages})

    def _not_found(self, what: str) -> None:
        self._answer(404, {"error": {"code": 404, "message": f"No such object: {what}"}})


_BUCKET, _JOBS = "/storage/v1/b/([^/]+)", "/v1b3/projects/([^/]+)/locations/([^/]+)/jobs"
_ROUTES: list[tuple[str, Any]] = [
    (f"GET {_BUCKET}", _Handler.bucket),
    (f"GET {_BUCKET}/o/?", _Handler.list_objects),
    (f"GET (?:/download)?{_BUCKET}/o/([^/]+)", _Handler.get_object),
    (f"DELETE {_BUCKET}/o/([^/]+)", _Handler.delete_object),
    (f"POST /upload{_BUCKET}/o", _Handler.upload),
    ("(?:PUT|POST) /resumable/([0-9]+)", _Handler.resume),
    (f"POST {_JOBS}", _Handler.create_job),
    (f"GET {_JOBS}/([^/]+)", _Handler.get_job),
    (f"GET {_JOBS}/([^/]+)/messages", _Handler.get_messages),
]

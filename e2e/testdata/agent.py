"""An agent's loop against a worker, with nothing but the HTTP API: agent.py URL TOKEN IMAGE.

It makes a sandbox of the image, puts a small project with a bug into it, finds the bug by
its tests, edits, takes the change out, and grades it in a second sandbox that the agent never
touched, with tests that the first one never saw. Prints one line a step; an assertion that
does not hold ends it with status 1."""

import base64
import hashlib
import io
import json
import sys
import tarfile
import threading
import time
import uuid

import requests

URL, TOKEN, IMAGE = sys.argv[1:4]

PROJECT = {
    "project/stats.py": "def mean(xs):\n    return sum(xs) / (len(xs) - 1)\n",
    "project/test_stats.py": "from stats import mean\n\ndef test_mean():\n    assert mean([1, 2, 3]) == 2\n",
    "project/odd name \n\u00fc": "left alone\n",
}
FIXED = "def mean(xs):\n    return sum(xs) / len(xs)\n"


class Worker:
    def __init__(self, url, token):
        self.url = url
        self.session = requests.Session()
        self.session.headers["Authorization"] = "Bearer " + token

    def call(self, method, path, want=200, **kw):
        r = self.session.request(method, self.url + "/v1/" + path, timeout=300, **kw)
        assert r.status_code == want, (method, path, r.status_code, r.text)
        assert r.headers["X-Request-Id"]
        return r

    def create(self, key=None, want=201, **spec):
        headers = {"Idempotency-Key": key} if key else {}
        return self.call("POST", "sandboxes", want, json=dict(image=IMAGE, network={}, **spec), headers=headers).json()


class Sandbox:
    """One sandbox, used with its own token alone."""

    def __init__(self, made):
        self.id = made["id"]
        self.worker = Worker(URL, made["token"])

    def call(self, method, path, want=200, **kw):
        return self.worker.call(method, f"sandboxes/{self.id}/{path}", want, **kw)

    def run(self, shell=None, **spec):
        spec.setdefault("exec_id", uuid.uuid4().hex)
        if shell is not None:
            spec["shell"] = shell
        r = self.call("POST", "exec", json=spec).json()
        return r.get("exit_code"), base64.b64decode(r["stdout_b64"]), base64.b64decode(r["stderr_b64"]), r

    def read(self, path):
        r = self.call("GET", "files", params={"path": path})
        assert r.headers["X-Content-Sha256"] == hashlib.sha256(r.content).hexdigest()
        return r.content

    def write(self, path, data, **params):
        digest = hashlib.sha256(data).hexdigest()
        r = self.call("PUT", "files", params=dict(path=path, **params), data=data, headers={"X-Content-Sha256": digest}).json()
        assert r["sha256"] == digest and r["size"] == len(data), r


def tar_of(files):
    buf = io.BytesIO()
    with tarfile.open(fileobj=buf, mode="w", format=tarfile.PAX_FORMAT) as t:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            t.addfile(info, io.BytesIO(text.encode()))
    return buf.getvalue()


def step(text):
    print(text, flush=True)


def main():
    worker = Worker(URL, TOKEN)
    key = uuid.uuid4().hex
    made = worker.create(key, memory_mb=512, labels={"task": "stats"}, ttl_s=600, group="g1")
    again = worker.create(key, want=200, memory_mb=512, labels={"task": "stats"}, ttl_s=600, group="g1")
    assert again["id"] == made["id"] and again["token"] == made["token"], again
    clash = worker.call("POST", "sandboxes", 409, json={"image": IMAGE, "network": {}}, headers={"Idempotency-Key": key}).json()
    assert clash["error"]["code"] == "idempotency_conflict", clash
    assert made["image_digest"].startswith("sha256:") and made["state"] == "running"
    assert [s["id"] for s in worker.call("GET", "sandboxes", params={"label": "task=stats"}).json()["sandboxes"]] == [made["id"]]
    step(f"made {made['id']} of {made['image_digest']}")
    box = Sandbox(made)

    # The project goes in, and its tests fail.
    box.call("POST", "tar", 204, params={"path": "/tmp"}, data=tar_of(PROJECT))
    code, out, err, _ = box.run("python3 -m pytest -q -p no:cacheprovider", cwd="/tmp/project")
    assert code == 1 and b"1 failed" in out, (code, out, err)
    assert box.run("python3 -c 'import socket; print(socket.gethostbyname(\"localhost\"))'")[1] == b"127.0.0.1\n"
    step("the tests fail")

    # What an agent does: look, think (paused), edit, test. Reading does not wake it.
    code, out, _, _ = box.run(argv=["cat", "stats.py"], cwd="/tmp/project")
    assert out.decode() == PROJECT["project/stats.py"]
    assert box.call("POST", "pause").json()["state"] == "paused"
    assert box.read("/tmp/project/stats.py").decode() == PROJECT["project/stats.py"]
    assert worker.call("GET", f"sandboxes/{box.id}").json()["state"] == "paused"
    refused = box.call("PUT", "files", 409, params={"path": "/tmp/large"}, data=bytes(32 << 20)).json()  # and told, though all of it is sent first
    assert refused["error"]["code"] == "not_ready", refused
    assert box.call("POST", "resume").json()["state"] == "running"
    box.write("/tmp/project/stats.py", FIXED.encode())
    assert box.read("/tmp/project/stats.py").decode() == FIXED
    code, out, err, _ = box.run("python3 -m pytest -q -p no:cacheprovider", cwd="/tmp/project")
    assert code == 0 and b"1 passed" in out, (code, out, err)
    step("edited: the tests pass")

    # At most once, whoever asks again; another command under the same id is refused.
    once = dict(exec_id="once", shell="echo x >> /tmp/count; cat /tmp/count")
    assert box.call("POST", "exec", json=once).json()["stdout_b64"] == base64.b64encode(b"x\n").decode()
    assert box.call("POST", "exec", json=once).json()["stdout_b64"] == base64.b64encode(b"x\n").decode()
    assert box.read("/tmp/count") == b"x\n"
    box.call("POST", "exec", 409, json=dict(exec_id="once", shell="true"))
    step("an exec runs once")

    # Bytes are bytes; a stream that is dropped is taken up where it was.
    code, out, err, _ = box.run("printf '\\000\\377\\n'; printf e >&2; exit 7")
    assert (code, out, err) == (7, b"\x00\xff\n", b"e")
    spec = dict(exec_id="stream", shell="i=0; while [ $i -lt 200 ]; do echo line $i; i=$((i+1)); sleep 0.01; done")
    got, offset = b"", 0
    with box.call("POST", "exec", json=spec, headers={"Accept": "application/x-ndjson"}, stream=True) as r:
        for line in r.iter_lines():
            f = json.loads(line)
            if f["t"] == "out":
                assert f.get("off", 0) == offset
                got += base64.b64decode(f["b64"])
                offset = len(got)
            if offset > 100:
                break
    end = None
    with box.call("GET", "exec/stream/stream", params={"stdout": offset}, stream=True) as r:
        for line in r.iter_lines():
            f = json.loads(line)
            if f["t"] == "out":
                assert f["off"] == len(got)
                got += base64.b64decode(f["b64"])
            if f["t"] == "exit":
                end = f["state"]
    assert end["exit_code"] == 0 and got == b"".join(b"line %d\n" % i for i in range(200)), (end, got[-50:])
    assert box.call("GET", "exec/stream/output", params={"offset": 5}).content == got[5:]
    step("a stream goes on after it was cut")

    # A session keeps folder, variables and jobs; what bash cannot parse answers at once.
    assert box.run("cd /tmp/project; X=5", session="s")[0] == 0
    code, out, _, _ = box.run("pwd; echo $X", session="s")
    assert (code, out) == (0, b"/tmp/project\n5\n"), (code, out)
    code, _, _, r = box.run("echo 'unterminated", session="s")
    assert r["reason"] == "syntax_error", r
    assert box.run("echo $X", session="s")[1] == b"5\n"
    step("a session keeps its state")

    # Limits: time, output. Whatever the command started is gone.
    before = time.monotonic()
    code, _, _, r = box.run("sleep 600 & sleep 600", timeout_ms=500)
    assert r["reason"] == "cmd_timeout" and time.monotonic() - before < 500, r
    code, out, _, _ = box.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert b"sleep 600" not in out, out
    code, out, _, r = box.run("head -c 3000000 /dev/zero", max_output_bytes=1000000)
    assert len(out) == 1000000 and r["stdout"]["dropped_bytes"] == 2000000 and code == 0, r["stdout"]
    step("limits hold")

    # Stdin in pieces, from another thread.
    def feed():
        box.call("POST", "exec/cat/stdin", params={"offset": 0}, data=b"one ")
        box.call("POST", "exec/cat/stdin", params={"offset": 0}, data=b"one ")  # again: passed over
        box.call("POST", "exec/cat/stdin", params={"offset": 4, "end": "true"}, data=b"two")

    box.call("POST", "exec", 202, json=dict(exec_id="cat", argv=["cat"], open_stdin=True, detach=True))
    t = threading.Thread(target=feed)
    t.start()
    st = box.call("GET", "exec/cat", params={"wait_ms": 30000}).json()
    t.join()
    assert st["exit_code"] == 0 and box.call("GET", "exec/cat/output").content == b"one two"
    step("stdin comes in pieces")

    # The change goes out, and only that.
    raw = box.call("GET", "tar", params={"path": "/tmp/project", "exclude": ["test_*", "__pycache__", ".pytest_cache"]}).content
    with tarfile.open(fileobj=io.BytesIO(raw)) as t:
        patch = {m.name.removeprefix("./"): t.extractfile(m).read().decode() for m in t if m.isfile()}
    assert patch == {"stats.py": FIXED, "odd name \n\u00fc": "left alone\n"}, patch
    end = worker.call("DELETE", f"sandboxes/{box.id}").json()
    assert end["reason"] == "killed_by_user" and end["blame"] == "user", end
    assert worker.call("DELETE", f"sandboxes/{box.id}").json() == end
    gone = worker.call("POST", f"sandboxes/{box.id}/exec", 410, json=dict(exec_id="late", argv=["true"])).json()["error"]
    assert gone["code"] == "gone" and gone["end"]["reason"] == "killed_by_user", gone
    step("the change is out, the sandbox is gone")

    # The grade: another sandbox of the same digest, with tests that only it has.
    grade = Sandbox(worker.create(role="grade", memory_mb=512, labels={"task": "stats"}, shares=[{"name": "tests/stats", "target": "/tests"}]))
    grade.call("POST", "tar", 204, params={"path": "/tmp"}, data=tar_of({"candidate/" + k: v for k, v in patch.items()}))
    code, out, err, r = grade.run("PYTHONPATH=/tmp/candidate python3 -m pytest -q -p no:cacheprovider /tests", timeout_ms=120000, env=["PYTHONDONTWRITEBYTECODE=1"])
    assert code == 0 and b"2 passed" in out, (code, out, err)
    assert grade.run("echo x > /tests/test_private.py")[0] != 0
    assert worker.call("DELETE", f"sandboxes/{grade.id}").json()["evidence"]["image_io_errors"] == 0
    step("reward 1")


main()

"""The doctor: what it says about things that are missing, broken, or not what they seem."""

import json
import socket
import threading
from pathlib import Path

import pytest

from metagym import cli
from metagym.experiments import doctor


def test_this_environment_is_found_in_order(capsys):
    assert doctor.python().status == doctor.import_name().status == doctor.toy().status == "ok"
    found = {f.name: f.status for f in doctor.packages()}
    # A C++ build, and hundreds of MB: they may be there or not.
    for large in ("alfworld", "tpu-compile", "swebench", "parquet"):
        assert found.pop(f"extra [{large}]") in ("ok", "missing")
    assert found == {
        "base packages": "ok",
        "extra [train]": "ok",
        "extra [minihack]": "ok",
        "extra [dev]": "ok",
        "extra [swe]": "ok",
    }
    assert doctor.weights().status == "ok"


@pytest.mark.parametrize("check", [doctor.jax, doctor.minihack])
def test_what_is_installed_is_tried(check):
    finding = check()
    assert finding.status == "ok", finding


def test_another_package_of_the_same_import_name_is_found(tmp_path, monkeypatch):
    folder = tmp_path / "metagym-0.3.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: metagym\nVersion: 0.3\n")
    (folder / "top_level.txt").write_text("metagym\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    finding = doctor.import_name()
    assert finding.status == "broken"
    assert "distribution metagym installs" in finding.detail
    assert finding.fix.startswith("pip uninstall metagym metagym-rl")


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(doctor, "requirements", lambda: {"": ["numpy"], "swe": ["no-such-package"]})
    base, swe = doctor.packages()
    assert base.status == "ok"
    assert (swe.status, swe.detail) == ("missing", "not installed: no-such-package")
    assert swe.fix == "pip install 'metagym-rl[swe]'"


def test_code_that_fails_crashes_or_hangs_is_broken(monkeypatch):
    assert doctor._try("x", "raise OSError('no disk')", "fix").detail == "OSError: no disk"
    assert doctor._try("x", "import os; os.abort()", "fix").detail.startswith("killed by signal 6")
    monkeypatch.setattr(doctor, "TIMEOUT_S", 0.5)
    assert doctor._try("x", "import time; time.sleep(60)", "fix").detail == "no answer in 0.5 s"


def test_broken_weights_are_recognised(tmp_path, monkeypatch):
    (tmp_path / "m.gguf").write_text("an error page")

    class File:
        name = "m.gguf"

        def locate(self) -> Path:
            return tmp_path / self.name

    monkeypatch.setattr(doctor.metadata, "files", lambda _: [File()])
    assert doctor.weights().status == "broken"
    (tmp_path / "m.gguf").write_bytes(b"GGUF....")
    assert doctor.weights().status == "ok"


def test_docker_is_asked_over_its_socket(tmp_path, monkeypatch):
    path = tmp_path / "docker.sock"
    monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
    assert doctor.docker().status == "missing"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()

        def answer():
            connection, _ = server.accept()
            connection.recv(4096)
            body = b'{"Version": "27.0"}'
            connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        finding = doctor.docker()
        thread.join()
    assert (finding.status, finding.detail) == ("ok", f"27.0 at unix://{path}")


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("missing", 0), ("broken", 1)])
def test_exit_code_and_json(status, code, monkeypatch, capsys):
    finding = doctor.Finding("a thing", status, "detail", "do this")
    monkeypatch.setattr(doctor, "CHECKS", (lambda: finding,))
    assert cli.main(["doctor", "--json"]) == code
    assert json.loads(capsys.readouterr().out) == [
        {"name": "a thing", "status": status, "detail": "detail", "fix": "do this"}
    ]
    assert cli.main(["doctor"]) == code
    assert "-> do this" in capsys.readouterr().out

"""`metagym serve`, as it is used: the process, its one line, a request, its end."""

import json
import signal
import subprocess
import sys
import urllib.request

import pytest

from metagym import cli


def test_it_serves_until_it_is_told_to_end():
    command = [sys.executable, "-m", "metagym.cli", "serve", "--model=random", "--port=0", "--control-port=0"]
    command += ["--context=64", "--max-tokens=4", "--slots=1", "--open=try"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout is not None
            told = json.loads(program.stdout.readline())
            session = told["session"]
            body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "temperature": 0.1}).encode()
            request = urllib.request.Request(f"{session['url']}/v1/chat/completions", body)
            request.add_header("authorization", f"Bearer {session['key']}")
            with urllib.request.urlopen(request, timeout=60) as answer:
                said = json.load(answer)
            assert 1 <= said["usage"]["completion_tokens"] <= 4
            read = urllib.request.Request(f"{told['control_url']}/sessions/{session['id']}/export")
            read.add_header("authorization", f"Bearer {told['control_key']}")
            with urllib.request.urlopen(read, timeout=10) as answer:
                (row,) = json.load(answer)
            assert sum(row["trainable"]) == said["usage"]["completion_tokens"]
        finally:
            program.send_signal(signal.SIGTERM)
        assert program.wait(30) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model=random", "--host=0.0.0.0"], "control_key"),
        (["--model=nowhere/at-all"], "--model=nowhere/at-all"),
        (["--context=1"], "at least 2"),
        (["--backend=sglang", "--model=nothing"], "sglang"),
    ],
)
def test_wrong_arguments_are_told(arguments, said, capsys, monkeypatch):
    monkeypatch.delenv("METAGYM_CONTROL_KEY", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert cli.main(["serve", *arguments]) == 2
    assert said in capsys.readouterr().err.lower()

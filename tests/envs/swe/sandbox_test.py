"""Every kind of sandbox: one shell, deadlines, caps, decoding, files; and what must not get out."""

import os
import resource
import threading
import time
from pathlib import Path

import pytest

from metagym.envs.swe.shell import Capped
from metagym.errors import InputError, SandboxError
from metagym.protocols import Sandbox
from metagym.types import Limits


def processes(sandbox) -> list[str]:
    """What runs in the sandbox, the supervisor and its shell left out."""
    script = (
        "for d in /proc/[0-9]*; do [ ${d#/proc/} -le 1 ] || [ ${d#/proc/} = $$ ] || "
        'mapfile -d "" c <$d/cmdline && echo "${d#/proc/} ${c[*]}"; done 2>/dev/null; :'
    )
    return [line for line in sandbox.exec(script, 10).output.splitlines() if "proc" not in line]


def test_one_shell(start):
    sandbox = start()
    assert isinstance(sandbox, Sandbox)
    result = sandbox.exec("cat a.txt; export X=1; cd /tmp", 10)
    assert (result.output, result.exit_code, result.timed_out, result.limit) == ("hi\n", 0, False, None)
    assert sandbox.exec("echo $X $PWD; false", 10).output == "1 /tmp\n"
    assert sandbox.exec("false", 10).exit_code == 1
    assert sandbox.exec("echo err >&2", 10).output == "err\n"
    # A folder, variables and input for one command alone.
    given = sandbox.exec("echo $Q $PWD; cat", 10, cwd="/usr", env={"Q": "a'b $X"}, stdin=b"\x01in")
    assert given.output == "a'b $X /usr\n\x01in"
    assert sandbox.exec("echo $Q- $PWD", 10).output == "- /tmp\n"
    assert sandbox.exec("echo 'unclosed", 10).exit_code != 0
    assert sandbox.exec("if then", 10).exit_code != 0
    assert sandbox.exec("echo \0nul; # no end of line", 10).output == "nul\n"


def test_the_shell_ends_and_another_begins(start):
    sandbox = start()
    sandbox.exec("cd /usr", 10)
    result = sandbox.exec("echo out; exit 3", 10)
    assert result.exit_code == 3
    assert result.output.startswith("out\n[the shell ended; a new one was started")
    assert sandbox.exec("pwd", 10).output == "/usr\n"
    assert sandbox.exec("exec true", 10).exit_code == 0
    assert sandbox.exec("exec >/dev/null 2>&1 </dev/null; set -eu", 10).exit_code == 0
    assert sandbox.exec("echo ok", 10).output == "ok\n"


def test_output_of_any_kind(start):
    """CASES 41, 42: bytes that are not text, and the next command's output is its own."""
    sandbox = start()
    assert sandbox.exec(r"printf '\xff\xfe\x00abc'", 10).output == "��\x00abc"
    assert len(sandbox.exec("cat /bin/ls", 10).output) > 1000
    assert sandbox.exec("echo ok", 10).output == "ok\n"
    sandbox.exec(r"printf '\0E0123456789abcdef 0 /\0'; printf '\0X0\0X1'", 10)  # marks that are none
    assert sandbox.exec("echo ok", 10).output == "ok\n"
    sandbox.exec("(sleep 0.2; echo late) &", 10)
    time.sleep(0.4)
    assert sandbox.exec("echo ok", 10).output == "ok\n"


def test_a_deadline(start):
    """CASES 43, 45, 49: what came before it is kept, and nothing is left running, whatever it ignores."""
    sandbox = start()
    sandbox.exec("export GONE=1; cd /usr", 10)
    before = time.monotonic()
    result = sandbox.exec(
        "echo a; trap '' TERM INT HUP; (trap '' TERM; setsid sleep 987) & sleep 986 & wait", 0.5
    )
    assert time.monotonic() - before < 10
    assert (result.exit_code, result.timed_out) == (None, True)
    assert result.output.startswith("a\n[no end within 0.5 s")
    assert not [p for p in processes(sandbox) if "sleep 98" in p]
    assert sandbox.exec("echo -$GONE- $PWD", 10).output == "-- /usr\n"
    assert sandbox.exec("while :; do :; done", 0.3).timed_out
    assert sandbox.exec("mkfifo /tmp/$$.f; cat /tmp/$$.f", 0.3).timed_out  # waits for input
    assert sandbox.exec("cat; read x; echo $?", 10).output == "1\n"  # there is none, so it ends at once
    assert sandbox.exec("echo ok", 10).output == "ok\n"


def test_a_slow_engine_is_not_the_commands_fault(start):
    """A deadline counts from when the command begins, however late it gets there."""
    sandbox = start()
    channel = sandbox._shell._channel
    send = channel.send

    def late(data):
        if b"\\0B" in bytes(data[:200]):  # what is to begin
            time.sleep(1.0)
        return send(data)

    channel.send = late
    before = time.monotonic()
    result = sandbox.exec("echo done", 0.8)
    assert (result.output, result.timed_out) == ("done\n", False)
    assert time.monotonic() - before >= 1.0


def test_output_without_end(start):
    """`yes` for a second costs no memory."""
    sandbox = start()
    sandbox.exec("echo warm", 10)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = sandbox.exec("yes", 1)
    assert result.timed_out
    assert result.dropped > 1 << 20
    assert len(result.output) < 2 * sandbox.cap
    assert "bytes left out" in result.output
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 << 10  # kB
    whole = sandbox.exec("seq 1 100000", 10)
    assert whole.output.startswith("1\n2\n3\n")
    assert whole.output.endswith("99999\n100000\n")


def test_files(start):
    sandbox = start()
    content = bytes(range(256)) * 5000
    where = sandbox.exec("pwd", 10).output.strip() + "/new folder/ü 'x'"
    sandbox.write(where, content)
    assert sandbox.read(where) == content
    sandbox.write(where, b"")
    assert sandbox.read(where) == b""
    with pytest.raises(FileNotFoundError, match="no-such"):
        sandbox.read("/no-such")
    with pytest.raises(FileNotFoundError):
        sandbox.read("/usr")
    sandbox.write(where, b"12345")
    with pytest.raises(OSError, match="longer than 4"):
        sandbox.read(where, limit=4)
    with pytest.raises(OSError, match="can't be written"):
        sandbox.write("/proc/x/y", b"echo this is no command >/tmp/bad\n" * 100)
    assert sandbox.exec("echo ok; cat /tmp/bad", 10).output.startswith("ok\ncat: ")


def test_writes_stay_inside(start, repo):
    sandbox = start()
    sandbox.exec("echo more >>a.txt; rm -f b; mkdir d; echo x >d/y", 10)
    assert sandbox.exec("cat a.txt d/y", 10).output == "hi\nmore\nx\n"
    assert (repo / "a.txt").read_text() == "hi\n"
    assert [p.name for p in repo.iterdir()] == ["a.txt"]
    other = start()
    assert other.exec("cat a.txt; ls", 10).output == "hi\na.txt\n"


def test_snapshot(start):
    sandbox = start()
    sandbox.exec("echo one >one; rm a.txt; mkdir d; echo x >d/x; ln -s one link; chmod +x one", 10)
    image = start.factory.snapshot(sandbox)
    sandbox.exec("echo two >two", 10)
    usr = [] if start.kind != "docker" else [__import__("metagym.types").types.Mount("/usr", "/usr")]
    where = "/testbed" if start.kind != "local" else "."
    restored = start.factory.start(image, usr)
    assert restored.exec(f"cd {where}; ls; cat d/x link; test -x one", 10).output == "d\nlink\none\nx\none\n"
    restored.exec("rm -r d; mkdir d; echo z >d/z", 10)
    again = start.factory.start(start.factory.snapshot(restored), usr)
    assert again.exec(f"cd {where}; ls d", 10).output == "z\n"
    assert start.factory.start(image, usr).exec(f"cd {where}; ls d", 10).output == "x\n"
    with pytest.raises(InputError, match="snapshot"):
        start.factory.snapshot(object())


def test_closed_and_lost(start):
    sandbox = start()
    sandbox.close()
    sandbox.close()
    with pytest.raises(SandboxError, match="closed"):
        sandbox.exec("echo", 10)
    with pytest.raises(InputError, match="no image 'nothing"):
        start.factory.start("nothing:here")


def test_a_sandbox_that_is_killed_is_infra(start):
    """CASES 47: the next call says so, at once."""
    sandbox = start()
    if start.kind == "docker":
        start.factory.client.api.kill(sandbox.id)
    else:
        sandbox._process.kill()
    before = time.monotonic()
    time.sleep(0.3)
    with pytest.raises(SandboxError, match="gone"):
        sandbox.exec("sleep 60", 60)
    assert time.monotonic() - before < 5


def test_nothing_gets_out(start_isolated):
    sandbox = start_isolated()
    assert (
        sandbox.exec("echo x >/dev/tcp/127.0.0.1/1; echo x >/dev/tcp/1.1.1.1/80", 10).output.count("unreach")
        >= 1
    )
    assert sandbox.exec(
        "ls /sys/class/net 2>/dev/null | grep -v '^lo$'; grep -c : /proc/net/dev", 10
    ).output in ("1\n", "lo\n")
    status = sandbox.exec("cat /proc/self/status", 10).output
    assert {"CapEff:\t0000000000000000", "CapBnd:\t0000000000000000", "NoNewPrivs:\t1"} <= set(
        status.splitlines()
    )
    assert sandbox.exec("id -u", 10).output == "1000\n"
    assert sandbox.exec("unshare -Um true", 10).exit_code != 0
    assert sandbox.exec("mount -t tmpfs x /tmp", 10).exit_code != 0
    assert sandbox.exec("touch /usr/x || touch /x", 10).exit_code != 0
    assert sandbox.exec("kill -9 1; kill -STOP 1; kill -USR2 1; echo still here", 10).output.endswith(
        "still here\n"
    )
    assert not [p for p in processes(sandbox) if "pytest" in p]
    assert "root" not in sandbox.exec("ls /root /home 2>/dev/null; ls /work 2>/dev/null; :", 10).output


def test_a_host_user_without_power(bubblewrap, repo):
    """Started by root, a sandbox is another user's on the host; started by someone else, that one's."""
    sandbox = bubblewrap.start("host")
    status = Path(f"/proc/{sandbox.init_pid}/status").read_text()
    user = os.getuid() or 64000
    assert f"Uid:\t{user}\t{user}\t{user}\t{user}\n" in status
    assert os.getuid() != 0 or "Groups:\t \n" in status


def test_fork_bomb(start_isolated):
    """CASES 50: contained, told as the agent's own limit, and over at the deadline."""
    sandbox = start_isolated(limits=Limits(pids=64))
    sandbox.exec("b() { b | b & }; b", 0.5)
    result = sandbox.exec("sleep 1; ls; ls; ls", 2)
    assert result.limit == "pids"
    if not result.timed_out:
        assert sandbox.exec("while :; do :; done", 0.2).timed_out
    assert sandbox.exec("ls", 10).exit_code == 0
    assert not [p for p in processes(sandbox) if "bomb" in p]


def test_memory(start_isolated):
    sandbox = start_isolated(limits=Limits(memory=128 << 20))
    result = sandbox.exec("head -c 500M /dev/zero | tail | wc -c", 30)
    if result.exit_code == 0:  # a pipe's status is its last command's
        result = sandbox.exec("x=$(head -c 500M /dev/zero | tr '\\0' x); echo survived", 30)
    assert result.limit == "memory"
    assert "survived" not in result.output


def test_disk(start_isolated):
    """A 10 GB file ends at the limit."""
    sandbox = start_isolated(limits=Limits(disk=8 << 20))
    result = sandbox.exec("head -c 10G /dev/zero >big", 30)
    assert (result.exit_code != 0, result.limit) == (True, "disk")
    assert sandbox.exec("rm big; echo ok >small; cat small", 10).output == "ok\n"


def test_limits_without_control_groups(tmp_path, repo):
    """Of processes and memory: a user namespace of its own, so that it binds root's sandboxes too."""
    from metagym.envs.swe.bubblewrap import BubblewrapFactory

    factory = BubblewrapFactory(ledger=tmp_path / "ledger", control_groups=False)
    try:
        one = factory.start("host", limits=Limits(pids=20, memory=512 << 20))
        other = factory.start("host", limits=Limits(pids=20, memory=512 << 20))
        one.exec("for i in $(seq 40); do sleep 60 & done", 5)
        assert len([p for p in processes(one) if "sleep" in p]) < 20
        assert other.exec("ls | cat | cat", 10).exit_code == 0
        assert other.exec("head -c 1G /dev/zero | tail -c 900M | wc -c", 20).output.strip() != "943718400"
    finally:
        factory.close()


def test_many_at_once(start_isolated):
    """CASES 53: heavy output of many sandboxes at the same time."""
    count = 12 if start_isolated.kind == "bubblewrap" else 4
    sandboxes = [start_isolated() for _ in range(count)]
    results = {}

    def work(i):
        results[i] = sandboxes[i].exec(f"seq 1 200000; echo {i}", 60)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[i].output.splitlines()[-1] for i in range(count)] == [str(i) for i in range(count)]
    assert not any(r.timed_out for r in results.values())


def test_capped():
    capped = Capped(10)
    for _ in range(1000):
        capped.add(b"abc")
    assert capped.bytes() == b"abcab" + b"bcabc"
    assert capped.dropped == 2990
    assert capped.text() == "abcab\n[... 2990 bytes left out ...]\nbcabc"
    capped = Capped(10)
    capped.add(b"0123456789")
    assert (capped.text(), capped.dropped) == ("0123456789", 0)

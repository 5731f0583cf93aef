"""A user's code has a process per call, without rights, and what it imports is read before."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from penstock.common.config.settings import RewarderSettings
from penstock.common.errors import ConfigError
from penstock.common.own_code import KEPT
from penstock.common.sandbox.settings import Code
from penstock.common.sandbox.sources import imports_of
from penstock.common.wire.reward_spec import RewardSpec
from penstock.rewarders.reward_process import scores_of
from penstock.rewarders.scoring_pool import ScoringFailed, ScoringPool
from tests.helpers import needs_root
from tests.rewarders.rights import DOCKER_MASK, keep_capabilities, own_capabilities
from tests.rewarders.test_pool import arguments

ROOT = Path(__file__).parents[2]
NOT_CHECKING = "from typing import TYPE_CHECKING\nif not TYPE_CHECKING:"
SETUID, SYS_ADMIN = 1 << 7, 1 << 21
OVERLONG = {"soft_max_length": 8, "soft_cache_length": 4}


@pytest.fixture(scope="module")
def pool() -> Iterator[ScoringPool]:
    with ScoringPool(RewarderSettings(workers=1, timeout_s=60, memory_gib=2)) as pool:
        yield pool


def own(folder: Path, code: str) -> RewardSpec:
    path = folder / "own.py"
    path.write_text(code)
    return RewardSpec("own", source=str(path), digest=hashlib.sha256(code.encode()).hexdigest())


def score(pool: ScoringPool, spec: RewardSpec, *completions: str) -> tuple[float | None, ...]:
    return pool.score(spec, arguments(*completions or ("a",))).values


def failure(pool: ScoringPool, spec: RewardSpec) -> str:
    with pytest.raises(ScoringFailed) as found:
        score(pool, spec)
    return str(found.value)


def status_lines(name: str) -> str:
    return (
        f"def own(completions):\n"
        f"    lines = dict(line.split(':', 1) for line in open('/proc/self/status'))\n"
        f"    return [float(int(lines[name], 16)) for name in {name}.split()]\n"
    )


@needs_root
def test_a_call_has_no_capability_and_gets_no_new_ones(pool: ScoringPool, tmp_path: Path) -> None:
    spec = own(tmp_path, status_lines("'CapInh CapPrm CapEff CapBnd CapAmb NoNewPrivs'"))
    assert score(pool, spec, *"abcdef") == (0.0, 0.0, 0.0, 0.0, 0.0, 1.0)


@pytest.mark.parametrize("at_import", ["", "FILE = open('/dev/null')\n"], ids=["forked", "not forked"])
def test_a_call_can_terminate_the_processes_that_it_forks(
    pool: ScoringPool, tmp_path: Path, at_import: str
) -> None:
    code = (
        "import multiprocessing, time\n"
        "def own(completions):\n"
        "    process = multiprocessing.get_context('fork').Process(target=time.sleep, args=(3600,))\n"
        "    process.start()\n"
        "    process.terminate()\n"
        "    process.join()\n"
        "    return [float(process.exitcode)]\n"
    )
    assert score(pool, own(tmp_path, at_import + code)) == (-15.0,)


@needs_root
def test_the_processes_that_a_rewarder_keeps_are_within_the_limit(
    pool: ScoringPool, tmp_path: Path
) -> None:
    """Of four rewarders of one user, with a process for each of eight codes; calls leave a quarter."""
    limit = "import resource as r\nlimit = lambda: r.getrlimit(r.RLIMIT_NPROC)[0]\nALL = limit()\n"
    code = limit + "def own(completions): return [ALL, limit()]"
    most = 4 * (1 * (1 + 8 + 1) + 64.0)
    assert score(pool, own(tmp_path, code), "a", "b") == (most, 0.75 * most)


@needs_root
def test_a_refused_fork_names_the_limit_and_the_remedy(pool: ScoringPool, tmp_path: Path) -> None:
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_NPROC, (1, 1))\n"
    code = limit + "def own(completions): return [1.0]"
    found = failure(pool, own(tmp_path, code))
    assert "cannot be started" in found
    assert "may run 1 processes and threads on this machine" in found
    assert "set REWARDER_USER to a user of its own" in found


@needs_root
def test_a_link_beside_the_code_is_not_followed_to_what_its_user_cannot_read(
    pool: ScoringPool, tmp_path: Path
) -> None:
    home, secrets = tmp_path / "home", tmp_path / "secrets"
    for folder in (home, secrets):
        folder.mkdir(mode=0o700)
        (folder / "hidden.py").write_text("SECRET = 7")
    (home / "linked.py").symlink_to(secrets / "hidden.py")
    (home / "shadow.py").symlink_to("/etc/shadow")
    (home / "package").symlink_to(secrets)
    (home / "inside.py").symlink_to(home / "hidden.py")
    os.mkfifo(home / "pipe.py")
    code = (
        "from penstock.common.own_code import KEPT\n"
        "from inside import SECRET\n"
        "def own(completions):\n"
        "    if not completions:\n"
        "        import linked, shadow, pipe, package.hidden\n"
        "    return [float(sum(path.startswith('HOME') for path in KEPT))]\n"
    )
    spec = own(home, code.replace("HOME", str(home)))
    assert score(pool, spec) == (2.0,)  # own.py and inside.py


@needs_root
def test_modules_beside_a_file_that_nobody_can_read_are_read_before(
    pool: ScoringPool, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    (home / "package" / "inner").mkdir(parents=True)
    home.chmod(0o700)
    (home / "beside.py").write_text(f"{NOT_CHECKING} from package.inner import deep\nVALUE = deep.VALUE")
    (home / "package" / "__init__.py").touch()
    (home / "package" / "inner" / "deep.py").write_text("from ..other import VALUE")
    (home / "package" / "other.py").write_text("import numpy\nVALUE = float(numpy.float32(7.0))")
    code = "def own(completions):\n    from beside import VALUE\n    return [VALUE]"
    spec = own(home, code)
    assert score(pool, spec) == (7.0,)
    assert os.getuid() == 0, "the code ran elsewhere"


@pytest.mark.parametrize("place", ["in the call", "on import"])
def test_a_variable_that_the_sandbox_hides_is_named_with_its_setting(
    pool: ScoringPool, tmp_path: Path, place: str
) -> None:
    code = "import os\ndef own(completions): return [float(os.environ['MY_KEY'])]"
    code = f"{code}\nos.environ['MY_KEY']" if place == "on import" else code
    found = failure(pool, own(tmp_path, code))
    assert "KeyError: 'MY_KEY' (hidden by the sandbox: set REWARDER_ENVIRONMENT" in found
    found = failure(pool, own(tmp_path, "def own(completions): return [{}['MY_KEY']]"))
    assert "sandbox" not in found


@needs_root
@pytest.mark.parametrize("place", ["in the call", "on import"])
def test_a_data_file_that_cannot_be_read_is_named_with_a_remedy(
    pool: ScoringPool, tmp_path: Path, place: str
) -> None:
    (tmp_path / "data.txt").touch(mode=0o600)
    read = f"open({str(tmp_path / 'data.txt')!r})"
    code = "def own(completions): return [0.0]"
    code = f"{read}\n{code}" if place == "on import" else code.replace("return", f"{read}; return")
    found = failure(pool, own(tmp_path, code))
    assert f"'{tmp_path / 'data.txt'}' (user id 65534: copy the file to where this user can" in found


@needs_root
def test_a_program_that_the_code_names_is_not_run_with_the_rights_of_root(
    pool: ScoringPool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = "def own(completions):\n    if not completions:\n        import this\n    return [1.0]"
    assert score(pool, own(tmp_path, code)) == (1.0,)
    assert "Zen of Python" not in capfd.readouterr().out


@needs_root
@pytest.mark.parametrize("place", ["in the call", "on import"])
def test_an_import_that_is_refused_is_never_a_score(
    pool: ScoringPool, tmp_path: Path, place: str
) -> None:
    (tmp_path / "hidden.py").write_text("VALUE = 1.0")
    caught = "try:\n    importlib.import_module('hid' + 'den')\nexcept ImportError:\n    pass\n"
    if place == "on import":
        code = f"import importlib\n{caught}def own(completions): return [0.0]"
    else:
        inside = "".join(f"    {line}\n" for line in caught.splitlines())
        code = f"import importlib\ndef own(completions):\n{inside}    return [0.0]"
    tmp_path.chmod(0o700)
    found = failure(pool, own(tmp_path, code))
    assert "the import of hidden was refused: nobody cannot read" in found
    assert str(tmp_path / "hidden") in found
    assert "Copy it to where nobody can read it" in found


@needs_root
def test_a_folder_that_cannot_be_searched_is_named(pool: ScoringPool, tmp_path: Path) -> None:
    code = (
        f"import sys\ndef own(completions):\n    sys.path.insert(0, {str(tmp_path / 'more')!r})\n"
        "    try:\n        import anything\n    except ImportError:\n        return [0.0]"
    )
    (tmp_path / "more").mkdir(mode=0o700)
    found = failure(pool, own(tmp_path, code))
    assert f"cannot read {tmp_path / 'more' / 'anything'}" in found
    assert f"put {tmp_path / 'more'} on PYTHONPATH" in found


@needs_root
def test_the_working_directory_is_no_way_into_a_closed_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "closed" / "open").mkdir(parents=True)
    (tmp_path / "closed").chmod(0o700)
    (tmp_path / "closed" / "open" / "secret").write_text("hush")
    monkeypatch.chdir(tmp_path / "closed" / "open")
    code = "import os\ndef own(completions): return [float(os.path.exists('secret'))]"
    with ScoringPool(RewarderSettings(workers=1, timeout_s=60, memory_gib=2)) as pool:
        assert score(pool, own(tmp_path, code)) == (0.0,)


def test_code_whose_import_hangs_is_a_failure(tmp_path: Path) -> None:
    spec = own(tmp_path, "import time\ntime.sleep(600)")
    with ScoringPool(RewarderSettings(workers=1, timeout_s=5, memory_gib=2)) as pool:
        assert "the import of this code took more than 5 s" in pool.check(spec)
        assert score(pool, RewardSpec("soft_overlong", options=OVERLONG), "a") == (0.0,)


def test_code_that_writes_nonsense_on_import_is_a_failure(pool: ScoringPool, tmp_path: Path) -> None:
    code = (
        "import os\nfor number in range(3, 50):\n    try:\n"
        "        while True: os.write(number, b'\\0\\0\\0\\x07{\"x\":1}')\n    except OSError: pass\n"
    )
    assert pool.check(own(tmp_path, code)) != ""


def test_an_optional_package_that_is_not_installed_is_a_plain_error(
    pool: ScoringPool, tmp_path: Path
) -> None:
    code = (
        "def own(completions):\n    try:\n        import nosuchpackage\n"
        "    except ModuleNotFoundError:\n        return [3.0]"
    )
    assert score(pool, own(tmp_path, code)) == (3.0,)


def test_what_a_call_patches_is_not_seen_by_the_next(pool: ScoringPool, tmp_path: Path) -> None:
    code = (
        "import json, os\nseen = []\n"
        "def own(completions):\n    seen.append(1)\n    json.dumps = os._exit\n    return [len(seen)]"
    )
    spec = own(tmp_path, code.replace("json.dumps = os._exit", "json.extra = 1; os.environ['X'] = '1'"))
    assert [score(pool, spec) for _ in range(3)] == [(1.0,)] * 3


@needs_root
def test_built_in_rewards_run_as_a_user_whom_own_code_cannot_signal(
    pool: ScoringPool, tmp_path: Path
) -> None:
    spec = own(tmp_path, "def own(completions): return [1.0]")
    built_in = pool.run("os:getresuid")
    theirs = pool.run("os:getresuid", code=Code(spec.source, spec.digest))
    assert theirs == [65534] * 3
    assert not {*built_in} & {0, *theirs}


@needs_root
def test_ended_processes_that_nobody_has_collected_prevent_no_call() -> None:
    """They count in the limit of the user's processes."""
    program = (
        "import os, resource\nfrom penstock.common.sandbox import body\n"
        "os.setresuid(54322, 54322, 54322)\n"
        "resource.setrlimit(resource.RLIMIT_NPROC, (3, 3))\n"
        "for _ in range(2):\n    if os.fork() == 0: os._exit(0)\n"
        "if body._fork() == 0: os._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_a_process_that_the_first_list_misses_is_killed_too() -> None:
    """It has moved to another parent while the list was made."""
    program = (
        "import os, time\nfrom penstock.common.sandbox import keeper\n"
        "below, lists = keeper.below, [list]\n"
        "keeper.below = lambda pid: lists.pop()() if lists else below(pid)\n"
        "pid = os.fork() or time.sleep(3600)\n"
        "assert keeper.Keeper(None, pid, -1)._sweep(set())\n"
        "assert keeper._is_zombie(pid), 'the process lives'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_code_that_ignores_the_ends_of_its_processes_is_imported_once(
    pool: ScoringPool, tmp_path: Path
) -> None:
    code = (
        "import signal, time\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "BEGUN = time.monotonic()\ndef own(completions): return [BEGUN]"
    )
    first, second = (score(pool, own(tmp_path, code)) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("os.kill(os.getppid(), 9); return [1.0]", ""),
        ("os.kill(os.getppid(), 19); return [1.0]", ""),
        ("os.closerange(3, 200); time.sleep(60)", "exit code -9|closed the connection"),
        ("half(); os._exit(0)", "ended in the middle of its answer"),
        ("half(b'\\xff' * 4); time.sleep(60)", "an answer of 4294967295 bytes"),
        ("half(b'\\0\\0\\0\\x02{}' * 2); os._exit(0)", "sent more than its answer"),
        ("half(b'\\0\\0\\0\\x03NaN'); os._exit(0)", "no JSON"),
        ("import atexit; atexit.register(os._exit, 5); sys.exit(3)", "SystemExit: 3"),
        ("threading.Thread(target=time.sleep, args=(60,)).start(); return [1.0]", ""),
    ],
)
def test_a_call_ends_at_most_its_process(
    pool: ScoringPool, tmp_path: Path, line: str, words: str
) -> None:
    code = (
        "import os, socket, sys, threading, time\n"
        "def half(data=b'\\0\\0\\0\\x63{'):\n"
        "    for number in range(3, 200):\n"
        "        try:\n            socket.socket(fileno=os.dup(number)).send(data)\n"
        "        except OSError: pass\n"
        f"def own(completions):\n    if completions == ['b']: return [2.0]\n    {line}\n"
    )
    spec = own(tmp_path, code)
    if words:
        with pytest.raises(ScoringFailed, match=words):
            score(pool, spec)
    else:
        assert score(pool, spec) == (1.0,)
    assert score(pool, spec, "b") == (2.0,)


@pytest.mark.parametrize(
    ("start", "reason"),
    [
        ("threading.Thread(target=time.sleep, args=(600,), daemon=True).start()", "1 threads"),
        ("opened = open('/dev/null')", "1 open files"),
        ("child = subprocess.Popen(['sleep', '600'])", "processes"),
    ],
)
def test_code_that_cannot_be_forked_keeps_its_process_for_some_calls(
    pool: ScoringPool, tmp_path: Path, capfd: pytest.CaptureFixture[str], start: str, reason: str
) -> None:
    code = (
        f"import subprocess, threading, time\nseen = []\n{start}\n"
        "def own(completions):\n    seen.append(1)\n    return [len(seen)]"
    )
    spec = own(tmp_path, code)
    assert [score(pool, spec) for _ in range(102)][98:] == [(99.0,), (100.0,), (1.0,), (2.0,)]
    output = "".join(capfd.readouterr())
    assert output.count(f"has started {reason} on import") == 1


def test_output_is_logged_up_to_a_limit(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = (
        "import os\ndef own(completions):\n    print('a \\x1b[31m line')\n"
        "    for _ in range(300): os.write(2, b'x' * 99 + b'\\n')\n"
        "    for _ in range(300): os.write(1, b'y' * 65536)\n    return [1.0]"
    )
    with ScoringPool(RewarderSettings(workers=1, timeout_s=60, memory_gib=2)) as pool:
        assert score(pool, own(tmp_path, code)) == (1.0,)
    output = "".join(capfd.readouterr())
    assert "a \\x1b[31m line" in output
    assert output.count("further lines are not logged") == 1
    assert len(output) < 100_000


def test_files_in_shared_memory_do_not_stay(pool: ScoringPool, tmp_path: Path) -> None:
    code = (
        "import os\ndef own(completions):\n    before = os.path.exists('/dev/shm/left-by-a-test')\n"
        "    open('/dev/shm/left-by-a-test', 'w').write('x')\n    return [float(before)]"
    )
    spec = own(tmp_path, code)
    if not own_capabilities() & SYS_ADMIN:
        pytest.skip("/dev/shm is shared where namespaces are not allowed")
    assert [score(pool, spec) for _ in range(2)] == [(0.0,), (0.0,)]
    assert not Path("/dev/shm/left-by-a-test").exists()


def test_what_a_reward_starts_may_be_ended_politely(pool: ScoringPool, tmp_path: Path) -> None:
    code = (
        "import subprocess\ndef own(completions):\n"
        "    child = subprocess.Popen(['sleep', '600'])\n    child.terminate()\n"
        "    return [child.wait()]"
    )
    assert score(pool, own(tmp_path, code)) == (-15.0,)


@pytest.mark.parametrize(
    ("logged", "words"),
    [
        ("for n in range(40): log_extra(str(n), ['x' * 30_000])", "larger than 1048576 bytes"),
        ("log_extra('a', [float('nan')])", "log_extra has NaN or infinity"),
        (
            "for n in range(2000): log_metric(str(n), 1.0)",
            "2000 names for a group; expected at most 1024",
        ),
        ("log_metric('x' * 201, 1.0)", "a name of 201 characters"),
        ("log_metric('x', 1e31)", "expected a finite number within 1e\\+30"),
        ("log_extra('x', [eval('[' * 40 + ']' * 40)])", "deeper than 32"),
    ],
)
def test_what_a_call_may_log_has_one_limit(
    pool: ScoringPool, tmp_path: Path, logged: str, words: str
) -> None:
    spec = own(tmp_path, f"def own(completions, log_extra, log_metric):\n    {logged}\n    return [1.0]")
    with pytest.raises(ScoringFailed, match=words):
        score(pool, spec)


def answer(**changes: object) -> dict[str, object]:
    return {"values": [1.0], "extra": {}, "metrics": {}} | changes


@pytest.mark.parametrize(
    "sent",
    [
        None, [], "text", answer(values=[]), answer(values=[1.0, 2.0]), answer(values=["1"]),
        answer(values=[True]), answer(values=[1e10]), answer(values={"0": 1.0}), answer(extra=[]),
        answer(values=[float("inf")]), answer(extra={"a": "b"}), answer(extra={"a": []}),
        answer(extra={"a": [10**30]}), answer(extra={"a": [float("inf")]}),
        answer(extra={"a": ["\ud800"]}),
        answer(extra={"a" * 201: [1]}), answer(extra={"a": ["x" * 2**20]}), answer(metrics={"a": "1"}),
        answer(metrics={"a": 1e31}), answer(metrics={"a": None}), answer(metrics=None), answer(more=1),
    ],
)  # fmt: skip
def test_the_parent_checks_every_answer_itself(sent: object) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        scores_of(sent, 1)


def run_with(mask: int, output: Path) -> subprocess.CompletedProcess[str]:
    """Start a pool in a process whose root has only these capabilities, and whose output is a file."""
    code = (
        "from penstock.common.config.settings import RewarderSettings\n"
        "from penstock.rewarders.scoring_pool import RewardSpec, ScoringPool\n"
        "columns = {'prompts': [''], 'completions': ['5'], 'completion_ids': [[1]], 'solution': ['5']}\n"
        "with ScoringPool(RewarderSettings(workers=1, timeout_s=60)) as pool:\n"
        "    print(pool.score(RewardSpec('accuracy'), columns).values)\n"
    )
    with output.open("w") as file:
        return subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, stdout=file, stderr=file, check=False,
            preexec_fn=partial(keep_capabilities, mask), timeout=300,
        )  # fmt: skip


@needs_root
def test_a_pool_starts_with_the_capabilities_of_a_container(tmp_path: Path) -> None:
    assert run_with(DOCKER_MASK, tmp_path / "log").returncode == 0
    assert "(1.0,)" in (tmp_path / "log").read_text()
    assert "This machine allows no namespaces" in (tmp_path / "log").read_text()


@needs_root
def test_a_missing_capability_is_named(tmp_path: Path) -> None:
    assert run_with(DOCKER_MASK & ~SETUID, tmp_path / "log").returncode == 1
    text = (tmp_path / "log").read_text()
    assert ConfigError.__name__ in text
    assert "REWARDER_USER=nobody: root lacks CAP_SETUID here" in text


def test_dots_above_the_top_package_name_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        KEPT, "c.py", b"from .. import x\nfrom ...y import z\nfrom ....y import z\nfrom .....y import z"
    )
    assert list(imports_of("a.b.c", Path("c.py"), is_package=False)) == ["a", "a.x"]
